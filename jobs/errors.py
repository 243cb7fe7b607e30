"""Errors in the user's input. Each error states what is wrong, where, and what is valid."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

MAX_SHOWN = 30  # maximum number of problems in the message of an InputError
ENOUGH = 1000  # number of problems after which a check may stop
MAX_LINE = 2000  # maximum length of a problem in the message of an InputError, in characters


def shown(text: str, length: int = 200) -> str:
    """Return a text as one line of at most `length` characters, for an error message.

    Control characters and lone surrogates, which cannot be printed, become escape sequences.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: length + 1])
    return line if len(line) <= length else line[: length - 1] + "…"


def nearest(given: str, valid: list[str] | tuple[str, ...]) -> str:
    """Return a hint for the error message about an unknown name: a similar name, and up to 40."""
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(sorted(valid))})" if 0 < len(valid) <= 40 else hint


@dataclass(frozen=True, order=True)
class Position:
    """A position in a file or command-line argument. Lines and columns count from 1."""

    source: str  # name of the file or argument
    line: int = 0  # 0: unknown
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
    """Raised with all errors that were found in the user's input. The message has a line for each.

    Of more than MAX_SHOWN errors, the last line gives the number of those that are not shown.
    """

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(set(problems))
        lines = [shown(str(problem), MAX_LINE) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            least = "at least " if len(self.problems) >= ENOUGH else ""
            lines.append(f"… and {least}{len(self.problems) - MAX_SHOWN} more errors")
        super().__init__("\n".join(lines))


class CommandError(RuntimeError):
    """Raised if a command cannot continue. The message is written for the user."""


class TableError(ValueError):
    """Raised if a table cannot be made. The message is written for the author of the sweep file."""
