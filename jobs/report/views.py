"""Determines which results a table or plot shows, and in which order.

A sweep file declares tables and plots. In this package, the name `view` stands for the declaration
of a table or plot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.errors import TableError, nearest
from jobs.report.recorded import commit_order
from jobs.report.results import Key, Result, list_results
from jobs.results.run_states import Observation
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark, short_name
from jobs.sweep.conditions import Condition, ConditionError
from jobs.sweep.schema import FILTERS, PSEUDO, RECORDED, Plot, Sweep, Table

Order = dict[str, dict[Any, int]]  # for each dimension, the position of each value


def tables_of(sweep: Sweep) -> list[Table]:
    """Return the tables of a sweep. A table without a benchmark uses the benchmark of the sweep.

    If the sweep declares no tables, return one table per benchmark. This table shows all runs of
    the benchmark.
    """
    if sweep.tables:
        return [
            table.model_copy(update={"benchmark": table.benchmark or sweep.benchmark})
            for table in sweep.tables
        ]
    names = dict.fromkeys(case.benchmark or sweep.benchmark for case in sweep.cases)
    if len(names) < 2:
        return [Table(name=sweep.name, benchmark=next(iter(names), None))]
    return [
        Table(name=sweep.name, title=f"{sweep.name}, {short_name(name)}", benchmark=name)
        for name in names
    ]


def plots_of(sweep: Sweep) -> list[Plot]:
    """Return the plots of a sweep. Plots without a benchmark get the benchmark of the sweep."""
    return [
        plot.model_copy(update={"benchmark": plot.benchmark or sweep.benchmark})
        for plot in sweep.plots
    ]


def dimensions(view: Table | Plot) -> list[str]:
    """Return the dimensions of a table or plot, which are the names that its declaration lists.

    A dimension is a parameter or one of `phase`, `device`, `repeat`, `value` (the metric),
    `commit`, `host` and `gpu`. A table lists its dimensions in `rows` and `columns`. A plot lists
    its dimensions in `facet`, `x` and `series`.
    """
    if isinstance(view, Plot):
        return [*view.facet, view.x, *view.series]
    return [*view.rows, *view.columns]


def without_recorded(view: Table) -> Table:
    """Return a table without its `where` condition, and without `commit`, `host` and `gpu`."""
    rows, columns = (
        [name for name in names if name not in RECORDED] for names in (view.rows, view.columns)
    )
    return view.model_copy(update={"where": None, "rows": rows, "columns": columns})


def select_results(
    observation: Observation, view: Table | Plot, results: list[Result]
) -> tuple[list[Result], list[str]]:
    """Return the results that a table or plot shows, and the names that tell them apart.

    These are the results of its benchmark that satisfy its `where` condition. If there is no such
    condition, these are all results of its benchmark.

    Returns:
        The results, and those of the names `commit`, `host` and `gpu` that the table or plot uses.
        Records of the same run that differ in such a name are separate results. A name that is a
        parameter of the benchmark is not returned.

    Raises:
        TableError: if the table or plot names an unknown parameter, or if its `where` condition is
            invalid or cannot be evaluated for a run.
    """
    benchmark = view.benchmark or observation.manifests[-1].sweep.benchmark
    named = [name for name in dimensions(view) if name not in (*PSEUDO, *RECORDED)]
    own = _of_benchmark(results, benchmark, named)
    if not own:
        return [], []
    known = sorted(own[0].run.params)
    for name in named:
        if name not in known:
            raise TableError(f"no run has a parameter {name!r}{nearest(name, known)}")
    try:
        condition = Condition(view.where, known, recorded=FILTERS) if view.where else None
        used = {*dimensions(view), *(condition.named if condition else ())}
        told_apart = [name for name in RECORDED if name in used and name not in known]
        if told_apart:
            own = _of_benchmark(list_results(observation, told_apart), benchmark, named)
        if condition is not None:
            own = [result for result in own if condition(_condition_values(result, condition))]
    except ConditionError as error:
        raise TableError(f"where: {error}") from error
    return own, told_apart


def _condition_values(result: Result, condition: Condition) -> dict[str, Any]:
    return {name: result.coordinate(name) for name in condition.named}


def _of_benchmark(results: list[Result], benchmark: str, named: list[str]) -> list[Result]:
    """Return the results of one benchmark. All their runs have the same parameters."""
    own = [result for result in results if result.run.benchmark == short_name(benchmark)]
    return with_defaults(own, benchmark, named) if own else []


def with_defaults(results: list[Result], benchmark: str, named: list[str]) -> list[Result]:
    """Return results in which all runs have the same parameters.

    Parameters that a run lacks are added with their default values. A run lacks a parameter if the
    benchmark did not have this parameter when the run was made.

    Args:
        results: results of one benchmark.
        named: parameters that the table or plot uses.

    Raises:
        TableError: if parameters must be added, and the benchmark cannot be imported.
    """
    names = dict.fromkeys(name for result in results for name in result.run.params)
    if names.keys() >= set(named) and all(len(r.run.params) == len(names) for r in results):
        return results
    try:
        defaults = load_benchmark(benchmark).json_defaults
    except NoBenchmark as error:
        raise TableError(str(error)) from error
    names |= dict.fromkeys(name for name in named if name in defaults)
    completed = []
    for result in results:
        params = {name: result.run.params.get(name, defaults.get(name)) for name in names}
        completed.append(replace(result, run=replace(result.run, params=params)))
    return completed


def declared_order(observation: Observation, results: list[Result], told_apart: list[str]) -> Order:
    """Return the position of each parameter value in the sweep files of a results folder.

    A folder can have several sweep files, one per submission. Values in the newest sweep file come
    first. Commits are in the order in which they were first measured. The result has a dict from
    value to position for each parameter, and for the commit if it is in `told_apart`.
    """
    order: Order = {}
    for manifest in reversed(observation.manifests):
        for scope in (manifest.sweep, *manifest.sweep.cases):
            fixed = {name: [value] for name, value in scope.fixed.items()}
            for name, values in (*fixed.items(), *scope.grid.items(), *scope.zip.items()):
                places = order.setdefault(name, {})
                for value in values:
                    places.setdefault(as_in_runs(value), len(places))
    if "commit" in told_apart:
        order["commit"] = commit_order(result.record for result in results if result.record)
    return order


def sort_keys(keys: set[Key], names: list[str], order: Order) -> list[Key]:
    """Sort the row keys or column keys of a table in the order of the sweep file.

    A key is a tuple that identifies a row or column. It has one value for each dimension, such as a
    parameter. `order` has the position of each value by dimension. Values without one come last,
    ascending.
    """

    def rank(key: Key) -> list[tuple[int, float, str]]:
        ranks = []
        for name, value in zip(names, key, strict=True):
            places = order.get(name, {})
            number = value if isinstance(value, (int, float)) else 0.0
            ranks.append((places.get(value, len(places)), number, str(value)))
        return ranks

    return sorted(keys, key=rank)
