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
    from_ms, below_ms: range of the median time. Empty: no limit.
    gpus: "same" for processes on the same GPUs, minutes apart; "other" for other GPUs or hosts.
    p95_percent, max_percent: 95% quantile and maximum of |ratio of the medians - 1|, in percent.
        The quantile is empty if it is unknown.
"""

from __future__ import annotations

import csv
import math
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
class _Row:
    heads: str
    from_ms: float
    below_ms: float
    gpus: str
    floor: NoiseFloor


def noise_floor(
    run: Run, device: str, times_ms: tuple[float, float], same_gpus: bool
) -> NoiseFloor | None:
    """Return the noise floor of two median times of a run.

    If the times are in different ranges of the file, the larger floor is returned.

    Args:
        run: the run.
        device: name of the device, as in records.
        times_ms: the median times in two processes, in ms.
        same_gpus: whether both processes used the same GPUs, minutes apart.

    Returns:
        The floor, or None if none is stored for this benchmark and device.
    """
    rows = _rows().get((device, run.benchmark))
    if rows is None:
        return None
    heads = "several" if _heads(run) > 1 else "one"
    gpus = "same" if same_gpus else "other"
    found = [
        row.floor
        for row in rows
        if row.gpus == gpus
        and row.heads in ("", heads)
        and any(row.from_ms <= time < row.below_ms for time in times_ms)
    ]
    return NoiseFloor(max(f.usual for f in found), max(f.largest for f in found))


def _heads(run: Run) -> int:
    """Return the number of heads of all sequences in the batch. 1 if the run has no heads."""
    return int(run.params.get("num_heads", 1)) * int(run.params.get("batch_size", 1))


@cache
def _rows() -> dict[tuple[str, str], list[_Row]]:
    """Return the rows of the file, by device and benchmark."""
    rows: dict[tuple[str, str], list[_Row]] = {}
    with PATH.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            largest = float(line["max_percent"]) / 100
            usual = float(line["p95_percent"]) / 100 if line["p95_percent"] else largest
            row = _Row(
                line["heads"],
                float(line["from_ms"]),
                float(line["below_ms"] or math.inf),
                line["gpus"],
                NoiseFloor(usual, largest),
            )
            for benchmark in line["benchmarks"].split():
                rows.setdefault((line["device"], benchmark), []).append(row)
    return rows
