"""Shell completion of arguments. Without candidates, the shell completes file names."""

from __future__ import annotations

from glob import escape, glob
from pathlib import Path

import typer

from jobs.code.short_names import run_labels
from jobs.results.latest import LOGS, folders_in, manifests_of
from jobs.results.unreadable import UnreadableResults
from jobs.sweep.stock_sweeps import stock_sweeps


def sweep_files(incomplete: str) -> list[str]:
    """Return the sweep files here and the stock sweeps whose paths begin with a word."""
    here = [path for end in ("yaml", "yml") for path in glob(f"{escape(incomplete)}*.{end}")]
    stock = [path.as_posix() for path in stock_sweeps()]
    return sorted({*here, *(path for path in stock if path.startswith(incomplete))})


def results_folders(incomplete: str) -> list[str]:
    """Return the results folders in ./logs whose paths begin with a word."""
    try:
        found = [path.as_posix() for path in folders_in(LOGS)]
    except UnreadableResults:
        return []
    return [path for path in found if path.startswith(incomplete)]


def run_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of runs that begin with a word, each with the parameters of the run.

    The runs are those of the folder after --in, or else of all results folders in ./logs.
    """
    given = ctx.params.get("folder")
    labels: dict[str, str] = {}
    try:
        found = manifests_of([Path(given)] if given else folders_in(LOGS))
    except UnreadableResults:
        return []
    for manifests in found.values():
        runs = [run for manifest in manifests for run in manifest.runs.values()]
        label = run_labels(runs)
        labels |= {run.id: label(run) for run in runs if run.id.startswith(incomplete)}
    return sorted(labels.items())
