"""Errors that a user sees: what is wrong, where, and what would be valid."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

MAX_SHOWN = 100  # of the errors


def nearest(given: str, valid: list[str] | tuple[str, ...]) -> str:
    """`; did you mean 'x'?` where a valid name is close, and the valid names where they are few."""
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(sorted(valid))})" if 0 < len(valid) <= 40 else hint


@dataclass(frozen=True, order=True)
class Position:
    """A place in a source: 1-based line and column."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in the input, and where."""

    position: Position
    message: str

    def __str__(self) -> str:
        return f"{self.position}: {self.message}"


class InputError(ValueError):
    """Everything wrong with what the user gave, one line each."""

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(set(problems))
        lines = [str(problem) for problem in self.problems]
        if len(lines) > MAX_SHOWN:
            lines[MAX_SHOWN:] = [f"… and {len(lines) - MAX_SHOWN} more errors"]
        super().__init__("\n".join(lines))


class TableError(ValueError):
    """Why a table cannot be made, in words for who wrote its sweep."""
