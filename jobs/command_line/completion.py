"""Shell completion of the arguments of commands. `jobs.console` installs it for `sweeps`.

Each function returns the candidates for an incomplete word. If there are none, the shell completes
file names. A shell adds a space after an only candidate. Functions that expect more text after a
candidate therefore return a second one.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

from jobs.errors import InputError
from jobs.results.latest import LOGS, folders_in, latest_folder, manifests_of
from jobs.results.manifest import read_manifests
from jobs.results.unreadable import UnreadableResults
from jobs.run import varying
from jobs.status import Status
from jobs.sweep.benchmarks import Benchmarks, known_benchmarks
from jobs.sweep.load import load_sweep_benchmarks
from jobs.sweep.schema import scalar_keys
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


def key_values(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return overrides of a sweep that begin with a word: keys, or names that are valid values.

    Bash splits words at "=". It passes `dtype=bf` as the words "dtype", "=" and "bf", and `dtype=`
    as "dtype" and "". It then expects only the value. Other shells pass and expect `dtype=bf16`.

    Args:
        ctx: the arguments before the incomplete word.
    """
    words = [str(word) for word in ctx.params.get("overrides") or ()]
    joined = "\n".join(words).replace("\n=\n", "=").split("\n")
    try:
        benchmarks = load_sweep_benchmarks(Path(ctx.params["sweep"]), joined)
    except InputError:
        benchmarks = None
    if incomplete and len(words) > 1 and words[-1] == "=":
        return _values(benchmarks, words[-2], incomplete)
    if not incomplete and joined[-1] and "=" not in joined[-1]:
        return _values(benchmarks, joined[-1], "")
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={one}" for one in _values(benchmarks, key, value)]
    keys = [*(benchmarks.fields if benchmarks else ()), *scalar_keys()]
    found = [key for key in keys if key.startswith(incomplete)]
    if len(found) == 1:
        (key,) = found
        return [f"{key}={one}" for one in _values(benchmarks, key, "") or ("", "VALUE")]
    return [f"{key}=" for key in found]


def _values(benchmarks: Benchmarks | None, key: str, incomplete: str) -> list[str]:
    """Return the names that are valid values of a key and begin with a word.

    The word may be the beginning of a list, such as `[naive,fl`.
    """
    if key == "benchmark":
        names = known_benchmarks()
    else:
        found = [name for benchmark in benchmarks or () for name in benchmark.choices(key)]
        names = list(dict.fromkeys(found))
    if not incomplete.startswith("["):
        return [name for name in names if name.startswith(incomplete)]
    start = max(incomplete.rfind(mark) for mark in "[, ") + 1
    before, incomplete = incomplete[:start], incomplete[start:]
    taken = before.strip("[, ").replace(",", " ").split()
    fitting = [name for name in names if name.startswith(incomplete) and name not in taken]
    if len(fitting) == 1:
        return [f"{before}{fitting[0]}{end}" for end in (",", "]")]
    return [before + name for name in fitting]


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


def conditions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return conditions for the option --where that begin with a text. Its last word is completed.

    Args:
        ctx: the arguments before the incomplete text. The parameters are those of the runs in the
            results folder, by default in the folder of the last accepted submission.
    """
    before, space, word = incomplete.rpartition(" ")
    before += space
    if before.endswith(("status == ", "status != ")):
        return [before + status for status in Status if status.startswith(word)]
    try:
        given = ctx.params.get("folder") or latest_folder()
        manifests = read_manifests(Path(given)) if given else []
    except (FileNotFoundError, UnreadableResults):
        manifests = []
    names = {"benchmark", "repeat", "status"}
    names |= {name for m in manifests for run in m.runs.values() for name in run.params}
    found = sorted(name for name in names if name.startswith(word))
    if len(found) == 1:
        return [f"{before}{found[0]} {operator}" for operator in ("==", "!=")]
    return [before + name for name in found]
