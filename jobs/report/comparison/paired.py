"""Pairs the records of candidates with those of their baseline that were measured in one round.

`jobs.block` explains blocks and rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jobs.report.comparison.verdicts import Round
from jobs.report.metrics import slowest_rank
from jobs.report.statistics import statistic
from jobs.results.record import BlockPlace, Measurements, Record

Value = Callable[[Measurements, str], float | None]  # value of a phase, None if there is none
Task = tuple[str, str]  # run id and checkout
_Key = tuple[str, str, str, str, str, str, str]  # the fields of `Pair` before `rounds`
Execution = list[Record]  # records of one execution of a round

TOO_SHORT = "time of 0 ms"


@dataclass(frozen=True)
class Pair:
    """The rounds of a candidate and the baseline of its block, for one phase and device."""

    candidate: str  # run id
    candidate_checkout: str  # name of the checkout of the code, empty for the present code
    baseline: str
    baseline_checkout: str
    block: str  # id of the block
    phase: str
    device: str
    rounds: tuple[Round, ...]
    # Complete rounds without both times: their number by reason, e.g. {"baseline: oom": 1}. A
    # reason is the status of the run that has no time, "no such phase" or "time of 0 ms".
    left_out: dict[str, int]
    # Those of `left_out` that count no longer: they are of an allocation in which the candidate was
    # never measured, for example because a library was missing, and in the latest allocation it was
    # measured in every round.
    repaired: dict[str, int]


def median_ms(measurements: Measurements, phase: str) -> float | None:
    """Return the median time of the samples in ms, or None if the phase was not timed.

    If several ranks measured a sample, its time is that of the slowest rank.
    """
    if phase not in measurements.samples_ms:
        return None
    return statistic(slowest_rank(measurements, phase), "median")


def paired_rounds(records: Iterable[Record], value: Value = median_ms) -> list[Pair]:
    """Return the rounds of each candidate with its baseline, by block, phase and device.

    Only complete executions of a round count, and only those of the latest code. If one round was
    executed several times in an allocation, the latest complete execution counts. Records without a
    block are ignored, and so are phases that at most half of the executions measured, as the
    sustained ones. `value` returns one of a phase, greater than 0, such as its median time in ms.

    Pairs are in the order of their first round. A candidate that always failed has a pair without
    rounds for each phase that was timed in its block.
    """
    executions = judged_executions(records)
    phases = _phases([execution for _, execution in executions])
    pairs: dict[_Key, dict[str, list[Round | str]]] = {}  # outcomes of rounds by allocation
    for allocation, execution in executions:
        twice = sorted(
            (record for record in execution if place_of(record).baseline),
            key=lambda record: place_of(record).second,
        )
        if not twice:
            continue  # the record of the baseline cannot be read
        first = twice[0]
        for phase in phases[place_of(first).id]:
            baseline = [_time(record, phase, value) for record in twice]
            for record in execution:
                if place_of(record).baseline:
                    continue
                key = (*_task(record), *_task(first), place_of(first).id, phase, first.device)
                outcomes = pairs.setdefault(key, {}).setdefault(allocation, [])
                outcomes.append(_round(allocation, baseline, _time(record, phase, value)))
    return [_pair(key, outcomes) for key, outcomes in pairs.items()]


def _pair(key: _Key, outcomes: dict[str, list[Round | str]]) -> Pair:
    """Return a pair.

    `key` has the fields of the pair before `rounds`. `outcomes` has, for each allocation, its
    rounds, or the reason why one has not both times. Allocations are ordered by their first round.
    """
    every = [outcome for found in outcomes.values() for outcome in found]
    rounds = tuple(outcome for outcome in every if isinstance(outcome, Round))
    left_out = Counter(outcome for outcome in every if isinstance(outcome, str))
    *earlier, latest = outcomes.values()
    repaired: Counter[str] = Counter()
    if all(isinstance(outcome, Round) for outcome in latest):
        for found in earlier:
            reasons = [outcome for outcome in found if isinstance(outcome, str)]
            if len(reasons) == len(found):
                repaired.update(reasons)
    return Pair(*key, rounds, dict(left_out), dict(repaired))


def judged_executions(records: Iterable[Record]) -> list[tuple[str, Execution]]:
    """Return the executions that verdicts rest on, each with its allocation.

    They are the complete ones of the latest code, and of several in an allocation the latest.
    """
    return counted_executions(of_latest_code(complete_executions(records)))


def _phases(executions: list[Execution]) -> dict[str, list[str]]:
    """Return the phases that are compared in each block, in the order of the records."""
    times: dict[str, Counter[str]] = {}
    count = Counter(place_of(execution[0]).id for execution in executions)
    for execution in executions:
        timed = {
            phase: None
            for record in execution
            if record.measurements is not None
            for phase in record.measurements.samples_ms
        }
        times.setdefault(place_of(execution[0]).id, Counter()).update(timed.keys())
    return {
        block: [phase for phase in found if 2 * found[phase] > count[block]]
        for block, found in times.items()
    }


def of_latest_code(complete: Iterable[Execution]) -> list[Execution]:
    """Return the executions in which every run has the sources of its latest execution.

    Executions are complete, and ordered by their start.
    """
    given = list(complete)
    latest = {_task(record): record.source_hash for execution in given for record in execution}
    return [
        execution
        for execution in given
        if all(record.source_hash == latest[_task(record)] for record in execution)
    ]


def _round(allocation: str, baseline: list[float | str], candidate: float | str) -> Round | str:
    """Return a round, or the reason why one of its times is missing."""
    if isinstance(candidate, str):
        return candidate
    times = tuple(time for time in baseline if not isinstance(time, str))
    if len(times) == len(baseline):
        return Round(allocation, times, candidate)
    return next(f"baseline: {reason}" for reason in baseline if isinstance(reason, str))


def complete_executions(records: Iterable[Record]) -> list[Execution]:
    """Return the complete executions of rounds, ordered by their start.

    Records without a block are ignored. If an attempt was repeated in its execution, the latest
    attempt is in it.
    """
    executions: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        if record.block is None:
            continue
        positions = executions.setdefault((record.block.id, record.block.execution), {})
        known = positions.get(record.block.position)
        if known is None or record.started_at >= known.started_at:
            positions[record.block.position] = record
    complete = [list(p.values()) for p in executions.values() if _is_complete(p)]
    return sorted(complete, key=started_at)


def counted_executions(complete: Iterable[Execution]) -> list[tuple[str, Execution]]:
    """Return the executions that count, each with its allocation, ordered by their start.

    Of several executions of one round in one allocation, the latest counts. They are complete.
    """
    latest: dict[tuple[str, str, int], tuple[str, Execution]] = {}
    for execution in complete:
        first = execution[0]
        allocation = allocation_of(first)
        key = (place_of(first).id, allocation, place_of(first).round)
        latest.pop(key, None)
        latest[key] = (allocation, execution)
    return list(latest.values())


def _is_complete(positions: dict[int, Record]) -> bool:
    return len(positions) >= place_of(next(iter(positions.values()))).size


def started_at(execution: Execution) -> float:
    """Return the time at which the first run of an execution started, in seconds (Unix time)."""
    return min(record.started_at for record in execution)


def allocation_of(record: Record) -> str:
    """Return the allocation of a record.

    Two jobs without the id of the boot may have run on different hosts. Each is an allocation.
    """
    return record.allocation or f"{record.submission}/{record.job}"


def _time(record: Record, phase: str, value: Value) -> float | str:
    """Return the value of a phase, or the reason why there is none."""
    if record.measurements is None:
        return str(record.status)
    found = value(record.measurements, phase)
    if found is None:
        return "no such phase"
    return found if found > 0 else TOO_SHORT


def _task(record: Record) -> Task:
    return record.run, record.checkout


def place_of(record: Record) -> BlockPlace:
    """Return the place in its block of a record that was measured in a block."""
    assert record.block is not None
    return record.block
