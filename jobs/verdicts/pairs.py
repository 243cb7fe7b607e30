"""Pairs the records of candidates with those of their baseline that were measured in one round.

`jobs.block` explains blocks and rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.frame.metrics import median_ms
from jobs.results.counting import Execution, code_of, judged_executions, place_of, wrong_code
from jobs.results.record import Record
from jobs.status import Status
from jobs.verdicts.judge import RESOLUTION_MS, Round, Verdict

_Key = tuple[str, str, str, str, str, str]  # the fields of `Pair` before `rounds`
# A round, or the reason why it has not both times, and its records: of the baseline, and last the
# candidate
_Outcome = tuple[Round | str, tuple[Record, ...]]

TOO_SHORT = "time of 0 ms"
# Statuses with which a candidate fails by itself, and not because it was stopped.
_LASTING = (Status.error, Status.wrong, Status.oom, Status.timeout)


@dataclass(frozen=True)
class Pair:
    """The rounds of a candidate and the baseline of its block, for one phase and device."""

    candidate: str  # run id
    baseline: str  # run id
    baseline_checkout: str  # name of the checkout of its code, empty for the present code
    block: str  # id of the block
    phase: str
    device: str
    rounds: tuple[Round, ...]
    # Complete rounds without both times: their number by reason, e.g. {"baseline: oom": 1}. A
    # reason is the status of the run that has no time, "no such phase" or "time of 0 ms".
    left_out: Counter[str]
    # Number of those in which the candidate failed by itself. Those of an allocation in which it
    # was never measured, for example because a library was missing, do not count if it was measured
    # in every round of the latest allocation.
    failures: int
    records: tuple[tuple[Record, ...], ...]  # of the baseline, and last the candidate, by round
    wrong: str = ""  # whose output was ever wrong with this code: "candidate", "baseline" or ""
    verdict: Verdict | None = None  # None: there are no rounds, or they are not judged yet

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host, not the GPU, determined the time of the phase in some process."""
        facts = (r.measurements.facts for pair in self.records for r in pair if r.measurements)
        marked = (one.get("launch_bound") for one in facts)
        return any(isinstance(phases, list) and self.phase in phases for phases in marked)


def paired_rounds(records: Sequence[Record]) -> list[Pair]:
    """Return the rounds of each candidate with its baseline, by block, phase and device.

    Only complete executions of a round count, and only those of the latest code. If one round was
    executed several times in an allocation, the latest complete execution counts. Records without a
    block are ignored, and so are phases that at most half of the executions measured.

    Pairs are in the order of their first round. A candidate that always failed has a pair without
    rounds for each phase that was timed in its block.
    """
    executions = judged_executions(records)
    phases = _phases([execution for _, execution in executions])
    wrong = wrong_code(records)
    found: dict[_Key, dict[str, list[_Outcome]]] = {}  # outcomes of rounds by allocation
    for allocation, execution in executions:
        twice = sorted(
            (record for record in execution if place_of(record).baseline),
            key=lambda record: place_of(record).second,
        )
        if not twice:
            continue  # the record of the baseline cannot be read
        candidates = [record for record in execution if not place_of(record).baseline]
        first, block = twice[0], place_of(twice[0]).id
        for phase in phases[block]:
            baseline = [_value(record, phase) for record in twice]
            for record in candidates:
                key = (record.run, first.run, first.checkout, block, phase, first.device)
                values = [*baseline, _value(record, phase)]
                outcome = _round(allocation, values, bool(record.gpus)), (*twice, record)
                found.setdefault(key, {}).setdefault(allocation, []).append(outcome)
    return [_pair(key, outcomes, wrong) for key, outcomes in found.items()]


def _pair(
    key: _Key, outcomes: dict[str, list[_Outcome]], wrong: Container[tuple[Any, ...]]
) -> Pair:
    """Return a pair.

    `key` has the fields of the pair before `rounds`. `outcomes` has those of the rounds of each
    allocation. Allocations are ordered by their first round.
    """
    every = [outcome for found in outcomes.values() for outcome in found]
    rounds = [(found, records) for found, records in every if isinstance(found, Round)]
    *_, latest = outcomes.values()
    is_repaired = all(isinstance(found, Round) for found, _ in latest)
    failures = sum(
        found in _LASTING
        for of_allocation in outcomes.values()
        if not is_repaired or any(isinstance(found, Round) for found, _ in of_allocation)
        for found, _ in of_allocation
    )
    _, (baseline, *_, candidate) = every[-1]
    sides = {"candidate": candidate, "baseline": baseline}
    bad = (side for side, record in sides.items() if code_of(record) in wrong)
    return Pair(
        *key,
        tuple(round for round, _ in rounds),
        Counter(found for found, _ in every if isinstance(found, str)),
        failures,
        tuple(records for _, records in rounds),
        next(bad, ""),
    )


def _phases(executions: list[Execution]) -> dict[str, list[str]]:
    """Return what is compared in each block, in the order of the records. See `Pair.phase`."""
    times: dict[str, Counter[str]] = {}
    count = Counter(place_of(execution[0]).id for execution in executions)
    for execution in executions:
        measured = [r.measurements for r in execution if r.measurements is not None]
        timed = {phase: None for found in measured for phase in found.samples_ms}
        times.setdefault(place_of(execution[0]).id, Counter()).update(timed.keys())
    return {
        block: [phase for phase in found if 2 * found[phase] > count[block]]
        for block, found in times.items()
    }


def _round(allocation: str, values: Sequence[float | str], on_gpu: bool) -> Round | str:
    """Return a round, or the reason why one of its values is missing."""
    *baseline, candidate = values
    if isinstance(candidate, str):
        return candidate
    times = []
    for value in baseline:
        if isinstance(value, str):
            return f"baseline: {value}"
        times.append(value)
    return Round(allocation, tuple(times), candidate, RESOLUTION_MS if on_gpu else 0.0)


def _value(record: Record, phase: str) -> float | str:
    """Return the median time of a phase in ms, or why there is none."""
    if record.measurements is None:
        return str(record.status)
    found = median_ms(record.measurements, phase)
    if found is None:
        return "no such phase"
    return found if found > 0 else TOO_SHORT
