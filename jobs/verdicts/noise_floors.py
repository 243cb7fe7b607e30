"""Noise floors: how much the times of two processes differ that run the same code.

They bound what a comparison of two results folders can say whose runs were not measured in the same
blocks. The file noise_floors.csv contains them. They were measured on runs that were executed twice
during the development of this project, on 45 H200 GPUs, with the attention of torch or with the
same training step. docs/verdicts.md shows them.

Columns of the file:
    device: name of the GPU, as in records.
    benchmarks: names of the benchmarks.
    heads: "one" for attention with a single head in the batch, "several" for more heads, which fill
        the GPU. Empty: any.
    from_ms: smallest median time in ms. The range of times ends where that of another row begins.
    gpus: "same" for processes on the same GPUs, minutes apart; "other" for other GPUs or hosts.
    p95_percent, max_percent: 95% quantile and maximum of |ratio of the medians - 1|, in percent.
        The quantile is empty if it is unknown.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jobs.run import Run

PATH = Path(__file__).with_name("noise_floors.csv")


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Relative difference between two processes that run the same code."""

    usual: float  # 95% quantile, or the maximum if the quantile is unknown
    largest: float  # maximum


@dataclass(frozen=True, slots=True)
class NoiseFloors:
    """Noise floors of a kind of run, by the range of its time."""

    starts_ms: tuple[float, ...]  # smallest median time of each range, ascending from 0
    floors: tuple[NoiseFloor, ...]  # one per range

    def at(self, before_ms: float, after_ms: float) -> NoiseFloor:
        """Return the noise floor of two median times. In two ranges, the larger floor counts."""
        first, second = (
            self.floors[bisect_right(self.starts_ms, time) - 1] for time in (before_ms, after_ms)
        )
        if first is second:
            return first
        return NoiseFloor(max(first.usual, second.usual), max(first.largest, second.largest))


def noise_floors(run: Run, device: str, same_gpus: bool) -> NoiseFloors | None:
    """Return the noise floors of a run, or None if none are stored for its benchmark and device.

    With same_gpus, both processes used the same GPUs, minutes apart.
    """
    # All heads of all sequences in the batch. Runs of other benchmarks have no heads.
    heads = int(run.params.get("num_heads") or 1) * int(run.params.get("batch_size") or 1)
    return _stored(device, run.benchmark, "several" if heads > 1 else "one", same_gpus)


@cache
def _stored(device: str, benchmark: str, heads: str, same_gpus: bool) -> NoiseFloors | None:
    gpus = "same" if same_gpus else "other"
    rows = _rows().get((device, benchmark), [])
    found = sorted(
        ((row.from_ms, row.floor) for row in rows if row.gpus == gpus and row.heads in ("", heads)),
        key=lambda pair: pair[0],
    )
    if not found:
        return None
    return NoiseFloors(tuple(start for start, _ in found), tuple(floor for _, floor in found))


@dataclass(frozen=True, slots=True)
class _Row:
    heads: str
    from_ms: float
    gpus: str
    floor: NoiseFloor


@cache
def _rows() -> dict[tuple[str, str], list[_Row]]:
    """Return the rows of the file, by device and benchmark."""
    rows: dict[tuple[str, str], list[_Row]] = {}
    with PATH.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            largest = float(line["max_percent"]) / 100
            usual = float(line["p95_percent"]) / 100 if line["p95_percent"] else largest
            floor = NoiseFloor(usual, largest)
            row = _Row(line["heads"], float(line["from_ms"]), line["gpus"], floor)
            for benchmark in line["benchmarks"].split():
                rows.setdefault((line["device"], benchmark), []).append(row)
    return rows
