"""Tables of a fact that is a list, as the kernels of a profile: an item a row, a key a column."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobs.formatting import format_number, format_scalar, is_number
from jobs.report.entries import Entry, Key, coordinate, declared, in_order, not_told_apart, selected
from jobs.report.tables import describe, unique_header
from jobs.report.values import convert, fact_of, fact_value, shown_failure
from jobs.run import varying
from jobs.status import Observation
from jobs.sweep.schema import Table, measured_in, units_of_measure

LIMIT = 10  # rows a run, where the table does not say


@dataclass(frozen=True)
class Listed:
    """The items of every run, or why it has none."""

    view: Table
    dims: list[str]
    keys: list[Key]  # of each row: the run that it is of
    items: list[dict[str, Any] | str]  # of each row: the item, or what became of the run
    notes: list[str]

    def frame(self) -> pd.DataFrame:
        """The rows as text. What became of a run stands in its first column."""
        data: dict[str, list[str]] = {}
        for i, dim in enumerate(self.dims):
            data[unique_header(dim, data)] = [format_scalar(key[i]) for key in self.keys]
        found = [item for item in self.items if isinstance(item, dict)]
        names = list(dict.fromkeys(name for item in found for name in item))
        for i, name in enumerate(names or [_last_part(self.view)]):
            header, show = _column(name, [item.get(name) for item in found], self.view.unit)
            instead = [item if isinstance(item, str) and i == 0 else "" for item in self.items]
            data[unique_header(header, data)] = [
                show(item.get(name)) if isinstance(item, dict) else text
                for item, text in zip(self.items, instead, strict=True)
            ]
        return pd.DataFrame(data)


def listed(observation: Observation, view: Table, chosen: list[Entry]) -> Listed:
    """The first items of the list of every run that the view shows."""
    chosen = selected(observation, view, chosen)
    dims = list(view.rows) or varying([entry.run for entry in chosen])
    dims = [*not_told_apart(chosen, dims), *dims]
    if any(entry.repeat for entry in chosen) and "repeat" not in dims:
        dims.append("repeat")
    by_key: dict[Key, list[dict[str, Any]] | str] = {}
    for entry in chosen:
        by_key[tuple(coordinate(entry, name) for name in dims)] = _items(entry, view)
    limit = view.limit or LIMIT
    keys: list[Key] = []
    items: list[dict[str, Any] | str] = []
    for key in in_order(set(by_key), dims, declared(observation)):
        mine = by_key[key]
        rows = [mine] if isinstance(mine, str) else mine[:limit]
        keys += [key] * len(rows)
        items += rows
    longest = max((len(mine) for mine in by_key.values() if not isinstance(mine, str)), default=0)
    cut = [f"the first {limit} of up to {longest} rows a run"] if longest > limit else []
    return Listed(view, dims, keys, items, [*describe(chosen), *cut])


def _items(entry: Entry, view: Table) -> list[dict[str, Any]] | str:
    """A run's list; text where there is none."""
    record = entry.record
    if entry.state != "ok" or record is None or record.measurements is None:
        return shown_failure(record, entry.state)
    fact = fact_of(record.measurements.facts, str(view.list).split("."))
    if not isinstance(fact, list):
        return "–"
    items = [item if isinstance(item, dict) else {_last_part(view): item} for item in fact]
    return items or "none"


def _last_part(view: Table) -> str:
    return str(view.list).split(".")[-1]


def _column(name: str, values: list[Any], unit: str | None) -> tuple[str, Callable[[Any], str]]:
    """The header of one key's column, and how its values are shown: in one unit, which the header
    says."""
    own = measured_in(name)
    if name.endswith("_share") or name == "share":
        return f"{name.replace('_', ' ')} (%)", lambda value: _text(value, 100.0)
    if not own:
        return name, _text
    largest = max((abs(value) for value in values if is_number(value)), default=0)
    if unit not in units_of_measure(own):
        unit = ("GiB" if largest >= 2**30 else "MiB") if own == "bytes" else own
    label = fact_value(name).label
    return f"{label} ({unit})", lambda value: _text(value, convert(1.0, own, unit))


def _text(value: Any, factor: float | None = None) -> str:
    """A value as text: counts whole, other numbers with four digits."""
    if value is None:
        return ""
    if is_number(value) and (factor is not None or isinstance(value, float)):
        return format_number(float(value) * (factor or 1.0))
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return format_scalar(value)
