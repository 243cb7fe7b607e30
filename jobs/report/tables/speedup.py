"""Computes the speedup of table cells relative to a baseline column.

If both cells were measured in the same rounds of a block, the speedup is that of the rounds, with
its confidence interval. Otherwise it is the ratio of the two cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from jobs.formatting import format_number, format_range, format_ratio
from jobs.frame.results import Key
from jobs.frame.rows import Cell, Interval
from jobs.frame.statistics import statistic
from jobs.report.tables.pivot import Pivot
from jobs.results.counting import allocation_of, place_of
from jobs.results.record import Record
from jobs.results.run_states import Observation
from jobs.verdicts.block_cells import sweep_margin, verdicts_of
from jobs.verdicts.judge import LEVEL, Round, Verdict, judge

NOT_PAIRED = "the runs were not measured in the same blocks"
DIGITS = 6  # significant ones of a speedup in CSV
ON_EACH = "on each allocation"
_MEANINGS = {  # of the texts of speedups with an interval, by `Speedup.kind`
    "decided": f"an interval without a word: faster or slower, significant at {LEVEL:.1%}",
    "same": "same: equal within the margin",
    "unsure": "unsure: not decided",
    ON_EACH: f"{ON_EACH}: faster or slower on each alone, by different amounts",
    "noise": "noise: not decided, and the interval is wider than the speedup",
}
_Measured = list[tuple[Record, float]]  # in one execution of a round


@dataclass(frozen=True)
class Speedup:
    """Speedup of a cell relative to the cell of the baseline in the same row.

    A speedup above 1 means that the cell is better than the baseline: it has a lower time or a
    higher rate.
    """

    ratio: float | None = None
    instead: str = ""  # text of a cell without a speedup: the reason, a dash or ""
    interval: Interval | None = None  # 95% confidence interval of a paired speedup
    spread: float = 0.0  # without an interval: the larger relative spread of the two cells
    rounds: int = 0  # number of rounds of a block whose ratio it is; 0: not paired
    verdict: str = ""  # faster, slower, same or unsure, by the rounds
    may_be_paired: bool = True  # False: of extremes, or of no time, it is the ratio of the cells

    @property
    def text(self) -> str:
        """The speedup as text, such as `1.95x`.

        It has the interval, as in `1.95x [1.93, 1.97]`, with the verdict if it is same or unsure.
        The word noise may stand instead of an interval, see `format_ratio`.
        """
        if self.ratio is None:
            return self.instead
        low, high = self.interval or (0.0, self.spread * abs(self.ratio))
        if self.interval is None or self.kind == "noise":
            return format_ratio(self.ratio, high - low)
        ratio, interval = self.texts
        return " ".join(filter(None, [f"{ratio}x", interval, self.word]))

    @property
    def kind(self) -> str:
        """What an interval says: decided, a word, or noise if it is wider than the ratio."""
        if not self.word or self.ratio is None or self.interval is None:
            return "decided"
        low, high = self.interval
        is_noise = high - low > abs(self.ratio) and self.word != ON_EACH
        return "noise" if is_noise else self.word

    @property
    def number(self) -> str:
        """The speedup as a number for CSV, or the reason why there is none."""
        return self.instead if self.ratio is None else format_number(self.ratio, DIGITS)

    @property
    def word(self) -> str:
        """The verdict if it is same or unsure, or that it is of each allocation alone.

        The number tells the others.
        """
        if self.verdict in ("same", "unsure"):
            return self.verdict
        return ON_EACH if self.interval and self.interval[0] <= 1 <= self.interval[1] else ""

    @property
    def texts(self) -> tuple[str, str]:
        """The ratio, which must be known, and its interval as texts: `1.95` and `[1.93, 1.97]`."""
        if self.interval is None:
            return f"{self.ratio:.2f}", ""
        low, high = self.interval
        # Two decimals would give a narrow interval the same ends, or hide whether 1 is inside.
        digits = 3 if high - low < 0.02 or 1 in (round(low, 2), round(high, 2)) else 2
        return f"{self.ratio:.{digits}f}", f"[{low:.{digits}f}, {high:.{digits}f}]"

    @property
    def paired(self) -> bool:
        return self.rounds > 0

    @property
    def pairing(self) -> str:
        """Whether the two cells are paired, for CSV: yes, no or nothing."""
        if self.ratio is None or not self.may_be_paired:
            return ""
        return "yes" if self.paired else "no"


def speedup_column(pivot: Pivot, column: Key, baseline: dict[str, Any]) -> list[Speedup] | None:
    """Return the speedups of a column relative to the baseline column, one per row.

    `baseline` has dimensions and their values in the baseline column, such as {"implementation":
    "naive"}. In all others, it has the values of `column`. None if the table has no baseline
    column, or if `column` is it, as every column is if `baseline` is empty.
    """
    named = zip(pivot.column_names, column, strict=True)
    base = tuple(baseline.get(name, own) for name, own in named)
    if base == column or base not in pivot.column_keys:
        return None
    cells = [
        (pivot.cells.get((row, column)), pivot.cells.get((row, base))) for row in pivot.row_keys
    ]
    return [speedup_of(cell, other, pivot.shown.observation) for cell, other in cells]


def speedup_notes(speedups: Iterable[Speedup]) -> list[str]:
    """Return the notes on speedups in a table that are not paired."""
    timed = [speedup for speedup in speedups if speedup.ratio is not None and speedup.may_be_paired]
    unpaired = [speedup for speedup in timed if not speedup.paired]
    notes = []
    if unpaired and len(unpaired) == len(timed):
        notes.append(f"speedups are not paired: {NOT_PAIRED}")
    elif unpaired:
        notes.append(f"speedups without an interval are not paired: {NOT_PAIRED}")
    rounds = [speedup.rounds for speedup in timed if speedup.interval]
    if len(set(rounds)) > 1:
        notes.append(f"speedups with an interval are of {format_range(rounds, 'round')}")
    if any(speedup.paired and speedup.interval is None for speedup in timed):
        notes.append("paired speedups without an interval are from a single round")
    return notes


def text_notes(speedups: Iterable[Speedup]) -> list[str]:
    """Return a note on what the texts of paired speedups in a table mean."""
    kinds = {speedup.kind for speedup in speedups if speedup.interval}
    found = [text for kind, text in _MEANINGS.items() if kind in kinds]
    return [f"{'; '.join(found)}, see docs/verdicts.md"] if found else []


def speedup_of(cell: Cell | None, reference: Cell | None, observation: Observation) -> Speedup:
    """Return the speedup of a cell relative to the cell of the baseline, of the same statistic.

    Without a cell, the result has no text. If one of the two cells has no number, or the number is
    zero, its text is the reason or a dash.
    """
    if cell is None:
        return Speedup()
    mine = cell.number
    if mine is None:
        return Speedup(instead="–")
    if reference is None:
        return Speedup(instead="no baseline")
    theirs = reference.number
    if theirs is None:
        return Speedup(instead=f"baseline: {reference.text()}")
    if not mine or not theirs:
        return Speedup(instead="–")
    lower_is_better = cell.metric.direction == "lower"
    ratio = theirs / mine if lower_is_better else mine / theirs
    spread = max(cell.spread, reference.spread)
    if not cell.metric.is_timed or cell.statistic in ("min", "max"):
        return Speedup(ratio, spread=spread, may_be_paired=False)
    rounds = _rounds(cell, reference)
    if not rounds:
        return Speedup(ratio, spread=spread)
    verdict = _verdict(cell, reference, observation, rounds)
    if lower_is_better:  # the ratio of a verdict is candidate / baseline
        verdict = verdict.inverse
    low, high = verdict.low, verdict.high
    interval = None if low is None or high is None else (low, high)
    word: str = verdict.verdict
    if word in ("faster", "slower"):  # of a time; of a speedup or a rate, more is better
        word = "faster" if verdict.ratio > 1 else "slower"
    return Speedup(verdict.ratio, interval=interval, rounds=verdict.rounds, verdict=word)


def _verdict(cell: Cell, reference: Cell, observation: Observation, rounds: list[Round]) -> Verdict:
    """Return the verdict of `compare`, or of the rounds alone if it has none on these values."""
    if cell.metric.name == "time" and cell.statistic == "median":
        keys = {
            (own.result.run.id, other.result.run.id, own.phase, own.result.device)
            for own, other in zip(cell.measured, reference.measured, strict=False)
        }
        known = verdicts_of(observation)
        for mine, theirs, phase, device in keys if len(keys) == 1 else ():
            found = known.get((mine, theirs, phase, device))
            other = known.get((theirs, mine, phase, device))
            found = found or (other.inverse if other is not None else None)
            if found is not None and found.rounds == len(rounds):
                return found
    return judge([rounds], sweep_margin(observation), [None])[0]


def _rounds(cell: Cell, reference: Cell) -> list[Round]:
    """Return the rounds in which both cells were measured.

    Rounds in which one of the two processes of the baseline failed are left out, as in verdicts,
    and so are rounds with a value that is not positive or not finite.
    """
    candidates, baselines = _by_execution(cell), _by_execution(reference)
    # The reference is the baseline of some blocks, and has two processes in their rounds (A/A). In
    # rounds of blocks with another baseline, it has one.
    twice = max(map(len, filter(_of_baseline, baselines.values())), default=1)
    rounds = []
    for key, found in candidates.items():
        others = sorted(baselines.get(key, []), key=lambda each: place_of(each[0]).second)
        baseline = tuple(value for _, value in others)
        candidate = [value for _, value in found]
        is_whole = len(baseline) == (twice if _of_baseline(others) else 1)
        if is_whole and all(0 < value < math.inf for value in (*baseline, *candidate)):
            allocation = allocation_of(found[0][0])
            rounds.append(Round(allocation, baseline, geometric_mean(candidate)))
    return rounds


def _of_baseline(measured: _Measured) -> bool:
    return any(place_of(record).baseline for record, _ in measured)


def _by_execution(cell: Cell) -> dict[tuple[str, str], _Measured]:
    """Return the records and values of a cell by block and execution of a round."""
    found: dict[tuple[str, str], _Measured] = {}
    for row in cell.measured:
        if row.in_round and row.record is not None and row.samples is not None:
            place = place_of(row.record)
            value = statistic(row.samples, cell.statistic)
            found.setdefault((place.id, place.execution), []).append((row.record, value))
    return found
