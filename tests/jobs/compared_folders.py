"""Helpers for tests: results folders with measured blocks, and pairs of folders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.results.run_states import observe
from jobs.sweep.load import load_sweep
from jobs.verdicts.compare import Comparison, compare_blocks, compare_folders
from jobs.verdicts.compared import Compared
from tests.jobs.results_folder import H200, TOY, Outcome, Outcomes, ResultsFolder, load, ok, write

Fate = Callable[[dict[str, Any], int], Outcome]  # of parameters and repeat
MODES = "blocks: {interleave: [mode], baseline: {mode: exact}, rounds: 5}\n"


class Pair:
    """Two results folders of one sweep."""

    def __init__(self, tmp_path: Path, text: str):
        self.loaded = load(tmp_path, TOY + text)
        self.before = ResultsFolder(tmp_path / "before")
        self.after = ResultsFolder(tmp_path / "after")

    def fill(
        self, before: Outcomes, after: Outcomes, devices: tuple[str, str] = (H200, H200)
    ) -> None:
        self.before.submit(self.loaded, before, devices[0])
        self.after.submit(self.loaded, after, devices[1])

    def compared(self, margin: float | None = None) -> Comparison:
        return compare_folders(observe(self.before.path), observe(self.after.path), margin)

    def verdicts(self) -> dict[Any, str]:
        return {(c.run.params["size"], c.phase): c.verdict for c in self.compared().cells}


def measure(folder: ResultsFolder, outcome_of: Fate, boot: str = "boot", **fields: Any) -> None:
    """Add a record of each task of the sweep with blocks whose file is beside the folder."""
    loaded = load_sweep(folder.path.parent / "sweep.yaml")
    folder.submit_rounds(loaded, outcome_of, boot, gpu=None, **fields)


def blocks(
    tmp_path: Path,
    outcome_of: Fate,
    text: str = "grid: {size: [1], mode: [fast, exact]}\n" + MODES,
    **fields: Any,
) -> ResultsFolder:
    """Return a results folder with measured blocks, whose records have `fields`."""
    write(tmp_path, TOY + text)
    folder = ResultsFolder(tmp_path / "out")
    measure(folder, outcome_of, **fields)
    return folder


def noisy(ratio: float, sigma: float = 0.002, seed: int = 3) -> Fate:
    """Return times near 1 ms for the baseline, and near the ratio for another mode."""
    draw = random.Random(seed)

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        exact = 1.0 if params["mode"] == "exact" else ratio
        return ok(exact * (1 + draw.gauss(0, sigma)))

    return outcome


def compared(folder: ResultsFolder, margin: float | None = None) -> Comparison:
    return compare_blocks(observe(folder.path), margin)


def only(comparison: Comparison) -> Compared:
    (cell,) = comparison.cells
    return cell
