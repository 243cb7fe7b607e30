"""Functions and filters for the Jinja2 templates of the texts below tables.

    {{ value("time", phase="forward", size="xl") | n }} ms; 2.7b: {{ state(size="2.7b") }}

`value` returns a metric of a run, `state` returns the status of a run, and `published` returns a
figure of other authors. The filters `n` and `pct` format numbers. A number that was not measured is
rendered as `not measured`. So is every result of arithmetic with such a number.
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

# Jinja's filters that do not turn NotMeasured into a number, as `int` would (it returns 0).
_FILTERS = ("abs", "capitalize", "join", "lower", "replace", "round", "sum", "trim", "upper")
LOOKUPS = ("value", "state", "published")  # methods of TextFunctions
FUNCTIONS = (*LOOKUPS, "max", "min")
ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
BESIDE_PARAMETERS = ("device", "repeat")  # select a run in addition to its parameters


class NotMeasured:
    """Placeholder for a number that was not measured. Arithmetic with it gives NotMeasured."""

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
    """Raised if a template compares a value with NotMeasured."""


def _of_measured(choose: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Return a version of max or min whose result is NotMeasured if any argument is NotMeasured."""

    def chosen(*numbers: Any) -> Any:
        if len(numbers) == 1 and isinstance(numbers[0], list):
            numbers = tuple(numbers[0])
        missing = [number for number in numbers if isinstance(number, NotMeasured)]
        return missing[0] if missing else choose(numbers)

    return chosen


def _n(number: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits."""
    return format_number(number, digits) if isinstance(number, (int, float)) else str(number)


def _pct(number: Any, digits: int = 3) -> str:
    """Format a fraction as a percentage, for example 0.1234 as 12.3%."""
    return (
        f"{format_number(100 * number, digits)}%"
        if isinstance(number, (int, float))
        else str(number)
    )


def environment() -> SandboxedEnvironment:
    """Return a sandboxed Jinja environment for the templates of texts.

    The methods of `TextFunctions` are not in this environment. They are passed when a template is
    rendered.
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
    """Functions with which a template looks up results: `value`, `state` and `published`.

    Keyword arguments select one run by its parameters, or one row of published figures by the
    columns of the row. A subclass implements `value` and `state`, which need records.
    """

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """Return a metric of the run that has the parameters `params`.

        Args:
            name: name of the metric, such as time or fact.weights_bytes.
            phase: phase of the run. It can be None if the metric exists in one phase only.
            statistic: statistic of the samples.
            unit: unit of the result. None means the default unit of the metric.
            params: parameters of the run.

        Returns:
            The number, or a string if the metric is a fact whose value is text. NotMeasured if the
            run failed or is missing.
        """
        raise NotImplementedError

    def state(self, **params: Any) -> str:
        """Return the status of the run that has these parameters. It is ok if any repeat is ok."""
        raise NotImplementedError

    def published(self, file: str, column: str, **params: Any) -> Any:
        """Return a figure that other authors published, as a number if possible.

        Args:
            file: name of a CSV file in jobs/published.
            column: column of the figure.
            params: values of other columns, which select one row of the file.
        """
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
    """Return an error message if the arguments of `TextFunctions.value` are invalid, else None."""
    unknown = unknown_value(str(name))
    if unknown:
        return f"value {unknown}"
    if statistic not in ONE_NUMBER:
        return f"statistic {statistic!r} is not known{nearest(str(statistic), ONE_NUMBER)}"
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "only the default unit"
        return f"value {name!r} cannot be shown in {unit!r} (valid: {valid})"
    return None


def ambiguity(runs: list[Run], params: dict[str, Any], devices: Iterable[str] = ()) -> str | None:
    """Return an error message if given parameters select several runs, else None.

    The message lists the parameters in which the selected runs differ.

    Args:
        runs: the selected runs.
        params: the given parameters.
        devices: kinds of device of the selected results.
    """
    differ = {name: [format_scalar(run.params[name]) for run in runs] for name in varying(runs)}
    if len(set(devices)) > 1:
        differ["device"] = list(devices)
    if not differ:
        return None
    names = "; ".join(f"{name}: {', '.join(dict.fromkeys(has))}" for name, has in differ.items())
    which = (
        f"{len(runs)} runs have {format_params(params)}" if params else f"{len(runs)} runs match"
    )
    return f"{which}; add a parameter in which they differ ({names})"


def format_params(params: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name}={format_scalar(given)}" for name, given in params.items())
        or "any parameters"
    )
