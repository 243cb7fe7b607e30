"""The result of one case of a check of the user's code."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checked:
    """Result of one case: right, wrong or refused."""

    case: Any  # its parameters; str(case) describes them
    errors: dict[str, float] = field(default_factory=dict)  # errors by name
    wrong: list[str] = field(default_factory=list)  # lines that tell what is wrong, if it is
    refused: str = ""  # why the case could not be checked, if it could not
    crashed: bool = False  # whether the process ended or hung, or a rank raised an exception

    @property
    def status(self) -> str:
        if self.refused:
            return "refused"
        return "wrong" if self.wrong else "right"


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, shortened."""
    message = str(error).strip().partition("\n")[0]
    return textwrap.shorten(f"{type(error).__name__}: {message}".rstrip(": "), 1000)
