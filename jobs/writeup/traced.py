"""Numbers that know the records from which they were computed.

A template computes with them as with floats. The text of such a number is enclosed in marks, from
which a page makes a button that shows the records.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

# Characters of the Unicode private use area. They occur in no text of a record.
OPEN, MIDDLE, CLOSE = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"{OPEN}([0-9,]*){MIDDLE}([^{CLOSE}]*){CLOSE}")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


class Traced(float):
    """A number with those that `studies.Registry` gave the records it was computed from."""

    records: frozenset[int]

    def __new__(cls, value: float, records: Iterable[int] = ()) -> Traced:
        number = super().__new__(cls, value)
        number.records = frozenset(records)
        return number

    def __abs__(self) -> Traced:
        return Traced(abs(float(self)), self.records)

    def __neg__(self) -> Traced:
        return Traced(-float(self), self.records)

    def __round__(self, digits: Any = None) -> Any:
        return Traced(round(float(self), digits or 0), self.records)


def _with_records(work: Callable[[Any, Any], Any], reverse: bool) -> Callable[[Traced, Any], Any]:
    def combined(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        pair = (float(other), float(self)) if reverse else (float(self), float(other))
        return Traced(work(*pair), self.records | getattr(other, "records", frozenset()))

    return combined


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    _work = getattr(operator, _name)
    setattr(Traced, f"__{_name}__", _with_records(_work, False))
    setattr(Traced, f"__r{_name}__", _with_records(_work, True))


class Recorded(str):
    """Text from a record. The filters of answers escape it for Markdown."""

    __slots__ = ()


def marked(text: str, records: Iterable[int]) -> str:
    """Return a text with the indices of the records from which it was computed."""
    return f"{OPEN}{','.join(map(str, sorted(records)))}{MIDDLE}{text}{CLOSE}"


def escaped(text: str) -> str:
    """Escape a text for Markdown, on one line and without marks."""
    plain = re.sub(f"[{OPEN}{MIDDLE}{CLOSE}]", "", " ".join(text.split()))
    return _SPECIAL.sub(r"\\\1", plain)


def without_marks(text: str) -> str:
    """Remove the marks from a text."""
    return MARK.sub(r"\2", text)
