"""Cells of a comparison: the verdict on one phase of a run, and the table of all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jobs.code.short_names import short_names
from jobs.formatting import format_number, format_ratio, format_scalar
from jobs.run import Run, varying
from jobs.verdicts.judge import Verdict

# Verdicts that a table leaves out unless all are asked for
UNIMPORTANT = ("new", "gone", "not measured")
_Number = float | int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Comparison of two times, for one phase of a run on one kind of device."""

    run: Run
    device: str  # "" if unknown
    phase: str  # "" if the verdict is on the whole run, such as broken
    # faster, slower, same, unsure; broken, wrong, fixed, new, gone, not measured
    verdict: str
    baseline: str = ""  # label of the baseline of the run's block; "" without a block
    before: float | None = None  # time in ms
    after: float | None = None  # time in ms
    ratio: float | None = None  # after / before
    low: float | None = None  # lower bound of the 95% interval of `ratio`
    high: float | None = None  # upper bound
    detail: str = ""  # such as `oom`
    judged: Verdict | None = None  # the verdict on the times; None: there is none
    baseline_run: Run | None = None  # None: the baseline is the same run
    pending: bool = False  # whether a run that is not measured may still get a result

    @property
    def text(self) -> str:
        """The verdict and its detail, such as `broken, oom`."""
        return f"{self.verdict}, {self.detail}" if self.detail else self.verdict

    @property
    def is_important(self) -> bool:
        """Whether a table shows this cell even if not all cells are asked for."""
        return self.verdict not in UNIMPORTANT or self.pending


def count_text(cells: Iterable[Cell]) -> str:
    """Return the number of cells with each verdict as text, such as `3 same, 1 slower`."""
    counts = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def cell_columns(
    chosen: list[Cell], cells: list[Cell], exact: bool = False
) -> dict[str, list[str]]:
    """Return a table of at least one chosen cell, as texts of each column by header.

    It has a column for each parameter that varies among the runs of all `cells` and their
    baselines. For programs, `exact` gives all columns, numbers that are not rounded, and full names
    of code outside this project.
    """
    baselines = {cell.baseline_run.id: cell.baseline_run for cell in cells if cell.baseline_run}
    names = varying([*(cell.run for cell in cells), *baselines.values()])
    references = set() if exact else {reference for cell in cells for reference in cell.run.code}
    short = short_names(references, (c.run.params.get(name) for c in cells for name in names))
    several_benchmarks = exact or len({cell.run.benchmark for cell in cells}) > 1
    several_devices = exact or len({cell.device for cell in chosen}) > 1
    several_baselines = exact or len({cell.baseline for cell in chosen if cell.baseline}) > 1
    judged = exact or any(cell.judged for cell in chosen)
    unit = "rounds" if any(cell.baseline or cell.baseline_run for cell in cells) else "processes"
    rows = []
    for cell in chosen:
        row = {"benchmark": cell.run.benchmark} if several_benchmarks else {}
        values = {name: cell.run.params.get(name, "") for name in names}
        row |= {name: short.get(value) or format_scalar(value) for name, value in values.items()}
        if several_devices:
            row["device"] = cell.device
        if several_baselines:
            row["baseline"] = cell.baseline
        row |= (
            _exact_columns(cell, unit) if exact else _rounded_columns(cell, unit if judged else "")
        )
        rows.append(row)
    return {header: [row[header] for row in rows] for header in rows[0]}


def _rounded_columns(cell: Cell, unit: str) -> dict[str, str]:
    row = {
        "phase": cell.phase,
        "before (ms)": "" if cell.before is None else format_number(cell.before),
        "after (ms)": "" if cell.after is None else format_number(cell.after),
        "ratio": _ratio(cell),
        "95% interval": _interval(cell),
    }
    if unit:
        row[unit] = str(cell.judged.rounds) if cell.judged else ""
        row["allocations"] = str(cell.judged.allocations) if cell.judged else ""
    return row | {"verdict": cell.text}


def _ratio(cell: Cell) -> str:
    if cell.ratio is None:
        return ""
    spread = 0.0
    if cell.verdict == "unsure" and cell.low is not None and cell.high is not None:
        spread = cell.high - cell.low
    return format_ratio(cell.ratio, spread, 3, "")


def _interval(cell: Cell) -> str:
    """Return the interval of a ratio. A bound far above the ratio is not worth its digits."""
    if cell.low is None or cell.high is None or cell.ratio is None:
        return ""
    high = f"{cell.high:.3f}" if cell.high <= max(100, 2 * cell.ratio) else ">100x"
    return f"{cell.low:.3f} to {high}"


def _exact_columns(cell: Cell, unit: str) -> dict[str, str]:
    judged = cell.judged
    numbers: dict[str, _Number] = {
        "before (ms)": cell.before,
        "after (ms)": cell.after,
        "ratio": cell.ratio,
        "low": cell.low,
        "high": cell.high,
        unit: judged.rounds if judged else None,
        "allocations": judged.allocations if judged else None,
        "p": judged.p if judged else None,
        "A/A floor" if unit == "rounds" else "floor": judged.floor if judged else None,
    }
    texts = {name: "" if value is None else repr(value) for name, value in numbers.items()}
    return {"phase": cell.phase} | texts | {"verdict": cell.verdict, "detail": cell.detail}
