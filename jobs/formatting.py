"""Conversion of numbers, other scalars, times, paths, lines and ids of Slurm jobs to text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

UNLIMITED = 1_000_000  # width of the output if it is a file or a pipe, in columns


def format_scalar(value: Any) -> str:
    """Return a scalar as text in YAML form, for example null, true or bf16."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parameter_header(name: str, columns: Collection[str]) -> str:
    """Return the header of a parameter beside other columns, of which one may have its name."""
    return f"{name} (parameter)" if name in columns else name


def format_number(number: float, digits: int = 4) -> str:
    """Return a number as text, rounded to `digits` significant digits.

    All digits before the decimal point are kept. Only numbers below 1e-6 have an exponent.
    """
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    scientific = f"{number:.{digits - 1}e}"
    if abs(number) < 1e-6:
        return scientific
    exponent = int(scientific.split("e")[1])  # after rounding: 9.9996 becomes 10.00
    return f"{number:.{max(0, digits - 1 - exponent)}f}"


def format_percent(share: float) -> str:
    """Return a share in percent, rounded to about two digits, such as 0.04%, 0.4% or 12%."""
    digits = 2 if abs(share) < 0.00095 else 1 if abs(share) < 0.0995 else 0
    return f"{share:.{digits}%}"


def format_ratio(ratio: float, spread: float, digits: int = 2, unit: str = "x") -> str:
    """Return a ratio as text, such as `1.95x`, or `1.9x (noise)` if its interval is wider."""
    if spread <= abs(ratio):
        return f"{ratio:.{digits}f}{unit}"
    return f"{format_number(ratio, 2)}{unit} (noise)"


def format_utc(seconds: float, pattern: str = "%Y-%m-%d %H:%M") -> str:
    """Return a time, given in seconds since the epoch, as text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime(pattern)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural, for example `1 run` or `2 processes`."""
    return f"{count} {noun if count == 1 else plural(noun)}"


def tally(kinds: Iterable[object]) -> str:
    """Return how often each kind occurs, the most frequent first, for example `3 ok, 1 oom`."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())


def abridged(texts: Sequence[str], most: int) -> str:
    """Return the first `most` texts and the number of the others, such as `a, b and 3 more`."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def plural(noun: str) -> str:
    """Return the plural of a regular noun, for example `runs` or `processes`."""
    return f"{noun}{'es' if noun.endswith('s') else 's'}"


def format_range(counts: Collection[int], noun: str) -> str:
    """Return the smallest and the largest count with their noun, such as `3 to 5 rounds`."""
    low, high = min(counts), max(counts)
    return f"{low} to {counted(high, noun)}" if high > low else counted(high, noun)


def compact_ids(job_ids: Iterable[str]) -> str:
    """Return the ids of Slurm jobs, such as "12" or "13_4", in squeue's form: `12, 13_[0-9,11]`."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, underscore, index = job_id.partition("_")
        indices = arrays.setdefault(array, [])
        if underscore:
            indices.append(int(index))
    return ", ".join(_compact(array, sorted(arrays[array])) for array in sorted(arrays, key=int))


def _compact(array: str, indices: list[int]) -> str:
    if not indices:
        return array
    rows = groupby(enumerate(indices), lambda pair: pair[1] - pair[0])  # consecutive ones
    runs = [[index for _, index in row] for _, row in rows]
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"{array}_{text}" if len(indices) == 1 else f"{array}_[{text}]"


def on_one_line(text: str) -> str:
    """Return the lines of a text on one line, separated by "; ". Empty lines are left out."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Return a line, broken between words into lines of at most `width` characters.

    All lines but the first start with `indent`. Words, such as paths, are not broken.
    """
    if len(text) <= width or width < 1:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def is_number(value: Any) -> bool:
    """Return True for an int or a float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def relative(path: Path) -> Path:
    """Return a path relative to the current folder, or unchanged if it is in another folder."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
