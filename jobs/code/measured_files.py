"""Files outside this project whose code a run measures. Their modules are not imported."""

from __future__ import annotations

from pathlib import Path

from jobs import ROOT
from jobs.run import Run
from systems.external.reference import BadReference, Reference, find_module, is_reference

PACKAGES = ("jobs", "systems", "sweeps", "tests")  # folders that contain this project


def measured_files(run: Run) -> dict[str, Path | None]:
    """Return the files outside this project whose code a run measures, by name in the sweep.

    These are the module of the benchmark and the references in the parameters, such as
    `my_kernels/flash.py:MyFlash`. A file that does not exist is None.
    """
    names = [run.benchmark] if "." in run.benchmark else []
    files = {name: find(name) for name in (*names, *run.code)}
    return {name: path for name, path in files.items() if path is None or not is_project(path)}


def find(name: str) -> Path | None:
    """Return the file of a benchmark module or a reference, or None if there is none."""
    if not is_reference(name):
        return find_module(name)
    try:
        return Reference.parse(name).find()
    except BadReference:
        return None


def is_project(path: Path) -> bool:
    """Return whether a file belongs to this project."""
    return any(path.resolve().is_relative_to(ROOT / package) for package in PACKAGES)
