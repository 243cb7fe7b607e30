"""Compares two results folders whose runs were not measured in turn.

Repeats in a folder tell how much a time varies by itself, but not what separates the two folders,
such as other GPUs. Differences up to a floor are therefore never faster or slower.
docs/verdicts.md explains the statistics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np

from jobs.frame.metrics import median_ms
from jobs.frame.results import Result, list_results
from jobs.results.counting import allocation_of, code_of, wrong_code
from jobs.results.record import Record
from jobs.results.run_states import Observation
from jobs.run import Run
from jobs.status import Status
from jobs.verdicts.compared import Compared
from jobs.verdicts.conditions import on_same_gpus
from jobs.verdicts.judge import CONFIDENCE, LEVEL, Decision, Estimate, Verdict
from jobs.verdicts.pairs import TOO_SHORT

# Floors as relative differences. With torch's attention on 45 H200 GPUs, two processes differed by
# at most 4.8% on the same GPU and by 6.6% on others; two training steps by 24%.
SAME_GPUS, OTHER_GPUS, WITHOUT_REPEATS = 0.05, 0.07, 0.25
ON_CPUS = 0.25  # chosen: other work on the machine can change times by as much
ENOUGH = 4  # degrees of freedom from which on repeats tell how much a time varies
RunOnDevice = tuple[str, str]  # run id, name of the device; "" if it is unknown
Processes = dict[str, list[float]]  # times of a phase in ms, one of each process, by allocation


class Times(NamedTuple):
    """The results of all repeats of a run on one kind of device, in one folder."""

    statuses: list[Status]
    records: list[Record]  # those with status ok
    phases: dict[str, Processes]
    is_wrong: bool  # whether an attempt with the code that is compared was wrong


NOTHING = Times([], [], {}, False)
Matched = dict[RunOnDevice, tuple[Times, Times]]  # results before and after


def matched(before: Observation, after: Observation) -> Matched:
    """Return the results of each run and device in two folders, `NOTHING` if it has none.

    A run without a record has no device. It gets those that it has in the other folder.
    """
    old, new = _times_in(before), _times_in(after)
    old, new = _with_devices(old, new), _with_devices(new, old)
    return {key: (old.get(key, NOTHING), new.get(key, NOTHING)) for key in {**old, **new}}


def _times_in(observation: Observation) -> dict[RunOnDevice, Times]:
    results: defaultdict[RunOnDevice, list[Result]] = defaultdict(list)
    for result in list_results(observation):
        results[result.run.id, result.device].append(result)
    wrong = wrong_code(observation.records)
    return {key: _times(found, wrong) for key, found in results.items()}


def _times(results: list[Result], wrong: Collection[tuple[str, str, str | None]]) -> Times:
    found = [result.outcome for result in results if result.outcome is not None]
    records = [record for record in found if record.status is Status.ok]
    phases: dict[str, Processes] = {}
    for record in records:
        assert record.measurements is not None  # of every record with status ok
        for phase in record.measurements.samples_ms:
            of_phase = phases.setdefault(phase, {}).setdefault(allocation_of(record), [])
            of_phase.append(median_ms(record.measurements, phase) or 0.0)
    is_wrong = any(each.status is Status.wrong or code_of(each) in wrong for each in found)
    return Times([result.status for result in results], records, phases, is_wrong)


def _with_devices(
    own: dict[RunOnDevice, Times], other: Iterable[RunOnDevice]
) -> dict[RunOnDevice, Times]:
    devices: defaultdict[str, list[str]] = defaultdict(list)
    for run, device in other:
        devices[run].append(device)
    return {
        (run, each): times
        for (run, device), times in own.items()
        for each in ([device] if device else devices.get(run, [""]))
    }


def _logs(processes: Processes) -> list[float]:
    """Return the logarithm of the time of each process. Empty if a time is 0.

    Of several allocations it returns the means, because processes share the GPUs of theirs.
    """
    if not all(ms > 0 for times in processes.values() for ms in times):
        return []
    logs = [[math.log(ms) for ms in times] for times in processes.values()]
    return logs[0] if len(logs) == 1 else [fmean(each) for each in logs]


def folder_cells(
    runs: dict[str, Run], results: Matched, margin: float, chosen: Collection[str] | None = None
) -> list[Compared]:
    """Compare all runs in two results folders.

    There is a cell for each run, kind of device and phase. A run without times to compare has one
    with the phase "". How much times vary comes from all runs, also from those not chosen.
    """
    noises = _noises(results)
    cells: list[Compared] = []
    for (run_id, device), (a, b) in results.items():
        if chosen is not None and run_id not in chosen:
            continue
        cell = Compared(runs[run_id], device, "", "not measured")
        if outcome := _without_times(a, b):
            verdict, detail = outcome
            pending = verdict == "not measured" and any(status.is_live for status in b.statuses)
            cells.append(replace(cell, verdict=verdict, detail=detail, pending=pending))
            continue
        same_gpus = on_same_gpus(a.records, b.records)
        for phase in {**a.phases, **b.phases}:
            cell = replace(cell, phase=phase)
            if phase not in a.phases or phase not in b.phases:
                cells.append(replace(cell, verdict="gone" if phase in a.phases else "new"))
                continue
            ours, theirs = _logs(a.phases[phase]), _logs(b.phases[phase])
            if not (ours and theirs):
                cells.append(replace(cell, detail=TOO_SHORT))
                continue
            noise = noises[phase, device]
            judged = _judge(
                a.phases[phase], b.phases[phase], noise, noise.floor(device, same_gpus), margin
            )
            why = judged.why_unsure if judged.verdict == "unsure" else []
            timed = replace(
                cell,
                verdict=judged.verdict,
                before=math.exp(fmean(ours)),
                after=math.exp(fmean(theirs)),
                detail="; ".join(filter(None, [_reasons(b), *why])),
                judged=judged,
            )
            cells.append(timed)
    return cells


def _without_times(a: Times, b: Times) -> tuple[str, str] | None:
    """Return verdict and detail of a run whose times are not compared. None if they are."""
    if b.is_wrong:
        return "wrong", "before, too" if a.is_wrong else ""
    if a.is_wrong and b.records:
        return "fixed", "before: wrong"
    if not a.records and b.records:
        broke = (s.can_be_recorded and not s.runs_again_in_its_job for s in a.statuses)
        return "fixed" if any(broke) else "new", _reasons(a)
    if a.records and not b.statuses:
        return "gone", ""
    failed = [s for s in b.statuses if s is not Status.ok and not s.is_live]
    lasting = sum(not status.runs_again_on_submit for status in failed)
    if a.records and b.records and lasting <= len(b.records):
        return None
    return "broken" if a.records and failed else "not measured", _reasons(b if a.records else a)


def _reasons(times: Times) -> str:
    """Return the statuses of processes without times, such as `oom` or `1 of 3 processes: oom`."""
    found = [status for status in times.statuses if status is not Status.ok]
    reasons = ", ".join(dict.fromkeys(map(str, found)))
    some = 0 < len(found) < len(times.statuses)
    return f"{len(found)} of {len(times.statuses)} processes: {reasons}" if some else reasons


@dataclass
class _Noise:
    """How much times of the same code vary within a folder, as logarithms."""

    squares: float = 0.0  # sum of squared deviations from the mean of their run
    freedom: int = 0  # degrees of freedom
    differences: list[float] = field(default_factory=list)  # between allocations

    def add(self, processes: Processes) -> None:
        """Add the processes of a run in a folder."""
        logs = _logs(processes)
        if len(logs) < 2:
            return
        mean = fmean(logs)
        self.squares += math.fsum([(log - mean) ** 2 for log in logs])
        self.freedom += len(logs) - 1
        if len(processes) > 1:
            self.differences += [abs(a - b) for a, b in combinations(logs, 2)]

    def floor(self, device: str, same_gpus: bool) -> float:
        """Return the relative difference up to which folders with the same code differ."""
        if self.freedom < ENOUGH:
            return WITHOUT_REPEATS
        seen = np.quantile(self.differences, CONFIDENCE) if self.differences else 0.0
        # Not the smaller one: allocations of one folder are few, and often of the same GPUs.
        least = SAME_GPUS if same_gpus else OTHER_GPUS
        return max(math.expm1(float(seen)), ON_CPUS if device.startswith("cpu:") else least)


def _noises(results: Matched) -> defaultdict[tuple[str, str], _Noise]:
    """Return the noise of each phase on each kind of device."""
    found: defaultdict[tuple[str, str], _Noise] = defaultdict(_Noise)
    for (_, device), folders in results.items():
        for phase, processes in (each for times in folders for each in times.phases.items()):
            found[phase, device].add(processes)
    return found


def _judge(
    before: Processes, after: Processes, pooled: _Noise, floor: float, margin: float
) -> Verdict:
    """Compare the processes of a run in two folders.

    The noise is that of the run if it has enough repeats, else that of all runs (`pooled`). The
    interval is that of Student's t, and at least as wide as the floor.
    """
    own = _Noise()
    own.add(before)
    own.add(after)
    noise = own if own.freedom >= ENOUGH else pooled
    ours, theirs = _logs(before), _logs(after)
    variance = noise.squares / max(noise.freedom, 1)
    error = math.sqrt(variance * (1 / len(ours) + 1 / len(theirs)))
    mean = fmean(theirs) - fmean(ours)
    found = Estimate(mean, error, noise.freedom)
    p = found.p if noise.freedom >= ENOUGH else None
    half = max(math.log1p(floor), found.half_width(CONFIDENCE) if noise.freedom else 0.0)
    limit = math.log1p(margin)
    verdict: Decision = "unsure"
    if abs(mean) > half and (p is None or p < LEVEL):
        verdict = "slower" if mean > 0 else "faster"
    elif abs(mean) + half <= limit:
        verdict = "same"
    ratio, low, high = (math.exp(min(log, 700.0)) for log in (mean, mean - half, mean + half))
    return Verdict(
        verdict,
        ratio,
        low,
        high,
        p,
        rounds=sum(map(len, [*before.values(), *after.values()])),
        allocations=len(before.keys() | after.keys()),
        floor=floor,
        not_slower=mean + half <= limit,
        beyond_margin=mean > limit,
    )
