"""Makes tables of lists that benchmarks return, such as the kernels of a profile.

A table has one row per list item. Each list is a fact, which is a named value that a benchmark
returns in addition to times and memory.
"""

from __future__ import annotations

import json
from typing import Any

from jobs.formatting import format_number, format_scalar, is_number
from jobs.frame.metrics import convert, fact_at, fact_metric
from jobs.frame.results import Key, Result
from jobs.report.tables.notes import notes_of
from jobs.report.tables.pivot import names_in
from jobs.report.tables.table import ReportTable
from jobs.report.views import Shown
from jobs.run import varying
from jobs.sweep.views import Table, measured_in, units_of_measure

LIMIT = 10  # default maximum number of rows per run
Item = dict[str, Any]


def make_list_table(shown: Shown, view: Table, for_programs: bool) -> ReportTable:
    """Make a table of the first items of a list that each run returned, one row per item.

    A run without list items has one row, which states the reason. For programs, references to code
    outside this project are in full.

    The maximum number of items per run is `view.limit`, or 10 if the table declares no limit. The
    key `list_fact` of the view is the path of the list in the values that the benchmark returns,
    such as kernels.forward.
    """
    results = shown.results
    dimensions = list(view.rows) or varying([result.run for result in results])
    dimensions = [*shown.extra_dimensions(dimensions), *dimensions]
    if any(result.repeat for result in results) and "repeat" not in dimensions:
        dimensions.append("repeat")
    by_key: dict[Key, Result] = {
        tuple(result.coordinate(name) for name in dimensions): result for result in results
    }
    limit = view.limit or LIMIT
    found = {key: _items(by_key[key], view) for key in shown.sorted(by_key, dimensions)}
    keys = [key for key, own in found.items() for _ in own[:limit]]
    items = [item for own in found.values() for item in own[:limit]]
    longest = max(map(len, found.values()), default=0)
    cut = [f"first {limit} of up to {longest} rows per run"] if longest > limit else []
    table = ReportTable(shown.title, dimensions, keys, [*notes_of(shown), *cut])
    names = {} if for_programs else names_in(results, keys)
    for i, name in enumerate(dimensions):
        table.add_column(name, [names.get(key[i]) or format_scalar(key[i]) for key in keys])
    records = [[record] if (record := by_key[key].record) else [] for key in keys]
    for header, cells in _columns(items, view):
        table.add_column(header, cells, records)
    return table


def _columns(items: list[Item | str], view: Table) -> list[tuple[str, list[str]]]:
    """Return the header and the cells of each column: one for each key of the items.

    If a run has no items, the first column contains the reason.
    """
    found = dict.fromkeys(name for item in items if isinstance(item, dict) for name in item)
    names = list(found) or [str(view.list_fact).split(".")[-1]]
    rows = [item if isinstance(item, dict) else {names[0]: item} for item in items]
    return [_column(name, [row.get(name) for row in rows], view.unit) for name in names]


def _items(result: Result, view: Table) -> list[Item | str]:
    """Return the items of the list that a run returned, or else the reason why it has none."""
    if result.status != "ok" or result.measurements is None:
        return [result.failure_text]
    path = str(view.list_fact).split(".")
    fact = fact_at(result.measurements.facts, path)
    if not isinstance(fact, list):
        return ["–"]
    return [item if isinstance(item, dict) else {path[-1]: item} for item in fact] or ["none"]


def _column(name: str, values: list[Any], unit: str | None) -> tuple[str, list[str]]:
    """Return the header and the cells of a column with the values of the key `name` of each item.

    The suffix of the name, such as `_ms`, gives the unit of the values. If they cannot be converted
    to `unit`, a suitable unit is chosen.
    """
    header, factor, measured = name, None, measured_in(name)
    if name.endswith("_share") or name == "share":
        header, factor = f"{name.replace('_', ' ')} (%)", 100.0
    elif measured:
        largest = max((abs(value) for value in values if is_number(value)), default=0)
        if unit not in units_of_measure(measured):
            unit = ("GiB" if largest >= 2**30 else "MiB") if measured == "bytes" else measured
        header, factor = f"{fact_metric(name).label} ({unit})", convert(1.0, measured, unit)
    return header, [_text(value, factor) for value in values]


def _text(value: Any, factor: float | None) -> str:
    """Return a value as text for a cell.

    Numbers are multiplied by `factor`, if there is one, and rounded to four significant digits.
    However, integers are written in full if `factor` is None.
    """
    if value is None:
        return ""
    if is_number(value) and (factor is not None or isinstance(value, float)):
        return format_number(float(value) * (factor or 1.0))
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return format_scalar(value)
