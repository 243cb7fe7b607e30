"""The command `python -m jobs sources`: the hash of the source files that count for a run."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.command_line.completion import run_ids
from jobs.command_line.parsers import run_prefix
from jobs.commands.arguments import In
from jobs.commands.find import find_run, observed
from jobs.results.counting import is_thrown_away
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
    """Print whether the results of runs are from older code.

    Prints one line per run: its id, the hash of its source files, and 'same' or 'older' for its
    latest result, or 'no result'. With RUN, also prints the files that count. Comments, docstrings,
    blank lines and trailing spaces do not count. The hash is 'unknown' if the benchmark or code of
    your own cannot be read.
    """
    found = RunSources()
    if run is None:
        seen = observed(folder)
        runs = {each.id: each for manifest in seen.manifests for each in manifest.runs.values()}
    else:
        seen, task = find_run(run, folder)
        runs = {task.run.id: task.run}
    latest = {record.run: record for record in seen.records if not is_thrown_away(record)}
    for each in runs.values():
        record, now = latest.get(each.id), found.source_hash(each)
        if record is None or now is None:
            state = "no result" if record is None else "not compared"
        else:
            state = "same" if record.source_hash == now else "older"
        print(each.id, now or UNKNOWN, state)
    if run is not None:
        for path in found.files(task.run) or ():
            print(f"  {shown_path(path)}")
