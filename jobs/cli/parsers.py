"""Parsers of command-line arguments. They reject values that no command can use."""

from __future__ import annotations

from pathlib import Path

import typer

from jobs.user_files import invalid_path


def as_path(text: str) -> Path:
    """Convert an argument to a path.

    Raises:
        typer.BadParameter: if no file can have this path.
    """
    wrong = invalid_path(text)
    if wrong:
        raise typer.BadParameter(wrong)
    return Path(text)


def run_prefix(text: str) -> str:
    """Check that an argument may be the beginning of a run id, and return it.

    Raises:
        typer.BadParameter: if the argument is empty, which is the beginning of every run id.
    """
    if not text:
        raise typer.BadParameter("RUN must be the first characters of a run id, got ''")
    return text


def as_fraction(text: str) -> float:
    """Return a number from the command line. A percentage is an error that says what to write."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number such as 0.01 for 1%, got {text!r}") from None
