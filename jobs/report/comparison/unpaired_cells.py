"""Compares two results folders whose runs were not measured in turn.

Two processes that run the same code on different GPUs, or at different times, differ. One process a
side therefore gives no verdict such as slower. The interval of a ratio comes from noise floors that
were measured before, see `noise_floors`. Runs of which both folders have records of the same round
are paired.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

from jobs.report.comparison.block_cells import aa_floors, judged_cell
from jobs.report.comparison.compared_cell import Cell
from jobs.report.comparison.noise_floors import NoiseFloors, noise_floors
from jobs.report.comparison.paired import paired_rounds
from jobs.report.comparison.process_times import (
    FolderTimes,
    ProcessTimes,
    RunOnDevice,
    process_time,
)
from jobs.run import Run

MINUTES_APART_S = 3600.0  # largest time span, in seconds, for the floors of the same GPUs
LEAST_STATED = 1.01  # smallest ratio beyond the floor that is stated


def folder_cells(
    before: FolderTimes,
    after: FolderTimes,
    margin: float,
    chosen: Collection[str] | None = None,
) -> list[Cell]:
    """Compare all runs in two results folders.

    `margin`, of paired runs, and `chosen` are as for `block_cells`. There is a cell for each run,
    kind of device and phase. A run without measurements in one of the folders has one with the
    phase "".
    """
    paired = _paired_cells(before, after, margin)
    old, new = dict(before.results), dict(after.results)
    _share_devices(old, new)
    _share_devices(new, old)
    nothing = ProcessTimes()
    cells = [cell for cell in paired if chosen is None or cell.run.id in chosen]
    done = {(cell.run.id, cell.device) for cell in paired}
    for key in {**old, **new}:
        if key in done or (chosen is not None and key[0] not in chosen):
            continue
        run = before.runs[key[0]] if key[0] in before.runs else after.runs[key[0]]
        a, b = old.get(key, nothing), new.get(key, nothing)
        if a.is_measured and b.is_measured:
            cells += _measured_cells(run, key[1], a, b)
        else:
            cells.append(_cell_without(run, key[1], a, b))
    return cells


def common_results(before: FolderTimes, after: FolderTimes) -> int:
    """Return the number of runs that were submitted to both folders on the same kind of device."""
    old, new = dict(before.results), dict(after.results)
    _share_devices(old, new)
    _share_devices(new, old)
    return len(old.keys() & new.keys())


def same_attempts(before: FolderTimes, after: FolderTimes) -> int:
    """Return the number of runs whose times in both folders are of the same processes."""
    return sum(
        times.is_measured and times == after.results.get(key)
        for key, times in before.results.items()
    )


def _paired_cells(before: FolderTimes, after: FolderTimes, margin: float) -> list[Cell]:
    """Return the cells of rounds of which one folder has the baseline, the other the candidate."""
    theirs = {record.run for record in before.cut}
    ours = {record.run for record in after.cut}
    pairs = [
        pair
        for pair in paired_rounds([*before.cut, *after.cut], process_time)
        if pair.rounds and pair.baseline in theirs - ours and pair.candidate in after.runs
    ]
    floors = aa_floors(pairs)
    return [
        judged_cell(
            Cell(after.runs[pair.candidate], pair.device, pair.phase, "unsure"),
            pair,
            margin,
            floors.get((pair.phase, pair.device)),
        )
        for pair in pairs
    ]


def _measured_cells(run: Run, device: str, a: ProcessTimes, b: ProcessTimes) -> list[Cell]:
    """Return a cell for each phase of a run that was measured in both folders."""
    cells = []
    floors = noise_floors(run, device, _are_same_gpus(a, b))
    for phase in {**a.times_ms, **b.times_ms}:
        if phase not in b.times_ms:
            cells.append(Cell(run, device, phase, "gone"))
        elif phase not in a.times_ms:
            cells.append(Cell(run, device, phase, "new"))
        else:
            before, after = _median(a.times_ms[phase]), _median(b.times_ms[phase])
            cells.append(_unpaired_cell(run, device, phase, before, after, floors))
    return cells


def _unpaired_cell(
    run: Run, device: str, phase: str, before: float, after: float, floors: NoiseFloors | None
) -> Cell:
    """Compare two times that were not measured in turn.

    `before` and `after` are the medians of the times of the processes, in ms.
    """
    if not before or not after:
        return Cell(run, device, phase, "unpaired", "", before, after)
    ratio = after / before
    if floors is None:
        return Cell(run, device, phase, "unpaired", "", before, after, ratio)
    floor = floors.at(before, after)
    low, high = ratio / (1 + floor.usual), ratio * (1 + floor.usual)
    # Rounded down, so that "at least" is true.
    beyond = math.floor(max(ratio, 1 / ratio) / (1 + floor.largest) * 100) / 100
    slower = "slower" if ratio > 1 else "faster"
    detail = f"at least {beyond:.2f}x {slower}" if beyond >= LEAST_STATED else ""
    return Cell(run, device, phase, "unpaired", "", before, after, ratio, low, high, detail)


def _median(times: list[float]) -> float:
    return times[0] if len(times) == 1 else median(times)


def _are_same_gpus(a: ProcessTimes, b: ProcessTimes) -> bool:
    """Return whether all processes of two folders used the same GPUs, minutes apart."""
    used = a.gpus | b.gpus
    start = min(a.started_at, b.started_at)
    return (
        len(used) == 1
        and () not in used
        and "" not in next(iter(used))
        and max(a.finished_at, b.finished_at) - start <= MINUTES_APART_S
    )


def _cell_without(run: Run, device: str, a: ProcessTimes, b: ProcessTimes) -> Cell:
    """Return the cell of a run that has no measurements in at least one of two folders.

    `a` is of the folder of the baseline, and `b` of the other folder.
    """
    reasons = [str(status) for status in dict.fromkeys((b if a.is_measured else a).statuses)]
    detail = ", ".join(reasons)
    if a.is_measured:
        if not b.statuses:
            return Cell(run, device, "", "gone")
        if all(status.is_live for status in b.statuses):
            return Cell(run, device, "", "not measured", detail=detail, pending=True)
        return Cell(run, device, "", "broken", detail=detail)
    if b.is_measured:
        return Cell(run, device, "", "fixed" if a.statuses else "new", detail=detail)
    return Cell(run, device, "", "not measured", detail=detail)


def _share_devices(
    side: dict[RunOnDevice, ProcessTimes], other: dict[RunOnDevice, ProcessTimes]
) -> None:
    """Assign devices to the results of one folder whose device is unknown.

    The device is unknown if a run has no record in this folder. The run then gets the devices that
    it has in the other folder, so that its results in the two folders are compared. `side` is
    changed in place.
    """
    unknown = [key for key in side if not key[1]]
    if not unknown:
        return
    devices: dict[str, list[RunOnDevice]] = {}
    for key in other:
        if key[1]:
            devices.setdefault(key[0], []).append(key)
    for key in unknown:
        theirs = devices.get(key[0])
        if theirs:
            missing = side.pop(key)
            side.update({known: missing for known in theirs if known not in side})
