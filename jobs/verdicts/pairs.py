"""Pairs the records of candidates with those of their baseline that were measured in one round.

`jobs.block` explains blocks and rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jobs.results.counting import Execution, judged_executions, place_of
from jobs.results.record import Record
from jobs.verdicts.judge import Round
from jobs.verdicts.short_records import median_ms

_Key = tuple[str, str, str, str, str, str, str]  # the fields of `Pair` before `rounds`

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


def paired_rounds(records: Iterable[Record]) -> list[Pair]:
    """Return the rounds of each candidate with its baseline, by block, phase and device.

    Only complete executions of a round count, and only those of the latest code. If one round was
    executed several times in an allocation, the latest complete execution counts. Records without a
    block are ignored, and so are phases that at most half of the executions measured, as the
    sustained ones.

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
            baseline = [_time(record, phase) for record in twice]
            for record in execution:
                if place_of(record).baseline:
                    continue
                key = (
                    *(record.run, record.checkout, first.run, first.checkout),
                    *(place_of(first).id, phase, first.device),
                )
                outcomes = pairs.setdefault(key, {}).setdefault(allocation, [])
                outcomes.append(_round(allocation, baseline, _time(record, phase)))
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


def _round(allocation: str, baseline: list[float | str], candidate: float | str) -> Round | str:
    """Return a round, or the reason why one of its times is missing."""
    if isinstance(candidate, str):
        return candidate
    times = tuple(time for time in baseline if not isinstance(time, str))
    if len(times) == len(baseline):
        return Round(allocation, times, candidate)
    return next(f"baseline: {reason}" for reason in baseline if isinstance(reason, str))


def _time(record: Record, phase: str) -> float | str:
    """Return the median time of a phase in ms, or the reason why there is none."""
    if record.measurements is None:
        return str(record.status)
    found = median_ms(record.measurements, phase)
    if found is None:
        return "no such phase"
    return found if found > 0 else TOO_SHORT
