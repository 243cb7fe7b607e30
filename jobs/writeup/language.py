"""The language of answers: Jinja2 with numbers that may not be measured.

A number that was not measured is rendered as `not measured`, and so is the result of arithmetic
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Environment, StrictUndefined
from jinja2.filters import FILTERS

# Filters of Jinja that an answer may use. Others would turn NotMeasured into a number, as `int`.
_OF_NUMBERS = ("join", "round", "sum")
_OF_LISTS = ("first", "list", "map", "rejectattr", "selectattr")


class NotMeasured:
    """Placeholder for a number that was not measured.

    The result of arithmetic with a NotMeasured object is a NotMeasured object. Comparisons with it,
    conditions on it and iterations over it raise `Compared`.
    """

    def __str__(self) -> str:
        return "not measured"

    def __repr__(self) -> str:  # as an item of a list
        return "not measured"

    def __format__(self, specification: str) -> str:
        return "not measured"

    def _same(self, *_: Any) -> NotMeasured:
        return self

    def _compared(self, *_: Any) -> NoReturn:
        raise Compared

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _same
    __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = __getitem__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # type: ignore[assignment]
    __bool__ = _compared
    __iter__ = _compared  # Python would otherwise iterate with __getitem__, without an end


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


def _checked(of_list: Any) -> Any:
    """Return a filter like one of Jinja. A list that was not measured is no empty list for it."""

    @wraps(of_list)  # with the marks by which Jinja passes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, NotMeasured) for each in args):
            raise Compared
        return of_list(*args, **kwargs)

    return checked


def environment() -> Environment:
    """Return an environment with the filters and functions that know NotMeasured."""
    jinja = Environment(undefined=StrictUndefined)
    jinja.filters = {name: FILTERS[name] for name in _OF_NUMBERS}
    jinja.filters |= {name: _checked(FILTERS[name]) for name in _OF_LISTS}
    jinja.globals = {"max": _of_measured(max), "min": _of_measured(min)}
    return jinja
