"""The language of answers: Jinja2, where a paragraph with a missing number is left out.

A family has the numbers of one kind by the value of a parameter, such as the time of each length.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from jinja2 import StrictUndefined, UndefinedError


class NotMeasured(UndefinedError):
    """Raised by whatever is done with a number that was not measured."""


class Missing(StrictUndefined):
    """A number that was not measured."""

    def __init__(self, *_: Any) -> None:
        super().__init__("not measured", exc=NotMeasured)

    __abs__ = __round__ = __format__ = __repr__ = StrictUndefined._fail_with_undefined_error


class Family(dict[Any, Any]):
    """Numbers by the value of a parameter. Arithmetic with another family or a number is by value.

    A number that is missing is NotMeasured, and so is each result that depends on it.
    """

    def _each(self, other: Any, calculate: Callable[[Any, Any], Any]) -> Family:
        others = other if isinstance(other, Family) else dict.fromkeys(self, other)
        found = Family()
        for key in (key for key in self if key in others):
            try:
                found[key] = calculate(self[key], others[key])
            except (NotMeasured, ZeroDivisionError):
                found[key] = Missing()
        return found

    __add__ = __radd__ = partialmethod(_each, calculate=operator.add)
    __sub__ = partialmethod(_each, calculate=operator.sub)
    __mul__ = __rmul__ = partialmethod(_each, calculate=operator.mul)
    __truediv__ = partialmethod(_each, calculate=operator.truediv)


def by_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for which a list in place of a value gives a family, by the list's items.

    Several lists give families of families: positional arguments first, then keywords in order.
    """

    def found(*given: Any, **named: Any) -> Any:
        arguments = dict[Any, Any](enumerate(given)) | named
        place = next((place for place, each in arguments.items() if isinstance(each, list)), None)
        if place is None:
            return function(*given, **named)

        def at(value: Any) -> Any:
            if place in named:
                return found(*given, **named | {place: value})
            return found(*given[:place], value, *given[place + 1 :], **named)

        return Family({value: at(value) for value in arguments[place]})

    return found


def of_values(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Return `max` or `min` for numbers, lists and families."""

    def chosen(*numbers: Any) -> Any:
        values = numbers[0] if len(numbers) == 1 else numbers
        return choose(values.values() if isinstance(values, dict) else values)

    return chosen
