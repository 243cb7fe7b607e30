"""Compares two results folders whose runs were not measured in turn.

Two processes that run the same code on different GPUs, or at different times, differ. One process a
side therefore gives no verdict such as slower. The interval of a ratio comes from noise floors that
were measured before, see `noise_floors`. Runs of which both folders have records of the same round
are paired.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

from jobs.errors import CommandError
from jobs.frame.results import Result, list_results
from jobs.results.counting import executions_of, is_complete
from jobs.results.record import Record
from jobs.results.run_states import Observation
from jobs.run import Run
from jobs.status import Status
from jobs.verdicts.block_cells import aa_floors, judged_cell
from jobs.verdicts.cell import Cell
from jobs.verdicts.noise_floors import NoiseFloors, noise_floors
from jobs.verdicts.pairs import paired_rounds
from jobs.verdicts.short_records import median_ms, read_short

MINUTES_APART_S = 3600.0  # largest time span, in seconds, for the floors of the same GPUs
LEAST_STATED = 1.01  # smallest ratio beyond the floor that is stated
RunOnDevice = tuple[str, str]  # run id, name of the device; "" if it is unknown


class Times(NamedTuple):
    """The results of all repeats of a run on one kind of device, in one folder."""

    statuses: tuple[Status, ...]
    times_ms: dict[str, list[float]]  # of processes, by phase
    gpus: frozenset[tuple[str, ...]]  # UUIDs of each process; () without GPUs
    spans: tuple[tuple[float, float], ...]  # start and end of each process (Unix time)

    @property
    def is_measured(self) -> bool:
        return bool(self.spans)


NOTHING = Times((), {}, frozenset(), ())


class Side(NamedTuple):
    """One of two results folders that are compared. It is cheap to send to another process."""

    folder: Path
    runs: dict[str, Run]
    results: dict[RunOnDevice, Times]
    cut: list[Record]  # records of executions of rounds of which a part is not in this folder
    notes: list[str]
    records: int  # number of records in the folder
    margin: float | None  # the key `margin` of the latest sweep that has it


def read_sides(before: Path, after: Path) -> tuple[Side, Side]:
    """Read two results folders at the same time, in two processes.

    Raises:
        CommandError: if a folder cannot be read.
    """
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    with ProcessPoolExecutor(1, get_context("fork"), default) as other:
        reading = other.submit(read_side, before)
        second: Side | CommandError
        try:
            second = read_side(after)
        except CommandError as error:
            second = error
        try:
            first = reading.result()  # an error of the first folder comes first
        except BrokenProcessPool:
            killed = f"{before} cannot be read: the process that read it was killed"
            raise CommandError(killed) from None
    if isinstance(second, CommandError):
        raise second
    return first, second


def read_side(folder: Path) -> Side:
    """Read one of two results folders.

    Raises:
        CommandError: if the folder cannot be read.
    """
    observation = read_short(folder)
    runs: dict[str, Run] = {}
    results: dict[RunOnDevice, list[Result]] = {}
    for result in list_results(observation):
        runs[result.run.id] = result.run
        results.setdefault((result.run.id, result.device), []).append(result)
    executions = executions_of(observation.records)
    return Side(
        folder,
        runs,
        {key: _times(found) for key, found in results.items()},
        [r for execution in executions if not is_complete(execution) for r in execution],
        [*map(str, observation.bad_lines), *observation.notes],
        len(observation.records),
        sweep_margin(observation),
    )


def sweep_margin(observation: Observation) -> float | None:
    """Return the key `margin` of the latest sweep of a folder that has it."""
    keys = (manifest.sweep.blocks for manifest in reversed(observation.manifests))
    return next((blocks.margin for blocks in keys if blocks and blocks.margin is not None), None)


def _times(results: list[Result]) -> Times:
    # A run that is executed again counts without the record of its earlier attempt.
    records = [r.record for r in results if r.status is Status.ok and r.record is not None]
    times: dict[str, list[float]] = {}
    for measurements in (record.measurements for record in records):
        for phase in measurements.samples_ms if measurements else ():
            time = median_ms(measurements, phase) if measurements else None
            if time is not None:
                times.setdefault(phase, []).append(time)
    return Times(
        tuple([result.status for result in results]),
        times,
        frozenset([tuple(sorted(str(g.get("uuid", "")) for g in r.gpus)) for r in records]),
        tuple([(record.started_at, record.finished_at) for record in records]),
    )


def folder_cells(
    before: Side, after: Side, margin: float, chosen: Collection[str] | None = None
) -> list[Cell]:
    """Compare all runs in two results folders.

    `margin`, of paired runs, and `chosen` are as for `block_cells`. There is a cell for each run,
    kind of device and phase. A run without measurements in one of the folders has one with the
    phase "".
    """
    paired = _paired_cells(before, after, margin)
    old, new = _matched(before, after)
    cells = [cell for cell in paired if chosen is None or cell.run.id in chosen]
    done = {(cell.run.id, cell.device) for cell in paired}
    for key in {**old, **new}:
        if key in done or (chosen is not None and key[0] not in chosen):
            continue
        run = before.runs[key[0]] if key[0] in before.runs else after.runs[key[0]]
        a, b = old.get(key, NOTHING), new.get(key, NOTHING)
        if a.is_measured and b.is_measured:
            cells += _measured_cells(run, key[1], a, b)
        else:
            cells.append(_cell_without(run, key[1], a, b))
    return cells


def common_results(before: Side, after: Side) -> int:
    """Return the number of runs that were submitted to both folders on the same kind of device."""
    old, new = _matched(before, after)
    return len(old.keys() & new.keys())


def same_attempts(before: Side, after: Side) -> int:
    """Return the number of runs whose times in both folders are of the same attempts."""
    return sum(
        times.is_measured and times == after.results.get(key)
        for key, times in before.results.items()
    )


def _paired_cells(before: Side, after: Side, margin: float) -> list[Cell]:
    """Return the cells of rounds of which one folder has the baseline, the other the candidate."""
    theirs, ours = before.cut, after.cut
    baselines = {record.run for record in theirs} - {record.run for record in ours}
    pairs = [
        pair
        for pair in paired_rounds([*theirs, *ours])
        if pair.rounds and pair.baseline in baselines and pair.candidate in after.runs
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


def _measured_cells(run: Run, device: str, a: Times, b: Times) -> list[Cell]:
    """Return a cell for each phase of a run that was measured in both folders."""
    cells = []
    floors = noise_floors(run, device, _are_same_gpus(a, b))
    for phase in {**a.times_ms, **b.times_ms}:
        if phase not in b.times_ms:
            cells.append(Cell(run, device, phase, "gone"))
        elif phase not in a.times_ms:
            cells.append(Cell(run, device, phase, "new"))
        else:
            before, after = median(a.times_ms[phase]), median(b.times_ms[phase])
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


def _are_same_gpus(a: Times, b: Times) -> bool:
    """Return whether all processes of two folders used the same GPUs, minutes apart."""
    used, spans = a.gpus | b.gpus, a.spans + b.spans
    return (
        len(used) == 1
        and () not in used
        and "" not in next(iter(used))
        and max(end for _, end in spans) - min(start for start, _ in spans) <= MINUTES_APART_S
    )


def _cell_without(run: Run, device: str, a: Times, b: Times) -> Cell:
    """Return the cell of a run that has no measurements in at least one of two folders.

    `a` is of the folder of the baseline, and `b` of the other folder.
    """
    statuses = (b if a.is_measured else a).statuses
    detail = ", ".join(dict.fromkeys(map(str, statuses)))
    if a.is_measured:
        if not b.statuses:
            return Cell(run, device, "", "gone")
        if all(status.is_live for status in statuses):
            return Cell(run, device, "", "not measured", detail=detail, pending=True)
        return Cell(run, device, "", "broken", detail=detail)
    if b.is_measured:
        return Cell(run, device, "", "fixed" if a.statuses else "new", detail=detail)
    return Cell(run, device, "", "not measured", detail=detail)


def _matched(
    before: Side, after: Side
) -> tuple[dict[RunOnDevice, Times], dict[RunOnDevice, Times]]:
    """Return the results of two folders, with a device for those whose device is unknown.

    The device is unknown if a run has no record in a folder. The run then gets the devices that it
    has in the other folder, so that its results in the two folders are compared.
    """
    old = _with_devices(before.results, after.results)
    return old, _with_devices(after.results, old)


def _with_devices(
    results: dict[RunOnDevice, Times], others: dict[RunOnDevice, Times]
) -> dict[RunOnDevice, Times]:
    found = dict(results)
    unknown = [run for run, device in results if not device]
    devices: dict[str, list[str]] = {}
    for run, device in others if unknown else ():
        if device:
            devices.setdefault(run, []).append(device)
    for run in unknown:
        if run in devices:
            missing = found.pop((run, ""))
            for device in devices[run]:
                found.setdefault((run, device), missing)
    return found
