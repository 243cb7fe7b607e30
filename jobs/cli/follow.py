"""The option --follow of `logs`: prints the log of a run while the run writes it."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from jobs.results.record_reader import RecordTail
from jobs.results.run_logs import attempt_of, logs_of
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import UnreadableResults
from jobs.status import Status

POLL_S = 0.5  # interval at which log and records are read
STATE_S = 5.0  # interval at which the state is determined, which asks Slurm, without a new record
_Decoder = codecs.getincrementaldecoder("utf-8")


def follow(seen: Observation, task: TaskState) -> tuple[Observation, TaskState, bool]:
    """Wait until a run ends, and print its log as it grows.

    Returns the last states, and whether output was printed.
    """
    tail = RecordTail(seen.folder, {task.run.id})
    tail.new()
    old = logs_of(seen, task)
    seen, task = _again(seen, task)  # a log of `old` is of the current attempt only if it runs
    if task.status in (Status.running, Status.unknown):
        old = [path for path in old if attempt_of(path) < attempt_of(old[-1])]
    printer = _Printer(old)
    said = ""
    while task.status.is_live:
        waits = f"# {task.status}: {task.detail}"
        if task.status is not Status.running and waits != said:
            print(waits, flush=True)
            said = waits
        asked = time.monotonic()
        ended = False
        while not ended and time.monotonic() - asked < STATE_S:
            printer.print_new(logs_of(seen, task))
            time.sleep(POLL_S)
            ended = any(record.repeat == task.repeat for record in tail.new())
        seen, task = _again(seen, task)
    printer.print_new(logs_of(seen, task))
    return seen, task, printer.last is not None


def _again(seen: Observation, task: TaskState) -> tuple[Observation, TaskState]:
    """Determine the states again. Return the given ones if the folder cannot be read now."""
    try:
        seen = observe(seen.folder)
    except UnreadableResults as error:  # a network file system may fail for a moment
        print(f"note: {error}; trying again", file=sys.stderr)
        return seen, task
    return seen, next((t for t in seen.tasks if t.key == task.key), task)


class _Printer:
    """Prints what is appended to files, except to those in `skipped`."""

    def __init__(self, skipped: Iterable[Path]):
        self.last: Path | None = None
        self._skipped = set(skipped)
        self._files: dict[Path, tuple[int, codecs.IncrementalDecoder]] = {}

    def print_new(self, paths: list[Path]) -> None:
        for path in paths:
            if path in self._skipped:
                continue
            read, decoder = self._files.get(path, (0, _Decoder("replace")))
            try:
                with path.open("rb") as file:
                    file.seek(read)
                    data = file.read()
            except OSError:  # left to a later call
                continue
            if data and path != self.last:
                self.last = path
                print(f"# {path}")
            sys.stdout.write(decoder.decode(data))
            self._files[path] = read + len(data), decoder
        sys.stdout.flush()
