"""Selects what a table or plot shows, and puts it in order.

A sweep file declares tables and plots. In this package, the name `view` stands for the declaration
of a table or plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.errors import TableError, nearest
from jobs.formatting import format_scalar
from jobs.frame.results import Key, Result, with_defaults
from jobs.results.run_states import Observation
from jobs.run import Run, varying
from jobs.sweep.benchmarks import short_name
from jobs.sweep.conditions import Condition, ConditionError, Names
from jobs.sweep.schema import Sweep
from jobs.sweep.views import DEVICE, PSEUDO, Plot, Table, names_in_title


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


@dataclass(frozen=True)
class Shown:
    """What a table or plot shows of a results folder."""

    observation: Observation
    view: Table | Plot
    results: list[Result]
    everything: list[Result]  # all results of the folder

    @property
    def title(self) -> str:
        """The title in one line. `{NAME}` in it is replaced by the values of a parameter.

        A parameter that the runs do not have stays as it is: in results of an earlier version of
        the sweep file, braces may have had no meaning.
        """
        title = " ".join((self.view.title or "").split()) or self.view.name
        for name in names_in_title(title):
            values = {(r.run.params[name],) for r in self.results if name in r.run.params}
            if values:
                texts = [format_scalar(value) for (value,) in self.sorted(values, [name])]
                title = title.replace(f"{{{name}}}", ", ".join(texts))
        return title

    def sorted(self, keys: Iterable[Key], names: list[str], **orders: Sequence[Any]) -> list[Key]:
        """Sort the keys of rows or columns in the order of the sweep file.

        A key has one value for each name of a dimension, such as a parameter. Values that are not
        in a sweep file come last. `orders` has the order of the values of further dimensions.
        """
        every = list(keys)
        found = {name: {key[i] for key in every} for i, name in enumerate(names)}
        order = {name: self._declared_order(name, found[name]) for name in names}
        order |= {
            name: {value: i for i, value in enumerate(values)} for name, values in orders.items()
        }

        def rank(key: Key) -> list[tuple[int, float, str]]:
            ranks = []
            for name, value in zip(names, key, strict=True):
                places = order[name]
                number = value if isinstance(value, (int, float)) else 0.0
                ranks.append((places.get(value, len(places)), number, str(value)))
            return ranks

        return sorted(every, key=rank)

    def _declared_order(self, name: str, values: set[Any]) -> dict[Any, int]:
        """Return the position of each value of a parameter in the sweep files of the folder.

        A folder can have several sweep files, one per submission. The newest that has all values
        decides. If there is none, numbers are ascending, behind null, and of other values those in
        the newest file come first.
        """
        merged: dict[Any, int] = {}
        for declared in self._declared:
            own = declared.get(name, [])
            if values <= set(own):
                return {value: i for i, value in enumerate(own)}
            for value in own:
                merged.setdefault(value, len(merged))
        are_numbers = all(type(value) in (int, float) for value in values - {None})
        return {None: 0} if are_numbers and len(self._declared) > 1 else merged

    @cached_property
    def _declared(self) -> list[dict[str, list[Any]]]:
        """The values of each parameter in each sweep file of the folder, the newest first."""
        found = []
        for manifest in reversed(self.observation.manifests):
            order: dict[str, dict[Any, None]] = {}
            for scope in (manifest.sweep, *manifest.sweep.cases):
                fixed = {name: [value] for name, value in scope.fixed.items()}
                for name, values in (*fixed.items(), *scope.grid.items(), *scope.zip.items()):
                    order.setdefault(name, {}).update(dict.fromkeys(map(as_in_runs, values)))
            found.append({name: list(values) for name, values in order.items()})
        return found

    def extra_dimensions(self, dimensions: list[str]) -> list[str]:
        """Return the dimensions that must be added so that no two runs share a cell.

        A parameter is needed if runs in the same cell differ in it. The device is needed if the
        results are from several kinds of device.
        """
        needed: list[str] = []
        if len({r.device for r in self.results if r.device}) > 1 and "device" not in dimensions:
            needed.append("device")
        return [*needed, *self.differences([*dimensions, *needed])][::-1]

    def differences(self, dimensions: Iterable[str]) -> list[str]:
        """Return the parameters in which runs with the same values of some dimensions differ."""
        known = [name for name in dimensions if name not in ("phase", "value")]
        groups: dict[Key, dict[str, Run]] = {}
        for result in self.results:
            key = tuple([result.coordinate(name) for name in known])
            groups.setdefault(key, {})[result.run.id] = result.run
        found = (name for runs in groups.values() for name in varying(list(runs.values())))
        return list(dict.fromkeys(found))


def select(observation: Observation, view: Table | Plot, results: list[Result]) -> Shown:
    """Select the results of a view: those of its benchmark that satisfy its `where` condition.

    Args:
        results: all results of the folder.

    Raises:
        TableError: if the view names an unknown parameter, or if its `where` condition is invalid
            or cannot be evaluated for a run.
    """
    benchmark = view.benchmark or observation.manifests[-1].sweep.benchmark
    named = [name for name in (*view.rows, *view.columns) if name not in PSEUDO]
    own = [result for result in results if result.run.benchmark == short_name(benchmark)]
    if not own:
        return Shown(observation, view, [], results)
    own = with_defaults(own, benchmark, named)
    known = sorted(own[0].run.params)
    for name in named:
        if name not in known:
            raise TableError(f"no run has a parameter {name!r}{nearest(name, known)}")
    try:
        if view.where:
            condition = Condition(view.where, Names(known, [DEVICE]))
            own = [r for r in own if condition(r.run.params | {f"run.{DEVICE}": r.device})]
    except ConditionError as error:
        raise TableError(f"where: {error}") from error
    return Shown(observation, view, own, results)
