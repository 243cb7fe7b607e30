"""Pairs the records of candidates with those of their baseline that were measured in one round.

`jobs.block` explains blocks and rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.frame.metrics import median_ms
from jobs.results.counting import Execution, code_of, judged_executions, place_of, wrong_code
from jobs.results.record import Record
from jobs.status import Status
from jobs.verdicts.judge import RESOLUTION_MS, Round, Verdict

TOO_SHORT = "time of 0 ms"
# Statuses with which a candidate fails by itself, and not because it was stopped.
_OWN_FAILURES = [status for status in Status if status.runs_again_on_retry]


@dataclass
class Pair:
    """The complete rounds of a candidate and the baseline of its block, for a phase and device."""

    candidate: str  # run id
    baseline: str  # run id
    block: str  # id of the block
    phase: str
    device: str
    rounds: list[Round] = field(default_factory=list)  # those with both times
    # The allocation of each other round, and its reason: the status of the run that has no time,
    # such as "baseline: oom", "no such phase" or "time of 0 ms".
    left_out: list[tuple[str, str]] = field(default_factory=list)
    latest: str = ""  # allocation of the latest round
    wrong: str = ""  # whose output was ever wrong with this code: "candidate", "baseline" or ""
    verdict: Verdict | None = None  # None: there are no rounds, or they are not judged yet

    @property
    def failures(self) -> int:
        """The number of rounds in which the candidate failed by itself.

        Those of an allocation in which it was never measured, for example because a library was
        missing, do not count if it was measured in every round of the latest allocation.
        """
        found = self.left_out
        if self.latest not in {allocation for allocation, _ in found}:
            measured = {round.allocation for round in self.rounds}
            found = [each for each in found if each[0] in measured]
        return sum(reason in _OWN_FAILURES for _, reason in found)

    @property
    def reason(self) -> str:
        """The most frequent reason of rounds that are left out. Empty: none are."""
        counts = Counter(reason for _, reason in self.left_out)
        return max(counts, key=lambda reason: counts[reason], default="")

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host, not the GPU, determined the time of the phase in some process."""
        records = (record for round in self.rounds for record in round.records)
        marked = (r.measurements.facts.get("launch_bound") for r in records if r.measurements)
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
    pairs: dict[tuple[str, str, str, str, str], Pair] = {}
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
            for record in candidates:
                key = (record.run, first.run, block, phase, first.device)
                pair = pairs.setdefault(key, Pair(*key))
                found = _round(allocation, (*twice, record), phase)
                if isinstance(found, Round):
                    pair.rounds.append(found)
                else:
                    pair.left_out.append((allocation, found))
                pair.latest = allocation
                sides = {"candidate": record, "baseline": first}
                pair.wrong = next((side for side, r in sides.items() if code_of(r) in wrong), "")
    return list(pairs.values())


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


def _round(allocation: str, records: tuple[Record, ...], phase: str) -> Round | str:
    """Return a round, or the reason why one of its values is missing."""
    *baseline, candidate = (_value(record, phase) for record in records)
    if isinstance(candidate, str):
        return candidate
    times = []
    for value in baseline:
        if isinstance(value, str):
            return f"baseline: {value}"
        times.append(value)
    resolution_ms = RESOLUTION_MS if records[-1].gpus else 0.0
    return Round(allocation, tuple(times), candidate, resolution_ms, records)


def _value(record: Record, phase: str) -> float | str:
    """Return the median time of a phase in ms, or why there is none."""
    if record.measurements is None:
        return str(record.status)
    found = median_ms(record.measurements, phase)
    if found is None:
        return "no such phase"
    return found if found > 0 else TOO_SHORT
