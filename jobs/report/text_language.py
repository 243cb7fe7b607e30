"""Defines the language of texts under tables: Jinja2 with its own functions and filters.

    {{ value("time", phase="forward", size="xl") | n }} ms; 2.7b: {{ state(size="2.7b") }}

A number that was not measured is rendered as `not measured`, whatever arithmetic is applied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from jobs.errors import TableError, nearest
from jobs.formatting import format_number, format_scalar
from jobs.published.figures import published_figure
from jobs.run import Run, varying
from jobs.sweep.schema import STATISTICS, units_of, unknown_value

# Jinja's filters that keep NotMeasured; `int`, for example, would turn it into 0.
_FILTERS = ("abs", "capitalize", "join", "lower", "replace", "round", "sum", "trim", "upper")
LOOKUPS = ("value", "state", "published")
FUNCTIONS = (*LOOKUPS, "max", "min")
ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
BESIDE_PARAMETERS = ("device", "repeat")  # beside a run's parameters


class NotMeasured:
    """A number that was not measured. Arithmetic and filters leave it as it is."""

    def __str__(self) -> str:
        return "not measured"

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> NotMeasured:
        return self

    def _compared(self, _: Any) -> NoReturn:
        raise Compared

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _same
    __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = __getitem__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # type: ignore[assignment]


class Compared(Exception):
    """Raised when a text compares a number that was not measured."""


def _of_measured(choose: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Make max or min take NotMeasured: the result is NotMeasured if any argument is."""

    def chosen(*numbers: Any) -> Any:
        if len(numbers) == 1 and isinstance(numbers[0], list):
            numbers = tuple(numbers[0])
        missing = [number for number in numbers if isinstance(number, NotMeasured)]
        return missing[0] if missing else choose(numbers)

    return chosen


def _n(number: Any, digits: int = 4) -> str:
    """Format a number with this many significant digits."""
    return format_number(number, digits) if isinstance(number, (int, float)) else str(number)


def _pct(number: Any, digits: int = 3) -> str:
    """Format a share as percent: 0.1234 is 12.3%."""
    return (
        f"{format_number(100 * number, digits)}%"
        if isinstance(number, (int, float))
        else str(number)
    )


def environment() -> SandboxedEnvironment:
    """Return a sandboxed Jinja environment with the filters and functions of texts.

    The lookups (`TextFunctions`) are passed when a template is rendered.
    """
    jinja = SandboxedEnvironment(
        undefined=StrictUndefined,
        finalize=lambda value: format_number(value) if isinstance(value, float) else value,
    )
    kept = {name: jinja.filters[name] for name in _FILTERS}
    jinja.filters = kept | {"n": _n, "pct": _pct}
    jinja.globals = {"range": jinja.globals["range"]}
    jinja.globals |= {"max": _of_measured(max), "min": _of_measured(min), "dict": dict}
    return jinja


class TextFunctions:
    """The lookups that a text can call.

    `params` select a run by its parameters, or a row of published figures by its columns. `value`
    and `state` need records, so a subclass implements them.
    """

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """Return a value of the one run with these parameters, as a table would show it."""
        raise NotImplementedError

    def state(self, **params: Any) -> str:
        """Return the status of the one run with these parameters; ok if any repeat is ok."""
        raise NotImplementedError

    def published(self, file: str, column: str, **params: Any) -> Any:
        """Return a published figure from the one row with these columns; a number if possible."""
        found = published_figure(str(file), str(column), **params)
        if found is None:
            raise TableError(f"{file} has no {column} for {format_params(params)}")
        try:
            return float(found)
        except ValueError:
            return found

    @property
    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in LOOKUPS}


def value_problem(name: Any, statistic: Any = "median", unit: Any = None) -> str | None:
    """Return the error in a value's name, statistic or unit, or None."""
    unknown = unknown_value(str(name))
    if unknown:
        return f"value {unknown}"
    if statistic not in ONE_NUMBER:
        return f"no statistic {statistic!r}{nearest(str(statistic), ONE_NUMBER)}"
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "none but its own"
        return f"value {name!r} cannot be shown in {unit!r} (valid: {valid})"
    return None


def ambiguity(runs: list[Run], params: dict[str, Any], devices: Iterable[str] = ()) -> str | None:
    """Return the error for parameters that fit several runs, or None if they fit at most one.

    The error names the parameters in which the runs differ.
    """
    differ = {name: [format_scalar(run.params[name]) for run in runs] for name in varying(runs)}
    if len(set(devices)) > 1:
        differ["device"] = list(devices)
    if not differ:
        return None
    names = "; ".join(f"{name}: {', '.join(dict.fromkeys(has))}" for name, has in differ.items())
    which = f"{len(runs)} runs have {format_params(params)}" if params else f"{len(runs)} runs fit"
    return f"{which}; give also what they differ in ({names})"


def format_params(params: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name}={format_scalar(given)}" for name, given in params.items()) or "any kind"
    )
