"""Print titles, tables and calculations, and format numbers with units.

`python -m systems.accounting` prints its whole output with these functions.
"""

from __future__ import annotations

import textwrap
from typing import TypeVar

WIDTH = 96
# Devices in the printed tables: short name -> name in `hardware.py`.
DEVICES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "v5p": "TPU v5p",
}
T = TypeVar("T")


def known(figure: T | None) -> T:
    """Return `figure`, and assert that it is not None.

    Functions that look up or compute a number for a device return None for an unknown device. The
    devices whose numbers are printed are all known, so None would be a bug.
    """
    assert figure is not None
    return figure


def title(text: str) -> None:
    print(f"\n\n{text}\n{'=' * len(text)}")


def say(text: str) -> None:
    print("\n" + textwrap.fill(text, WIDTH))


def derive(question: str, formula: str, *steps: str) -> None:
    """Print a calculation: a question, the formula that answers it, and the steps to the result.

    `steps` follow the formula, each after an equals sign. The first one is usually the formula with
    numbers, and the last one is the result.
    """
    print(f"\n{textwrap.fill(question, WIDTH)}\n    {formula}")
    for step in steps:
        print(f"      = {step}")


def table(rows: list[list[str]]) -> None:
    """Print a table with aligned columns. The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(("    " + "   ".join(cells)).rstrip())


def size_text(size: float) -> str:
    """Format a number of bytes with a decimal unit (GB = 10^9)."""
    return _scaled(size, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def rate_text(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"


def time_text(seconds: float) -> str:
    return _scaled(seconds, [(1, "s"), (1e-3, "ms"), (1e-6, "us")])


def _scaled(value: float, units: list[tuple[float, str]]) -> str:
    scale, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    return f"{value / scale:.4g} {unit}" if value else "0"
