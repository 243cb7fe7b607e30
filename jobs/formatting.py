"""Values as text: as a sweep file writes them, and numbers with significant digits."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> str:
    """A scalar as a sweep file writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(number: float, digits: int = 4) -> str:
    """A number with so many significant digits, without an exponent down to a millionth."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    scientific = f"{number:.{digits - 1}e}"
    if abs(number) < 1e-6:
        return scientific
    exponent = int(scientific.split("e")[1])  # as rounded: 9.9996 is 10.00
    return f"{number:.{max(0, digits - 1 - exponent)}f}"
