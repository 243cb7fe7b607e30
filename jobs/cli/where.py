"""Selects runs by their parameters and their state, for the option --where.

The functions exit with an error message if the condition is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import create_model

from jobs.cli.output import fail
from jobs.errors import nearest
from jobs.results.run_states import Observation, TaskState
from jobs.run import Run
from jobs.status import Status
from jobs.sweep.benchmarks import Benchmark, Benchmarks, NoBenchmark, load_benchmark
from jobs.sweep.conditions import Check, Condition, ConditionError, Names

OLDER = "older_code"
# Allowed in a condition, in addition to the parameters.
NAMES = ("benchmark", "status", "repeat", OLDER)


def matching(seen: Observation, where: str | None) -> Observation:
    """Return the state of a results folder with only the runs that satisfy a condition."""
    if where is None or not seen.tasks:
        return seen
    runs = [task.run for task in seen.tasks]
    benchmarks = _benchmarks(runs)
    try:
        condition = Condition(where, Names(benchmarks.fields, NAMES, _check(benchmarks, runs)))
        kept = [
            task
            for task in seen.tasks
            if condition(_state(task, seen) | _values(task.run, benchmarks))
        ]
    except ConditionError as error:
        fail(f"--where: {error}")
    return replace(seen, tasks=kept)


def matching_runs(runs: list[Run], where: str) -> set[str]:
    """Return the ids of the runs, at least one, whose parameters satisfy a condition."""
    benchmarks = _benchmarks(runs)
    try:
        condition = Condition(where, Names(benchmarks.fields, NAMES[:1], _check(benchmarks, runs)))
        found = {run.id for run in runs if condition(_values(run, benchmarks))}
    except ConditionError as error:
        fail(f"--where: {error}")
    if not found:
        fail(f"--where: no run satisfies the condition {where!r}")
    return found


def _benchmarks(runs: Iterable[Run]) -> Benchmarks:
    params: dict[str, dict[str, Any]] = {}
    for run in runs:
        params.setdefault(run.benchmark, {}).update(run.params)
    by_name = {name: _benchmark(name, params[name]) for name in params}
    return Benchmarks(next(iter(by_name.values())), by_name)


def _benchmark(name: str, params: dict[str, Any]) -> Benchmark:
    """Return a benchmark with the parameters of its runs.

    If its code cannot be imported or has other parameters now, all values are accepted.
    """
    with suppress(NoBenchmark):
        benchmark = load_benchmark(name)
        if params.keys() <= set(benchmark.fields):
            return benchmark
    fields: dict[str, Any] = dict.fromkeys(params, (Any, None))
    return Benchmark(name, 0, create_model("Params", **fields), dict.fromkeys(params))


def _state(task: TaskState, seen: Observation) -> dict[str, Any]:
    older = task.key in seen.stale
    return {"run.status": str(task.status), "run.repeat": task.repeat, f"run.{OLDER}": older}


def _values(run: Run, benchmarks: Benchmarks) -> dict[str, Any]:
    defaults = benchmarks.of(run.benchmark).json_defaults
    return {"run.benchmark": run.benchmark} | defaults | run.params


def _check(benchmarks: Benchmarks, runs: Iterable[Run]) -> Check:
    """Return the check of plain values in a condition.

    The values of the runs themselves are valid, too. They can name code that no longer exists.
    """
    valid = {"status": [str(status) for status in Status], "benchmark": list(benchmarks.by_name)}
    of_runs = {(name, repr(value)) for run in runs for name, value in run.params.items()}

    def check(name: str, value: Any) -> str | None:
        if not name.startswith("run."):
            return None if (name, repr(value)) in of_runs else benchmarks.never_equals(name, value)
        name = name.removeprefix("run.")
        if name == OLDER and not isinstance(value, bool):
            return f"{OLDER}: got {value!r}, expected true or false"
        if name == "repeat" and (isinstance(value, bool) or not isinstance(value, int)):
            return f"repeat: got {value!r}, expected an integer"
        if name not in valid or value in valid[name]:
            return None
        return f"{name}: got {value!r}{nearest(str(value), valid[name])}"

    return check
