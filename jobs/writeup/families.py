"""Numbers of one kind by the value of a parameter, such as the time of each sequence length."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from jobs.writeup.language import Missing, NotMeasured


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

    def __add__(self, other: Any) -> Family:
        return self._each(other, operator.add)

    def __sub__(self, other: Any) -> Family:
        return self._each(other, operator.sub)

    def __mul__(self, other: Any) -> Family:
        return self._each(other, operator.mul)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Family:
        return self._each(other, operator.truediv)


def by(value: Callable[..., Any]) -> Callable[..., Family]:
    """Return the function `by` of answers. It calls `value`, or the function given as `of`."""

    def of_values(
        parameter: str,
        values: Iterable[Any],
        *given: Any,
        of: Callable[..., Any] = value,
        **params: Any,
    ) -> Family:
        return Family({each: of(*given, **params, **{parameter: each}) for each in values})

    return of_values
