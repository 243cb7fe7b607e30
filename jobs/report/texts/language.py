"""Functions and filters for Jinja2 templates, which contain the texts below the tables of a report.

    {{ value("time", phase="forward", size="xl") | n }} ms; 2.7b: {{ state(size="2.7b") }}

`value` returns a metric of a run. `state` returns the status of a run. `published` returns a value
that other authors measured and published. The filters `n` and `pct` format numbers. A number that
was not measured is rendered as `not measured`. The result of arithmetic with such a number is also
rendered as `not measured`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from jobs.formatting import format_number

# Jinja's filters that do not turn NotMeasured into a number, as `int` would (it returns 0).
_FILTERS = ("abs", "capitalize", "join", "lower", "replace", "round", "sum", "trim", "upper")


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


class Unknown(NotMeasured):
    """NotMeasured that is neither true nor false, for conditions that must not choose a side."""

    def __bool__(self) -> bool:
        raise Compared


class Compared(Exception):
    """Raised if a template compares a number that was not measured, or iterates over it."""


def _of_measured(choose: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Return a function like `max` or `min` that accepts numbers that were not measured.

    If an argument of the returned function is a NotMeasured object, the result is NotMeasured.
    """

    def chosen(*numbers: Any) -> Any:
        if len(numbers) == 1 and isinstance(numbers[0], dict):
            numbers = tuple(numbers[0].values())
        elif len(numbers) == 1 and isinstance(numbers[0], (list, tuple)):
            numbers = tuple(numbers[0])
        missing = [number for number in numbers if isinstance(number, NotMeasured)]
        return missing[0] if missing else choose(numbers)

    return chosen


def format_value(number: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits. Convert other values with `str`."""
    return format_number(number, digits) if isinstance(number, (int, float)) else str(number)


def format_share(number: Any, digits: int = 3) -> str:
    """Format a fraction as a percentage with some significant digits, e.g. 0.1234 as 12.3%.

    Values that are not numbers are converted with `str`.
    """
    return (
        f"{format_number(100 * number, digits)}%"
        if isinstance(number, (int, float))
        else str(number)
    )


def environment() -> SandboxedEnvironment:
    """Return a sandboxed Jinja environment for the templates of texts.

    The functions that look up results (`jobs.report.texts.lookups`) are not in this environment.
    They are passed when a template is rendered.
    """
    jinja = SandboxedEnvironment(
        undefined=StrictUndefined,
        finalize=lambda value: format_number(value) if isinstance(value, float) else value,
    )
    kept = {name: jinja.filters[name] for name in _FILTERS}
    jinja.filters = kept | {"n": format_value, "pct": format_share}
    jinja.globals = {"range": jinja.globals["range"]}
    jinja.globals |= {"max": _of_measured(max), "min": _of_measured(min), "dict": dict}
    return jinja
