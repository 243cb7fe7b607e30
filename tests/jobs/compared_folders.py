"""Helpers for tests: results folders with measured blocks, and pairs of folders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.launch.plan_submission import Options, prepare
from jobs.results.manifest import Executor, Manifest, write_manifest
from jobs.results.record import BlockPlace, Record
from jobs.results.record_writer import RecordWriter
from jobs.results.run_states import observe
from jobs.run import Run
from jobs.verdicts.cell import Cell
from jobs.verdicts.compare import Comparison, compare_blocks, compare_folders
from jobs.verdicts.folder_cells import read_side
from tests.jobs.results_folder import CPU, TOY, Outcome, ResultsFolder, load, ok

Fate = Callable[[dict[str, Any], int], Outcome]  # of parameters and repeat
TimeOf = Callable[[Run, int, bool], Outcome]  # of run, round and whether it is the second time
MODES = "blocks: {interleave: [mode], baseline: {mode: exact}, rounds: 5}\n"


class Pair:
    """Two results folders of one sweep."""

    def __init__(self, tmp_path: Path, text: str):
        self.loaded = load(tmp_path, TOY + text)
        self.before = ResultsFolder(tmp_path / "before")
        self.after = ResultsFolder(tmp_path / "after")

    def fill(self, before: Fate, after: Fate, devices: tuple[str, str] = (CPU, CPU)) -> None:
        self.before.submit(self.loaded, before, devices[0])
        self.after.submit(self.loaded, after, devices[1])

    def compared(self, margin: float | None = None) -> Comparison:
        return compared_folders(self.before, self.after, margin)

    def verdicts(self) -> dict[Any, str]:
        return {(c.run.params["size"], c.phase): c.verdict for c in self.compared().cells}


def prepared(folder: ResultsFolder, tmp_path: Path, text: str) -> Manifest:
    """Write the manifest of a submission, and return it."""
    options = Options(Executor.local, folder.path, force=True)
    manifest = prepare(load(tmp_path, TOY + text), options, "sweep.yaml").manifest
    write_manifest(manifest)
    return manifest


def block_records(
    folder: ResultsFolder, manifest: Manifest, outcome_of: TimeOf, boot: str = "boot"
) -> list[Record]:
    """Return the records of all rounds of all blocks of a submission."""
    made = []
    for block in manifest.blocks:
        for number in range(block.rounds):
            tasks = block.tasks(number)
            for position, (run_id, repeat) in enumerate(tasks):
                run, second = manifest.runs[run_id], block.is_twice(run_id) and repeat % 2 == 1
                outcome = outcome_of(run, number, second)
                if outcome is None:
                    continue
                outcome = outcome | {"environment": {"boot_id": boot}}
                place = BlockPlace(
                    id=block.id,
                    round=number,
                    execution=f"{block.id}-{number}-{boot}",
                    position=position,
                    size=len(tasks),
                    baseline=run_id == block.baseline,
                    second=second,
                )
                record = folder.record(manifest, run, repeat, outcome)
                made.append(record.model_copy(update={"block": place}))
    return made


def write_records(folder: ResultsFolder, manifest: Manifest, records: list[Record]) -> None:
    writer = RecordWriter(folder.path / "records", manifest.id)
    for record in records:
        assert writer.write(record)


def blocks(
    tmp_path: Path,
    outcome_of: TimeOf,
    text: str = "grid: {size: [1], mode: [fast, exact]}\n" + MODES,
) -> ResultsFolder:
    """Return a results folder with measured blocks."""
    folder = ResultsFolder(tmp_path / "out")
    manifest = prepared(folder, tmp_path, text)
    write_records(folder, manifest, block_records(folder, manifest, outcome_of))
    return folder


def noisy(ratio_of: Callable[[Run], float], sigma: float = 0.002, seed: int = 3) -> TimeOf:
    """Return times near 1 ms for the baseline, and near the ratio for another mode."""
    draw = random.Random(seed)

    def outcome(run: Run, round: int, second: bool) -> Outcome:
        ratio = 1.0 if run.params["mode"] == "exact" else ratio_of(run)
        return ok(ratio * (1 + draw.gauss(0, sigma)))

    return outcome


def compared(folder: ResultsFolder, margin: float | None = None) -> Comparison:
    return compare_blocks(observe(folder.path), margin)


def compared_folders(
    before: ResultsFolder, after: ResultsFolder, margin: float | None = None
) -> Comparison:
    return compare_folders(read_side(before.path), read_side(after.path), margin)


def only(comparison: Comparison) -> Cell:
    (cell,) = comparison.cells
    return cell
