"""Formats values as text: scalars as a sweep file writes them, numbers with significant digits."""

from __future__ import annotations

import math
from typing import Any


def format_scalar(value: Any) -> str:
    """Format a scalar as a sweep file writes it: null, true, bf16."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_number(number: float, digits: int = 4) -> str:
    """Format a number with this many significant digits; no exponent down to a millionth."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    scientific = f"{number:.{digits - 1}e}"
    if abs(number) < 1e-6:
        return scientific
    exponent = int(scientific.split("e")[1])  # as rounded: 9.9996 is 10.00
    return f"{number:.{max(0, digits - 1 - exponent)}f}"


def is_number(value: Any) -> bool:
    """True for an int or a float, not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
