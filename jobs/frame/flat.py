"""Results folders as a pandas DataFrame: a row has the numbers of a run in one phase.

`jobs.report.load` is the function for users. It explains rows and columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from jobs.errors import TableError
from jobs.formatting import format_scalar, is_number
from jobs.frame.metrics import METRICS, fact_at, measured_phases, scalars
from jobs.frame.recorded import RECORDED, UNKNOWN, recorded_value
from jobs.frame.results import Result, list_results, with_defaults
from jobs.frame.rows import Cell, rows_of
from jobs.frame.statistics import statistic
from jobs.results.record import Measurements, Record, is_stale, is_without_code
from jobs.results.record_reader import garbage_collection_paused
from jobs.results.run_states import observe
from jobs.status import Status
from jobs.sweep.run_sources import RunSources
from jobs.sweep.views import FACT

PARAMETER = "param."  # prefix of a parameter whose name is that of another column
TIMES = ("median", "mean", "std", "min", "max")  # statistics of times, in columns such as median_ms
# Columns with the median of a metric.
MEDIANS = {
    **{name: metric for name, metric in METRICS.items() if name not in ("time", "peak_memory")},
    "peak_memory_bytes": replace(METRICS["peak_memory"], unit="bytes"),
}
_CELLS = {"time": METRICS["time"]} | MEDIANS
# The columns that every frame has, with their dtypes, in order: those before the parameters, those
# between the parameters and the facts, and those after the facts.
FIRST = dict.fromkeys(
    ("folder", "sweep", "benchmark", "run", "device", "phase", "status"), "string"
)
MEASURED = {"processes": "int64", "samples": "Int64"} | dict.fromkeys(
    (*(f"{name}_ms" for name in (*TIMES, "low", "high")), *MEDIANS), "float64"
)
LAST = dict.fromkeys(RECORDED, "string") | {
    "stale": "boolean", "attempt": "Int64", "reason": "string",
}  # fmt: skip
OWN = FIRST | MEASURED | LAST
# Further columns of a frame in which a row is a process.
PROCESS = {"repeat": "int64", "round": "Int64", "source_hash": "string", "started_at": "float64"}
CONDITIONS = dict.fromkeys(("sm_clock_mhz", "power_w", "temperature_c"), "float64") | {
    "throttle": "string"
}
_Group = list[Result]  # repeats of a run on one kind of device that have the same status


def read_frame(folders: Sequence[Path], by_process: bool = False) -> tuple[pd.DataFrame, list[str]]:
    """Return the results in folders as `jobs.report.load` does, and notes on problems in them."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    sources = RunSources()
    with garbage_collection_paused():
        for resolved, given in {folder.resolve(): folder for folder in folders}.items():
            observation = observe(resolved, sources)
            results, unknown = _completed(list_results(observation))
            notes += [*map(str, observation.bad_lines), *observation.notes, *unknown]
            sweeps = {run: m.sweep.name for m in observation.manifests for run in m.runs}
            now = observation.source_hashes
            rows += _rows(str(given), sweeps, results, now, by_process)
        return _frame(rows, by_process), list(dict.fromkeys(notes))


def _frame(rows: list[dict[str, Any]], by_process: bool) -> pd.DataFrame:
    last = LAST | PROCESS | CONDITIONS if by_process else LAST
    own = FIRST | MEASURED | last
    other = dict.fromkeys(name for row in rows for name in row if name not in own)
    params = [name for name in other if not name.startswith(FACT)]
    facts = [name for name in other if name.startswith(FACT)]
    names = (*FIRST, *params, *MEASURED, *facts, *last)
    return pd.DataFrame({n: typed([row.get(n) for row in rows], own.get(n)) for n in names})


def _numbers(results: _Group, phase: str | None) -> dict[str, Any]:
    """Return the columns of numbers of some repeats in one phase."""
    found: dict[str, Any] = {}
    for column, metric in _CELLS.items():
        if phase is None and metric.has_phases:
            continue
        cell = Cell(list(rows_of(results, metric, [phase or ""])))
        if not cell.measured:
            continue
        if column != "time":
            found[column] = cell.number
            continue
        found |= {f"{name}_ms": cell.value(name) for name in TIMES}
        found["samples"] = len(cell.pooled)
        found["low_ms"], found["high_ms"] = cell.interval or (None, None)
    return found


def _measurements(results: _Group) -> list[Measurements]:
    """Return the measurements of repeats that are ok. A run that is executed again has none."""
    return [r.measurements for r in results if r.status is Status.ok and r.measurements is not None]


