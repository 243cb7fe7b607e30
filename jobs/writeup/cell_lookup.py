"""Looks up a number or a status of one run, and published figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.errors import TableError, nearest
from jobs.formatting import format_scalar
from jobs.frame.metrics import metric_named, phases_with
from jobs.frame.results import Result
from jobs.frame.rows import NO_VALUE, Cell, rows_of
from jobs.published.figures import published_figure
from jobs.run import varying
from jobs.sweep.views import STATISTICS, units_of, unknown_value
from jobs.writeup.traced import Recorded

ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
# Select a run in addition to its parameters
BESIDE_PARAMETERS = ("benchmark", "device", "repeat")


def cell_of(
    results: list[Result],
    name: str,
    phase: str | None,
    statistic: str,
    unit: str | None,
    params: Mapping[str, Any],
) -> Cell | None:
    """Return the cell of a metric of one run, from its results. None if there are none.

    Args:
        results: one for each repeat.
        name: name of the metric, such as time or fact.weights_bytes. The prefix `fact.` marks a
            value that the benchmark returned in addition to times and memory.
        phase: phase of the run, such as forward. It can be None if the metric exists in one phase
            only.
        unit: unit of the number. None means the default unit of the metric.
        params: parameters that select the run, for error messages.

    Raises:
        TableError: if the metric, statistic or unit is unknown, or if several runs or phases have
            such a metric.
    """
    _require_known(name, statistic, unit)
    require_one_run(f"value({name!r})", results, params)
    rows = list(rows_of(results, [metric_named(name, unit)], lambda r, _: [_phase(name, r, phase)]))
    return Cell(rows, statistic) if rows else None


def require_one_run(call: str, results: list[Result], params: Mapping[str, Any]) -> None:
    """Raise TableError if the results that a lookup selects are of several runs or devices.

    The message lists the parameters in which the runs differ. `call` is the lookup.
    """
    runs = list({result.run.id: result.run for result in results}.values())
    differ = {
        name: [format_scalar(run.params[name]) for run in runs if name in run.params]
        for name in varying(runs)
    }
    beside = {
        "benchmark": {run.benchmark for run in runs},
        "device": {result.device for result in results},
    }
    differ |= {name: sorted(values) for name, values in beside.items() if len(values) > 1}
    if differ:
        names = "; ".join(
            f"{name}: {', '.join(dict.fromkeys(values))}" for name, values in differ.items()
        )
        which = f"have {_format_params(params)}" if params else "match"
        what = f"{len(runs)} runs {which}; add a parameter in which they differ ({names})"
        raise TableError(f"{call}: {what}")


def _phase(name: str, result: Result, given: str | None) -> str:
    """Return the phase, such as forward, in which to look up a metric of a run.

    If no phase is given, the metric must exist in one phase only. Return "" if the metric has no
    phases or the run has no measurements.
    """
    measured = result.measurements
    if given or measured is None or not metric_named(name).has_phases:
        return given or ""
    found = phases_with(measured, name)
    if len(found) > 1:
        raise TableError(
            f"value({name!r}): the run has several phases; phase must be one of {', '.join(found)}"
        )
    return found[0] if found else ""


def has(result: Result, params: Mapping[str, Any]) -> bool:
    """Return whether a result has the given parameters, benchmark, device and repeat."""
    known = {"benchmark": result.run.benchmark, "device": result.device, "repeat": result.repeat}
    known |= result.run.params
    return all(known[name] == given for name, given in params.items())


def value_of(cell: Cell) -> float | str | None:
    """Return the number of a cell, or its value that is text. None if it has neither."""
    texts = (text for text in cell.texts if text != NO_VALUE)
    return next(texts, None) if cell.number is None else cell.number


def published(file: str, column: str, **params: Any) -> Any:
    """Return a value that other authors published, as a number if possible.

    Args:
        file: name of a CSV file in the folder jobs/published.
        params: values of other columns. They select one row of the file.

    Raises:
        TableError: if the file or a column does not exist, if no selected row has a value in
            this column, or if several selected rows have one.
    """
    found = published_figure(str(file), str(column), **params)
    if found is None:
        raise TableError(f"{file} has no {column} for {_format_params(params)}")
    try:
        return float(found)
    except ValueError:
        return Recorded(found)


def _require_known(name: str, statistic: str, unit: str | None) -> None:
    """Raise TableError if the metric, the statistic or the unit of a lookup is unknown."""
    if unknown := unknown_value(str(name)):
        raise TableError(f"value {unknown}")
    if statistic not in ONE_NUMBER:
        known = nearest(str(statistic), ONE_NUMBER)
        raise TableError(f"statistic {statistic!r} is not known{known}")
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "only the default unit"
        raise TableError(f"value {name!r} cannot be shown in {unit!r} (valid: {valid})")


def _format_params(params: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name}={format_scalar(given)}" for name, given in params.items())
        or "any parameters"
    )
