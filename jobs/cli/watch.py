"""The option --watch of `status`: prints a report again until nothing is queued or running."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

from jobs.cli.application import Command

DEFAULT_S = 5.0
SHORTEST_S = 0.5  # minimum of the option: each report reads the folder and asks Slurm
LONGEST_S = 86400.0  # maximum of the option: a day


class WatchingCommand(Command):
    """A command whose option --watch has an optional value, the interval in seconds."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        for i, word in enumerate(given):
            if word == "--watch" and not re.match(r"[-+.]?\d", "".join(given[i + 1 : i + 2])):
                given[i] = f"--watch={DEFAULT_S}"
        return super().parse_args(ctx, given)


def watch(report: Callable[[], tuple[str, bool]], every_s: float) -> None:
    """Print a report until nothing is live. A terminal is redrawn, a pipe gets only changes.

    `report` returns the text, and whether a run is queued or running.
    """
    terminal = sys.stdout.isatty()
    before = None
    while True:
        text, live = report()
        if terminal:
            note = f"\nagain every {every_s:g} s while a run is queued or running; Ctrl-C ends this"
            sys.stdout.write(f"\x1b[H\x1b[2J{text}{note if live else ''}")
        elif text != before:
            sys.stdout.write(text)
        sys.stdout.flush()
        before = text
        if not live:
            return
        time.sleep(every_s)
