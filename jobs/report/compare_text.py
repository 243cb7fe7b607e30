"""Writes a comparison as Markdown, CSV or LaTeX."""

from __future__ import annotations

from jobs.code.short_names import short_names
from jobs.formatting import (
    UNLIMITED,
    format_number,
    format_ratio,
    format_scalar,
    parameter_header,
    tally,
    wrapped,
)
from jobs.report.tables.markdown import markdown_table
from jobs.report.tables.render import commented, csv_table, latex_table
from jobs.run import varying
from jobs.verdicts.compare import Comparison
from jobs.verdicts.compared import Compared
from jobs.verdicts.judge import Verdict

_INTERVALS = ("95% interval", "interval or floor")  # of blocks, of two folders
# The columns that a narrow terminal does not show, the first one first
_LEAST = ("allocations", "rounds", "processes", *_INTERVALS, "before (ms)", "after (ms)")


def markdown_comparison(found: Comparison, every: bool, width: int = UNLIMITED) -> str:
    """Return a comparison as Markdown, with every cell or without those that say little.

    These are for example runs that are only in one of two folders. The table fits a terminal of
    `width` columns.
    """
    chosen = _chosen(found, every)
    parts = ["\n".join(_wrapped(found.heading, width))] if found.heading else []
    if chosen:
        parts.append(markdown_table(_columns(chosen, found.cells), "left", width, _LEAST))
    counts = tally(cell.verdict for cell in found.cells)
    if left_out := len(found.cells) - len(chosen):
        counts += f" ({left_out} not listed; use --all)"
    return "\n\n".join([*parts, "\n".join(_wrapped([*found.notes, counts], width))])


def _chosen(found: Comparison, every: bool) -> list[Compared]:
    return found.cells if every else [cell for cell in found.cells if cell.is_important]


def _wrapped(lines: list[str], width: int) -> list[str]:
    """Return lines of text that fit a width. Those with a command stay whole, to be copied."""
    return [line if " -m " in line else wrapped(line, width) for line in lines]


def csv_comparison(found: Comparison) -> str:
    """Return a comparison as CSV with all cells. Headings and notes are comment lines."""
    columns = _columns(found.cells, found.cells, exact=True) if found.cells else {}
    return commented("#", (*found.heading, *found.notes), csv_table(columns))


def latex_comparison(found: Comparison, every: bool) -> str:
    """Return a comparison as LaTeX, with the cells of Markdown."""
    chosen = _chosen(found, every)
    columns = _columns(chosen, found.cells) if chosen else {}
    numbers = (" (ms)", "ratio", "interval", "floor", "rounds", "processes", "allocations")
    left = [name for name in columns if not name.endswith(numbers)]
    return commented("%", (*found.heading, *found.notes), latex_table(columns, left))


def _columns(
    chosen: list[Compared], cells: list[Compared], exact: bool = False
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
    any_judged = any(cell.judged for cell in chosen)
    unit = "rounds" if any(cell.baseline or cell.baseline_run for cell in cells) else "processes"
    rows = []
    for cell in chosen:
        benchmark = {"benchmark": cell.run.benchmark} if several_benchmarks else {}
        place = {"device": cell.device} if several_devices else {}
        place |= {"baseline": cell.baseline} if several_baselines else {}
        found = place | (_exact(cell, unit) if exact else _rounded(cell, unit, any_judged))
        params = {}
        for name in names:
            value = cell.run.params.get(name, "")
            header = parameter_header(name, benchmark | found)
            params[header] = short.get(value) or format_scalar(value)
        rows.append(benchmark | params | found)
    return {header: [row[header] for row in rows] for header in rows[0]}


def _rounded(cell: Compared, unit: str, with_counts: bool) -> dict[str, str]:
    judged = cell.judged
    row = {
        "phase": cell.phase,
        "before (ms)": "" if cell.before is None else format_number(cell.before),
        "after (ms)": "" if cell.after is None else format_number(cell.after),
        "ratio": _ratio(judged) if judged else "",
        _INTERVALS[unit != "rounds"]: _interval(judged) if judged else "",
    }
    if with_counts:
        row[unit] = str(judged.rounds) if judged else ""
        row["allocations"] = str(judged.allocations) if judged else ""
    return row | {"verdict": cell.text}


def _ratio(judged: Verdict) -> str:
    spread = 0.0
    if judged.verdict == "unsure" and judged.low is not None and judged.high is not None:
        spread = judged.high - judged.low
    return format_ratio(judged.ratio, spread, 3, "")


def _interval(judged: Verdict) -> str:
    """Return the interval of a ratio. A bound far above the ratio is not worth its digits."""
    if judged.low is None or judged.high is None:
        return ""
    high = f"{judged.high:.3f}" if judged.high <= max(100, 2 * judged.ratio) else ">100x"
    return f"{judged.low:.3f} to {high}"


def _exact(cell: Compared, unit: str) -> dict[str, str]:
    judged = cell.judged
    numbers: dict[str, float | None] = {
        "before (ms)": cell.before,
        "after (ms)": cell.after,
        "ratio": judged.ratio if judged else None,
        "low": judged.low if judged else None,
        "high": judged.high if judged else None,
        unit: judged.rounds if judged else None,
        "allocations": judged.allocations if judged else None,
        "p": judged.p if judged else None,
        "A/A floor" if unit == "rounds" else "floor": judged.floor if judged else None,
    }
    texts = {name: "" if value is None else repr(value) for name, value in numbers.items()}
    return {"phase": cell.phase} | texts | {"verdict": cell.verdict, "detail": cell.detail}
