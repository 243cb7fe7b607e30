"""Consoles that print texts as they are, for messages that contain names and texts of the user."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console

from jobs.formatting import UNLIMITED


def plain_console(stderr: bool = False) -> Console:
    """Return a console without markup and emoji codes, such as `[red]` and `:100:`.

    Lines and tables in a file or pipe are not wrapped, so that other programs can read them. The
    width of a terminal is that of the variable COLUMNS, if it is set.
    """
    console = Console(stderr=stderr, markup=False, emoji=False)
    if not console.file.isatty():  # `console.is_terminal` is True if FORCE_COLOR is set
        console.width = UNLIMITED
    return console


console = plain_console()
errors = plain_console(stderr=True)


def fail(message: str) -> NoReturn:
    """Print an error message and exit with code 2."""
    errors.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(2)


def note(text: object) -> None:
    """Print a note to stderr."""
    errors.print(f"note: {text}", highlight=False, soft_wrap=True)
