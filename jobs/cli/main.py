"""Runs a command. `jobs.submit`, `jobs`, `aggregate.py` and `sweeps` call `main`.

This module imports little, so that Ctrl-C ends a command without a traceback from the start.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from systems.terminal import exit_on_interrupt, run_command


def main(program: str, default: str | None = None) -> NoReturn:
    """Execute the command that the first argument names, or else the command `default`.

    `program` is what the user typed before the arguments, such as `python -m jobs`.
    """
    exit_on_interrupt()  # before the import, which takes longer
    from jobs.cli.application import command

    run_command(lambda: command(sys.argv[1:], default)(prog_name=program))
