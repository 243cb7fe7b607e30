"""The command `python -m jobs sources`: the source files that count for the results of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.command_line.completion import run_ids
from jobs.command_line.parsers import run_prefix
from jobs.commands.arguments import In
from jobs.commands.find import find_run, observed
from jobs.results.record import Record
from jobs.sweep.run_sources import RunSources, shown_path

UNKNOWN = "unknown"


def sources(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Id of a run, or its first characters. [default: all runs of the folder]",
            parser=run_prefix,
            autocompletion=run_ids,
        ),
    ] = None,
    folder: In = None,
) -> None:
    """Print the source files that count for the results of a run, and their hash.

    A result is from older code if its record has another hash. Comments, docstrings, blank lines
    and trailing spaces do not count. Without RUN, prints one line per run: its id, its hash, and
    'same' or 'older' for its latest result, or 'no result'. The hash is 'unknown' if the benchmark
    or code of your own cannot be read.
    """
    found = RunSources()
    if run is None:
        seen = observed(folder)
        runs = {run.id: run for manifest in seen.manifests for run in manifest.runs.values()}
        latest = {record.run: record for record in seen.records}
        for one in runs.values():
            record, now = latest.get(one.id), found.source_hash(one)
            if record is None or now is None:
                state = "no result" if record is None else "not compared"
            else:
                state = "same" if record.source_hash == now else "older"
            print(one.id, now or UNKNOWN, state)
        return
    seen, task = find_run(run, folder)
    now = found.source_hash(task.run)
    print(f"{task.run.id}  {task.run.label()}")
    print(f"source hash: {now or UNKNOWN}")
    for record in seen.records:
        if record.run == task.run.id:
            print(_compared(record, now))
    for path in found.files(task.run) or ():
        print(f"  {shown_path(path)}")


def _compared(record: Record, now: str | None) -> str:
    """Return a line that compares the hash in a record with the present one."""
    which = f"repeat {record.repeat}, attempt {record.attempt} ({record.status})"
    if record.source_hash is None:
        return f"{which}: no source hash"
    same = "the same" if record.source_hash == now else "older code"
    return f"{which}: {record.source_hash}, {same if now else 'not compared'}"
