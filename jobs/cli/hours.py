"""The command `hours`: the hours and GPU-hours that sweeps used."""

from __future__ import annotations

import json
from typing import Annotated, Any

from jobs.cli.arguments import AnyFolders, flag
from jobs.cli.observed import observed_in
from jobs.cli.output import fail, note, width
from jobs.formatting import relative
from jobs.report.hours import Hours
from jobs.report.hours import hours as hours_of
from jobs.report.tables.markdown import markdown_table
from jobs.results.latest import LOGS

EXAMPLES = "logs/flash --json"
# The columns that a narrow terminal does not show, the first one first
LEAST = (
    "compiling (GPU-h)", "other (GPU-h)", "starting (GPU-h)", "sweep", "queued (h)", "attempts",
    "measuring (GPU-h)", "runs", "wall (h)", "wasted (GPU-h)",
)  # fmt: skip
Row = dict[str, Any]


def hours(
    folders: AnyFolders = None,
    as_json: Annotated[bool, flag("--json", "Print the rows as JSON.")] = False,
) -> None:
    """Show how many GPU-hours each sweep used, and for what.

    'queued' are the hours that jobs waited for their start, and 'wall' those of all attempts, i.e.
    executions of runs. The other columns are GPU-hours: the duration of an attempt times the GPUs
    that its run requested. 'starting' lasts until the benchmark is called; 'compiling' and
    'measuring' are parts of this call; 'other' is the rest. 'wasted' are attempts that are not in
    the results: they failed, ended early, were repeated, or belong to interrupted rounds.

    The start of a job, the time between its runs and attempts whose worker died are not counted.
    """
    rows: list[Row] = []
    for seen in observed_in(folders or [LOGS]):
        name = str(relative(seen.folder))
        rows += [_row(name, one) for one in hours_of(seen)]
        note(*(f"{name}: {text}" for text in seen.notes))
    if not rows:
        places = " ".join(map(str, folders or [LOGS]))
        fail(f"no results folder in {places}; pass a folder as an argument")
    if as_json:
        print(json.dumps({"rows": rows}))
    else:
        _print_markdown(rows)


def _row(folder: str, hours: Hours) -> Row:
    """Return a row of the table. The names of its columns contain the units."""
    row: Row = {"folder": folder, "sweep": hours.sweep}
    row |= {"runs": len(hours.runs), "attempts": hours.attempts}
    row |= {"queued_hours": hours.queued, "wall_hours": hours.wall}
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