def _rows(
    folder: str,
    sweeps: dict[str, str],
    results: list[Result],
    now: Mapping[str, str | None],
    by_process: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the results of a folder.

    `sweeps` has the name of the sweep of each run, `now` the hash of its present sources.
    """
    groups: dict[tuple[str, str, Status, int], _Group] = {}
    for i, result in enumerate(results):
        key = (result.run.id, result.device, result.status, i if by_process else 0)
        groups.setdefault(key, []).append(result)
    for (run_id, device, status, _), group in groups.items():
        run = group[0].run
        measured = _measurements(group)
        common = {"folder": folder, "sweep": sweeps.get(run_id), "benchmark": run.benchmark}
        common |= {"run": run_id, "device": device or None, "status": str(status)}
        common |= {_parameter_column(key, by_process): v for key, v in run.params.items()}
        common |= _facts(measured)
        common |= _about([r.outcome for r in group if r.outcome is not None], now)
        common["reason"] = _joined([_reason(result) for result in group])
        if by_process:
            common |= _process(group[0])
        counts = Counter(phase for m in measured for phase in measured_phases(m))
        for phase, count in (counts or {None: len(group)}).items():
            row = common | {"phase": phase, "processes": count} | _numbers(group, phase)
            yield row | (_conditions(group[0].record, phase) if by_process else {})


def _completed(results: list[Result]) -> tuple[list[Result], list[str]]:
    """Return results with the parameters that tables add, by benchmark, and notes.

    Without the benchmark, its default values are unknown, and nothing is added.
    """
    by_benchmark: dict[str, list[Result]] = {}
    for result in results:
        by_benchmark.setdefault(result.run.benchmark, []).append(result)
    completed: list[Result] = []
    notes = []
    for benchmark, own in by_benchmark.items():
        try:
            completed += with_defaults(own, benchmark, [])
        except TableError as error:
            notes.append(f"parameters that some runs of {benchmark} lack are missing: {error}")
            completed += own
    return completed, notes


def _parameter_column(name: str, by_process: bool) -> str:
    """Return the column of a parameter. It differs from all other columns."""
    taken = name in OWN or (by_process and (name in PROCESS or name in CONDITIONS))
    return PARAMETER + name if taken or name.startswith((PARAMETER, FACT)) else name


def _process(result: Result) -> dict[str, Any]:
    """Return which process a row is about, and when and with which sources it measured."""
    record = result.outcome
    if record is None:
        return {"repeat": result.repeat}
    return {
        "repeat": result.repeat,
        "round": record.block.round if record.block else None,
        "source_hash": record.source_hash,
        "started_at": record.started_at,
    }


def _conditions(record: Record | None, phase: str | None) -> dict[str, Any]:
    """Return the conditions of a phase: medians, and the reasons why the GPU was slowed down.

    Records are not checked for the form of conditions. Values of another form are left out.
    """
    known = {} if record is None or phase is None else record.conditions.get(phase, {})
    found: dict[str, Any] = {}
    for name, value in known.items():
        if name not in CONDITIONS:
            continue
        if name == "throttle" and isinstance(value, dict):
            found[name] = "; ".join(value)
        elif isinstance(value, list) and len(value) == 3 and is_number(value[1]):
            found[name] = value[1]  # minimum, median, maximum
    return found


def _about(records: list[Record], now: Mapping[str, str | None]) -> dict[str, Any]:
    """Return where and with which code the repeats of a run were executed."""
    if not records:
        return {}
    about: dict[str, Any] = {
        name: _joined([_known(recorded_value(record, name)) for record in records])
        for name in RECORDED
    }
    unknown = any(is_without_code(record, now) for record in records)
    about["stale"] = None if unknown else any(is_stale(record, now) for record in records)
    about["attempt"] = max(record.attempt for record in records)
    return about


def _known(value: str) -> str | None:
    return None if value in (UNKNOWN, "–") else value


def _reason(result: Result) -> str | None:
    """Return why a result has no numbers. None if it is ok."""
    if result.status is Status.ok:
        return None
    failure = result.failure
    if failure is None:
        return result.detail or ("no record on this device" if result.record is None else None)
    return f"{result.failure_text}: {failure.summary}" if failure.memory else failure.summary


def _joined(texts: Sequence[str | None]) -> str | None:
    """Return the different texts, separated by semicolons. None if there is none."""
    if len(texts) == 1:
        return texts[0]
    return "; ".join(dict.fromkeys(filter(None, texts))) or None


def _facts(measured: list[Measurements]) -> dict[str, Any]:
    """Return the facts of the repeats of a run by column. Lists are left out."""
    found: dict[str, list[Any]] = {}
    for measurements in measured:
        for path, value in scalars(measurements.facts):
            name = ".".join(path)
            parts = name.split(".")
            # A key may contain a dot. A table that names this fact shows the nested value.
            if len(path) == len(parts) or fact_at(measurements.facts, parts) is None:
                found.setdefault(FACT + name, []).append(value)
    return {name: _one_value(values) for name, values in found.items()}


def _one_value(values: list[Any]) -> Any:
    """Return the value of a fact as tables do: the median of different numbers."""
    if all(type(value) is type(values[0]) and value == values[0] for value in values[1:]):
        return values[0]
    known = [value for value in map(_as_float, values) if value is not None]
    return statistic(np.array(known), "median") if known else _joined([*map(_text, values)])


def typed(values: list[Any], dtype: Any = None) -> Any:
    """Return values as an array of one dtype. None becomes NaN or NA.

    By default, the dtype is bool, int64 or float64 for numbers, or their nullable forms if values
    are missing; `string` if a value is a text or too large for a number.
    """
    dtype = dtype or _dtype(values)
    if dtype == "string":
        return pd.array([_text(value) for value in values], dtype="string")
    if dtype == "float64":
        return np.array([np.nan if value is None else float(value) for value in values])
    if dtype in ("bool", "int64"):
        return np.array(values, dtype=dtype)
    return pd.array(values, dtype=dtype)


def _dtype(values: list[Any]) -> str:
    """Return the dtype of a column with these values, see `typed`."""
    kinds = {type(value) for value in values}
    is_complete = type(None) not in kinds
    kinds.discard(type(None))
    if kinds == {bool}:
        return "bool" if is_complete else "boolean"
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return "int64" if is_complete else "Int64"
    numeric = all(value is None or _as_float(value) is not None for value in values)
    return "float64" if numeric else "string"


def _as_float(value: Any) -> float | None:
    """Return a number as a float. None if it is no number, or is too large."""
    try:
        return float(value) if isinstance(value, (bool, int, float)) else None
    except OverflowError:
        return None


def _text(value: Any) -> str | None:
    """Return a value as text in UTF-8, or None for None."""
    if value is None:
        return None
    text = value if isinstance(value, str) else format_scalar(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
