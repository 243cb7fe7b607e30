"""Resolves the views of a sweep (tables and plots): their benchmarks, results and order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jobs.errors import TableError, nearest
from jobs.report.results import Key, Result
from jobs.results.run_states import Observation
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark, short_name
from jobs.sweep.conditions import Condition, ConditionError
from jobs.sweep.schema import PSEUDO, Plot, Sweep, Table

Order = dict[str, dict[Any, int]]  # rank of each value, by dimension


def tables_of(sweep: Sweep) -> list[Table]:
    """Return the tables of a sweep, each with its benchmark set.

    If the sweep has no tables, return one table per benchmark, with all its runs.
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
    """Return the plots of a sweep, each with its benchmark set."""
    return [
        plot.model_copy(update={"benchmark": plot.benchmark or sweep.benchmark})
        for plot in sweep.plots
    ]


def dimensions(view: Table | Plot) -> list[str]:
    """Return the dimensions of a view: rows and columns of a table; facets, x and series of a
    plot."""
    if isinstance(view, Plot):
        return [*view.facet, view.x, *view.series]
    return [*view.rows, *view.columns]


def select_results(
    observation: Observation, view: Table | Plot, results: list[Result]
) -> list[Result]:
    """Select the results that a view shows: those of its benchmark for which its `where` holds.

    Args:
        observation: the results folder.
        view: the table or plot.
        results: all results of the folder.

    Raises:
        TableError: if the view has a parameter that no run has, or if its `where` is invalid or
            cannot be evaluated for a run.
    """
    benchmark = view.benchmark or observation.manifests[-1].sweep.benchmark
    own = [result for result in results if result.run.benchmark == short_name(benchmark)]
    if not own:
        return []
    named = [name for name in dimensions(view) if name not in PSEUDO]
    own = _with_defaults(own, benchmark, named)
    known = sorted(own[0].run.params)
    for name in named:
        if name not in known:
            raise TableError(f"no run has a parameter {name!r}{nearest(name, known)}")
    if view.where:
        try:
            holds = Condition(view.where, known)
            own = [result for result in own if holds(result.run.params)]
        except ConditionError as error:
            raise TableError(f"where: {error}") from error
    return own


def _with_defaults(results: list[Result], benchmark: str, named: list[str]) -> list[Result]:
    """Complete the parameters of results of one benchmark, so that all have the same parameters.

    A parameter that was added to the benchmark after a run gets its default in this run.

    Args:
        results: results of the benchmark.
        benchmark: name of the benchmark.
        named: parameters that the view needs.
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


def declared_order(observation: Observation) -> Order:
    """Number the values of each parameter in the order of the sweeps, newest sweep first."""
    order: Order = {}
    for manifest in reversed(observation.manifests):
        for block in (manifest.sweep, *manifest.sweep.cases):
            fixed = {name: [value] for name, value in block.fixed.items()}
            for name, values in (*fixed.items(), *block.grid.items(), *block.zip.items()):
                places = order.setdefault(name, {})
                for value in values:
                    places.setdefault(value, len(places))
    return order


def sort_keys(keys: set[Key], names: list[str], order: Order) -> list[Key]:
    """Sort keys in the order in which the sweeps list their values, not in the order of the runs.

    Args:
        keys: the keys of rows or columns.
        names: the dimensions of a key.
        order: ranks of the values. A value without a rank is last, by number and text.
    """

    def rank(key: Key) -> list[tuple[int, float, str]]:
        ranks = []
        for name, value in zip(names, key, strict=True):
            places = order.get(name, {})
            number = value if isinstance(value, (int, float)) else 0.0
            ranks.append((places.get(value, len(places)), number, str(value)))
        return ranks

    return sorted(keys, key=rank)
