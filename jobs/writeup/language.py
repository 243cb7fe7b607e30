"""The language of answers: Jinja2, where a paragraph with a missing number is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, StrictUndefined, UndefinedError


class NotMeasured(UndefinedError):
    """Raised by whatever is done with a number that was not measured."""


class Missing(StrictUndefined):
    """A number that was not measured."""

    def __init__(self, *_: Any) -> None:
        super().__init__("not measured", exc=NotMeasured)

    __abs__ = __round__ = __format__ = __repr__ = StrictUndefined._fail_with_undefined_error


def _of_values(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Return `max` or `min` for numbers, lists and families."""

    def chosen(*numbers: Any) -> Any:
        values = numbers[0] if len(numbers) == 1 else numbers
        return choose(values.values() if isinstance(values, dict) else values)

    return chosen


def environment() -> Environment:
    """Return an environment with the functions of answers."""
    jinja = Environment(undefined=StrictUndefined)
    jinja.globals = {"max": _of_values(max), "min": _of_values(min)}
    return jinja
