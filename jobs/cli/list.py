"""The command `list`: the results folders here, a line each."""

from __future__ import annotations

import json
from typing import Annotated, Any

from jobs.cli.arguments import AnyFolders, flag
from jobs.cli.observed import observed_in
from jobs.cli.output import note, width
from jobs.formatting import format_utc, relative
from jobs.report.hours import hours
from jobs.report.tables.markdown import markdown_table
from jobs.results.latest import LOGS
from jobs.results.run_states import Observation
from jobs.status import Status

EXAMPLES = "logs/h100"

_LEAST = ("GPU-hours", "newest (UTC)", "sweep")  # that a narrow terminal does not show


def list_(
    folders: AnyFolders = None,
    as_json: Annotated[bool, flag("--json", "Print the rows as JSON.")] = False,
) -> None:
    """List the results folders here, the newest last.

    Each has a line with its sweep, its number of runs and their states, when it was last written,
    and the GPU-hours of all attempts: their durations times the GPUs that their runs requested.
    """
    seen = observed_in(folders or [LOGS])
    rows = sorted(map(_row, seen), key=lambda row: row["newest"])
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        note(f"no results folder in {', '.join(map(str, folders or [LOGS]))}")
    else:
        columns = {
            "folder": [row["folder"] for row in rows],
            "sweep": [row["sweep"] for row in rows],
            "runs": [str(row["runs"]) for row in rows],
            "states": [
                ", ".join(f"{count} {status}" for status, count in row["states"].items())
                for row in rows
            ],
            "newest (UTC)": [format_utc(row["newest"]) for row in rows],
            "GPU-hours": [f"{row['gpu_hours']:.2f}" for row in rows],
        }
        print(markdown_table(columns, "left", width(), _LEAST, see="--json"))


def _row(seen: Observation) -> dict[str, Any]:
    counts = seen.counts()
    return {
        "folder": str(relative(seen.folder)),
        "sweep": seen.manifests[-1].sweep.name,
        "runs": len(seen.runs),
        "states": {str(status): counts[status] for status in Status if status in counts},
        "newest": max(
            [seen.manifests[-1].created_at, *(record.finished_at for record in seen.records)]
        ),
        "gpu_hours": sum(sum(each.gpu.values()) for each in hours(seen)),
    }
