"""Errors in the user's input. Each one states what is wrong, where, and what is valid."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

MAX_SHOWN = 100  # number of problems that the message of an InputError lists


def nearest(given: str, valid: list[str] | tuple[str, ...]) -> str:
    """Return a hint to append to the error message about an unknown name.

    Args:
        given: the unknown name.
        valid: the valid names.

    Returns:
        "; did you mean 'x'?" if a valid name is similar, followed by the list of valid names if
        there are at most 40. Empty if neither applies.
    """
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(sorted(valid))})" if 0 < len(valid) <= 40 else hint


@dataclass(frozen=True, order=True)
class Position:
    """A position in a source file or argument. Line and column start at 1; line 0 means unknown."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, order=True)
class Problem:
    """One error in the input, with its position."""

    position: Position
    message: str

    def __str__(self) -> str:
        return f"{self.position}: {self.message}"


class InputError(ValueError):
    """All problems found in the user's input. The message has one line per problem."""

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(set(problems))
        lines = [str(problem) for problem in self.problems]
        if len(lines) > MAX_SHOWN:
            lines[MAX_SHOWN:] = [f"… and {len(lines) - MAX_SHOWN} more errors"]
        super().__init__("\n".join(lines))


class TableError(ValueError):
    """A table cannot be made. The message is meant for the author of the sweep file."""
