"""Shows the progress of the local queue: a line for each run that ended, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jobs.code.short_names import run_labels
from jobs.formatting import UNLIMITED, counted
from jobs.results.counting import is_trial
from jobs.results.manifest import Job, Manifest
from jobs.results.record import Record
from jobs.results.worker_state import read_worker_state
from jobs.status import Status

MILD = {"ok": "green", "unsupported": "yellow", "oom": "yellow"}


class _Bar(Progress):
    """Progress bar with a line below it that shows what is running. The line is not wrapped."""

    running = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.running:
            yield Text(f"running: {self.running}", no_wrap=True, overflow="ellipsis")


class QueueProgress:
    """Progress of the jobs of one submission. The bar is shown only on a terminal."""

    def __init__(self, manifest: Manifest):
        # Without markup and emoji codes, such as `[red]` and `:100:`.
        console = Console(markup=False, emoji=False)
        is_terminal = console.file.isatty()  # `console.is_terminal` is True if FORCE_COLOR is set
        if not is_terminal:  # other programs can read unwrapped lines
            console.width = UNLIMITED
        self._manifest = manifest
        self._label = run_labels(list(manifest.runs.values()), manifest.sweep.parameters())
        self._rounds = {block.id: block.rounds for block in manifest.blocks}
        self._bar = _Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            disable=not is_terminal,
            speed_estimate_period=sys.maxsize,  # all runs count for the time that is left
        )
        self._total = sum(len(job.tasks) for job in manifest.jobs)
        self._ended = 0
        self._unsupported = ""  # why the run that ended last is not supported; empty if it is
        self._left_out = 0  # number of lines left out since then
        self._task = self._bar.add_task(manifest.sweep.name, total=self._total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show_left_out()
        self._bar.running = ""
        self._bar.stop()

    def show(self, text: str, colour: str, rest: str = "") -> None:
        """Print a line whose first part is coloured."""
        self._bar.console.print(
            Text.assemble((text, colour), rest), highlight=False, soft_wrap=True
        )

    def add(self, record: Record) -> None:
        """Print how a run ended, and advance the bar.

        Of consecutive runs that are unsupported for the same reason, only the first has a line.
        """
        counts = not is_trial(record)
        self._bar.advance(self._task, counts)
        self._ended += counts
        is_unsupported = record.status is Status.unsupported
        reason = record.failure.summary if record.failure and is_unsupported else ""
        if reason and reason == self._unsupported:
            self._left_out += 1
            return
        self._show_left_out()
        self._unsupported = reason
        what = self._round(record) + self._label(self._manifest.runs[record.run])
        if record.failure is not None:
            what += f": {record.failure.summary}"
        took = max(0.0, record.finished_at - record.started_at)
        rest = f" {took:6.1f} s  {record.run[:8]}  {what}"
        in_total = self._rounds and counts
        count = f"[{self._ended}/{max(self._ended, self._total)}] " if in_total else ""
        self.show(f"{count}{record.status:11}", MILD.get(record.status, "red"), rest)

    def _show_left_out(self) -> None:
        if self._left_out:
            more = f"{counted(self._left_out, 'more run')} for the same reason"
            self.show(f"{Status.unsupported:11}", MILD[Status.unsupported], f"    {more}")
        self._left_out = 0

    def _round(self, record: Record) -> str:
        """Return the round of a run in a block, and its side if versions of the code differ."""
        if record.block is None:
            return ""
        side = (" after", " before")[record.block.baseline] if self._manifest.checkouts else ""
        rounds = self._rounds.get(record.block.id, "?")
        where = "trial" if record.block.trial else f"round {record.block.round + 1}/{rounds}"
        return f"{where}{side}  "

    def update(self, jobs: Iterable[Job]) -> None:
        """Show which runs of some jobs are executing."""
        if self._bar.disable:
            return
        states = (read_worker_state(self._manifest.job_folder(job.index)).running for job in jobs)
        runs = [self._manifest.runs[state.run] for state in states if state is not None]
        self._bar.running = " | ".join(map(self._label, runs))
