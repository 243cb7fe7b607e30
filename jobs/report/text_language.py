"""Functions and filters for Jinja2 templates, which contain the texts below the tables of a report.

    {{ value("time", phase="forward", size="xl") | n }} ms; 2.7b: {{ state(size="2.7b") }}

`value` returns a metric of a run. `state` returns the status of a run. `published` returns a value
that other authors measured and published. The filters `n` and `pct` format numbers. A number that
was not measured is rendered as `not measured`. The result of arithmetic with such a number is also
rendered as `not measured`.
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
    """Placeholder for a number that was not measured.

    The result of arithmetic with a NotMeasured object is a NotMeasured object. Comparisons with it,
    and iterations over it, raise `Compared`.
    """

    def __str__(self) -> str:
        return "not measured"

    def __repr__(self) -> str:  # as an item of a list
        return "not measured"

    def __format__(self, specification: str) -> str:
        return "not measured"

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> NotMeasured:
        return self

    def _compared(self, *_: Any) -> NoReturn:
        raise Compared

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _same
    __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = __getitem__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # type: ignore[assignment]
    __iter__ = _compared  # Python would otherwise iterate with __getitem__, without an end


class Compared(Exception):
    """Raised if a template compares a number that was not measured, or iterates over it."""


def _of_measured(choose: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Return a function like `max` or `min` that accepts numbers that were not measured.

    If an argument of the returned function is a NotMeasured object, the result is NotMeasured.

    Args:
        choose: `max` or `min`.
    """

    def chosen(*numbers: Any) -> Any:
        if len(numbers) == 1 and isinstance(numbers[0], (list, tuple)):
            numbers = tuple(numbers[0])
        missing = [number for number in numbers if isinstance(number, NotMeasured)]
        return missing[0] if missing else choose(numbers)

    return chosen


def _n(number: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits. Convert other values with `str`."""
    return format_number(number, digits) if isinstance(number, (int, float)) else str(number)


def _pct(number: Any, digits: int = 3) -> str:
    """Format a fraction as a percentage, for example 0.1234 as 12.3%.

    Values that are not numbers are converted with `str`.

    Args:
        number: the fraction.
        digits: number of significant digits.
    """
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
    """Functions that a template calls to look up results: `value`, `state` and `published`.

    `value` and `state` look up one run. Their keyword arguments are parameters that select the run.
    `published` looks up one row of a CSV file with values that other authors published. Its keyword
    arguments are column values that select the row. Subclasses implement `value` and `state`, which
    read the records of runs.
    """

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """Return a metric of one run.

        Args:
            name: name of the metric, such as time or fact.weights_bytes. The prefix `fact.` marks a
                value that the benchmark returned in addition to times and memory.
            phase: phase of the run, such as forward. It can be None if the metric exists in one
                phase only.
            statistic: statistic of the samples, such as median.
            unit: unit of the result. None means the default unit of the metric.
            params: parameters that select the run. They can include `device` and `repeat`.

        Returns:
            The number, or a string if the value is text. NotMeasured if there is no value, for
            example because the run failed or is missing.
        """
        raise NotImplementedError

    def state(self, **params: Any) -> str:
        """Return the status of one run, such as ok or timeout.

        If a run has several repeats, its status is ok if at least one repeat is ok.

        Args:
            params: parameters that select the run. They can include `device` and `repeat`.
        """
        raise NotImplementedError

    def published(self, file: str, column: str, **params: Any) -> Any:
        """Return a value that other authors published, as a number if possible.

        Args:
            file: name of a CSV file in the folder jobs/published.
            column: column of the CSV file that contains the value.
            params: values of other columns. They select one row of the file.

        Raises:
            TableError: if the file or a column does not exist, if no selected row has a value in
                this column, or if several selected rows have one.
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
    """Check arguments of the template function `value`. Return an error message or None.

    Args:
        name: name of a metric.
        statistic: name of a statistic, such as median.
        unit: unit of the result. None means the default unit of the metric.
    """
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
    """Return an error message if parameters in a template select several runs or devices.

    Return None if they select one run on one device.
    The message lists the parameters in which the selected runs differ.

    Args:
        runs: the selected runs.
        params: the parameters in the template.
        devices: devices of the selected results, such as GPU models.
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
