"""The command `hours`: the hours and GPU-hours that sweeps used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.cli.arguments import RESULTS, flag
from jobs.cli.observed import note_bad_lines, observed
from jobs.cli.output import fail, note, width
from jobs.errors import CommandError
from jobs.formatting import counted, relative
from jobs.report.hours import Hours, lost_attempts
from jobs.report.hours import hours as hours_of
from jobs.report.tables.markdown import markdown_table
from jobs.results.latest import LOGS, folders_in
from jobs.results.run_states import Observation, observe
from jobs.results.unreadable import BadLine

EXAMPLES = "logs/flash --by status"
# The columns that a narrow terminal does not show, the first one first
LEAST = (
    "compiling (GPU-h)", "other (GPU-h)", "starting (GPU-h)", "sweep", "queued (h)", "attempts",
    "measuring (GPU-h)", "runs", "wall (h)", "wasted (GPU-h)",
)  # fmt: skip
Row = dict[str, Any]


class By(StrEnum):
    sweep = "sweep"
    status = "status"


def hours(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER", help="Results folders. [default: all in ./logs]", **RESULTS
        ),
    ] = None,
    by: Annotated[
        By, typer.Option(help="One row per sweep, or one per sweep and status of its attempts.")
    ] = By.sweep,
    as_json: Annotated[bool, flag("--json", "Print the rows as JSON.")] = False,
) -> None:
    """Show how many GPU-hours each sweep used, and for what.

    An attempt is one execution of a run. 'queued' are the hours that jobs waited for their start,
    without a GPU. 'wall' are the hours of all attempts. The other columns are GPU-hours: the
    duration of an attempt times the GPUs that its run requested. They are '-' if no run requested
    GPUs.

    'starting' lasts until the benchmark is called; 'compiling' and 'measuring' are parts of this
    call; 'other' is the rest of an attempt. 'wasted' are attempts that are not in the results: they
    failed, were cancelled, killed or preempted, or were repeated, also with a newer version of the
    benchmark. In a sweep with blocks, they are also those of interrupted rounds. 'total' is the sum
    of these columns.

    The start of a job and the time between its runs are not counted. An attempt without a record,
    because its worker died, has unknown GPU-hours. A note tells the number of such attempts.
    """
    rows: list[Row] = []
    lost: dict[str, int] = {}
    for seen in map(observed, folders) if folders else _all_in_logs():
        name = str(relative(seen.folder))
        rows += [_row(name, one, by) for one in hours_of(seen, by is By.status)]
        for text in seen.notes:
            note(f"{name}: {text}")
        if count := lost_attempts(seen):
            lost[name] = count
            without = f"{counted(count, 'attempt')} without a record; their GPU-hours are unknown"
            note(f"{name}: {without}")
    if not rows:
        note("there are no attempts")
    if as_json:
        print(json.dumps({"rows": rows, "attempts_without_record": lost}))
    elif rows:
        _print_markdown(rows)


def _all_in_logs() -> Iterator[Observation]:
    """Yield the state of each results folder in ./logs. Prints which ones cannot be read."""
    bad: list[BadLine] = []
    folders = folders_in(LOGS, bad)
    if not folders:
        fail(f"no results folder given, and none in ./{LOGS}; pass a folder as an argument")
    for folder in folders:
        try:
            seen = observe(folder.resolve())
        except CommandError as error:
            bad.append(BadLine(folder, 0, str(error)))
        else:
            bad += seen.bad_lines
            yield seen
    note_bad_lines(bad)


def _row(folder: str, hours: Hours, by: By) -> Row:
    """Return a row of the table. The names of its columns contain the units."""
    row: Row = {"folder": folder, "sweep": hours.sweep}
    if by is By.status:
        row["status"] = str(hours.status)
    row |= {"runs": len(hours.runs), "attempts": hours.attempts}
    if by is By.sweep:
        row["queued_hours"] = hours.queued
    row["wall_hours"] = hours.wall
    for stage, used in hours.gpu.items():
        row[f"{stage}_gpu_hours"] = used if hours.uses_gpus else None
    row["total_gpu_hours"] = sum(hours.gpu.values()) if hours.uses_gpus else None
    return row


def _print_markdown(rows: list[Row]) -> None:
    """Print the rows, at least one. If there are several, the last row has their total."""
    if len(rows) > 1:
        total: Row = {}
        for name, value in rows[0].items():
            known = [row[name] for row in rows if row[name] is not None]
            total[name] = "" if isinstance(value, str) else sum(known) if known else None
        # A run may be in several rows.
        rows = [*rows, total | {"folder": "total", "runs": ""}]
    columns = {_heading(name): [_cell(row[name]) for row in rows] for name in rows[0]}
    print(markdown_table(columns, width=width(), least=LEAST, see="--json"))


def _heading(name: str) -> str:
    """Return the heading of a column in Markdown, such as `total (GPU-h)`."""
    for end, unit in (("_gpu_hours", "GPU-h"), ("_hours", "h")):
        if name.endswith(end):
            return f"{name.removesuffix(end)} ({unit})"
    return name


def _cell(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
