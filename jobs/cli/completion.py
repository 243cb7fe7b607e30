"""Shell completion of the arguments of commands. `jobs.console` installs it for `sweeps`.

Each function returns the candidates for an incomplete word. If there are none, the shell completes
file names.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

from jobs.results.latest import LOGS, folders_in, manifests_of
from jobs.results.unreadable import UnreadableResults
from jobs.run import varying
from jobs.sweep.stock_sweeps import stock_sweeps


def sweep_files(incomplete: str) -> list[str]:
    """Return the folders and YAML files, including stock sweeps, whose paths begin with a word."""
    found = _entries(incomplete)
    while len(found) == 1 and found[0].endswith("/") and (inside := _entries(found[0])):
        found = inside
    return found


def _entries(incomplete: str) -> list[str]:
    """Return the entries of one folder that an incomplete path may mean. Folders end with "/"."""
    folder, slash, start = incomplete.rpartition("/")
    folder += slash
    names = set()
    try:
        for entry in os.scandir(folder or "."):
            if entry.is_dir():
                names.add(f"{entry.name}/")
            elif entry.name.endswith((".yaml", ".yml")):
                names.add(entry.name)
    except OSError:  # the folder exists only among the stock sweeps, or not at all
        pass
    for path in stock_sweeps():
        if path.as_posix().startswith(folder):
            name, slash, _ = path.as_posix().removeprefix(folder).partition("/")
            names.add(name + slash)
    hidden = start.startswith(".")
    return sorted(
        folder + name
        for name in names
        if name.startswith(start) and (hidden or not name.startswith("."))
    )


def results_folders(incomplete: str) -> list[str]:
    """Return the results folders in ./logs whose paths begin with a word."""
    try:
        found = [path.as_posix() for path in folders_in(LOGS)]
    except UnreadableResults:
        return []
    return [path for path in found if path.startswith(incomplete)]


def run_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of runs that begin with a word, each with the parameters of the run.

    Args:
        ctx: the arguments before the incomplete word. The runs are those of the folder that the
            option --in names. The default is all results folders in ./logs.
    """
    given = ctx.params.get("folder")
    labels: dict[str, str] = {}
    try:
        found = manifests_of([Path(given)] if given else folders_in(LOGS))
    except UnreadableResults:
        return []
    for manifests in found.values():
        runs = [run for manifest in manifests for run in manifest.runs.values()]
        names = varying(runs)
        labels |= {run.id: run.label(names) for run in runs if run.id.startswith(incomplete)}
    return sorted(labels.items())
