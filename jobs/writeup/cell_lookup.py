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
from jobs.run import Run, varying
from jobs.status import Status
from jobs.sweep.views import STATISTICS, units_of, unknown_value

ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
BESIDE_PARAMETERS = ("device", "repeat")  # select a run in addition to its parameters


def cell_of(
    results: list[Result],
    name: str,
    phase: str | None,
    statistic: str,
    unit: str | None,
    params: Mapping[str, Any],
) -> Cell | None:
    """Return the cell of a metric of one run. None if there is no such run.

    Args:
        name: name of the metric, such as time or fact.weights_bytes. The prefix `fact.` marks a
            value that the benchmark returned in addition to times and memory.
        phase: phase of the run, such as forward. It can be None if the metric exists in one phase
            only.
        unit: unit of the number. None means the default unit of the metric.
        params: parameters that select the run.

    Raises:
        TableError: if the metric, statistic or unit is unknown, or if several runs or phases have
            such a metric.
    """
    problem = _value_problem(name, statistic, unit)
    if problem:
        raise TableError(problem)
    found = runs_with(f"value({name!r})", results, params)
    phases = {id(result): _phase(name, result, phase) for result in found}
    rows = list(rows_of(found, [metric_named(name, unit)], lambda r, _: [phases[id(r)]]))
    return Cell(rows, statistic) if rows else None


def state_of(results: list[Result], params: Mapping[str, Any]) -> Status:
    """Return the status of one run. It is missing if there is no such run.

    If a run has several repeats, its status is ok if at least one repeat is ok.
    """
    states = [result.status for result in runs_with("state()", results, params)]
    return Status.ok if Status.ok in states else (states or [Status.missing])[0]


def runs_with(call: str, results: list[Result], params: Mapping[str, Any]) -> list[Result]:
    """Return the results of the run that a lookup selects, one result per repeat.

    Return [] if no run has the given parameters. `call` is the lookup, for messages.

    Raises:
        TableError: if several runs have these parameters.
    """
    found = [result for result in results if has(result, params)]
    runs = list({result.run.id: result.run for result in found}.values())
    problem = _ambiguity(runs, params, [result.device for result in found])
    if problem:
        raise TableError(f"{call}: {problem}")
    return found


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
    """Return whether a result has the given parameters, device and repeat."""
    return all(result.coordinate(name) == given for name, given in params.items())


def value_of(cell: Cell | None) -> float | str | None:
    """Return the number of a cell, or its value that is text. None if it has neither."""
    if cell is None:
        return None
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
        return found


def _value_problem(name: Any, statistic: Any, unit: Any) -> str | None:
    """Check arguments of the template function `value`. Return an error message or None."""
    unknown = unknown_value(str(name))
    if unknown:
        return f"value {unknown}"
    if statistic not in ONE_NUMBER:
        return f"statistic {statistic!r} is not known{nearest(str(statistic), ONE_NUMBER)}"
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "only the default unit"
        return f"value {name!r} cannot be shown in {unit!r} (valid: {valid})"
    return None


def _ambiguity(runs: list[Run], params: Mapping[str, Any], devices: list[str]) -> str | None:
    """Return an error message if parameters in a template select several runs or devices.

    Return None if they select one run on one device.
    The message lists the parameters in which the selected runs differ.
    """
    differ = {name: [format_scalar(run.params[name]) for run in runs] for name in varying(runs)}
    if len(set(devices)) > 1:
        differ["device"] = devices
    if not differ:
        return None
    names = "; ".join(f"{name}: {', '.join(dict.fromkeys(has))}" for name, has in differ.items())
    which = (
        f"{len(runs)} runs have {_format_params(params)}" if params else f"{len(runs)} runs match"
    )
    return f"{which}; add a parameter in which they differ ({names})"


def _format_params(params: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name}={format_scalar(given)}" for name, given in params.items())
        or "any parameters"
    )
