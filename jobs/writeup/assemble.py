"""Assembles the document from problems and the studies that have results."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from jobs.errors import TableError
from jobs.report.figures import Figure
from jobs.report.run_pictures import run_pictures
from jobs.report.tables.report_table import make_report_table
from jobs.report.views import select
from jobs.sweep.views import Plot, Table
from jobs.writeup.answer import Answer, render_answer
from jobs.writeup.coverage import Coverage, asked_cells, coverage_on
from jobs.writeup.document import (
    OWN_SWEEPS,
    DeviceView,
    Document,
    PartResult,
    ProblemResult,
    ShownTable,
    State,
)
from jobs.writeup.problem import Exhibit, Part, Problem
from jobs.writeup.studies import Registry, Studies, Study

AnyView = TypeVar("AnyView", Table, Plot)


def make_document(
    problems: Iterable[Problem],
    studies: Studies,
    folders: list[str],
    notes: list[str],
) -> Document:
    """Answer the problems from the results.

    The sweeps of which no problem shows anything have a section at the beginning. Problems without
    results are left out. Problems that need no measurement are shown only beside others.

    Args:
        folders: paths of the results folders, as shown.
        notes: notes on what could not be read.
    """
    registry = Registry()
    every = [
        ProblemResult(problem, [_part(problem, part, studies, registry) for part in problem.parts])
        for problem in problems
    ]
    with_results = [result for result in every if result.has_results]
    found = [r for r in every if with_results and (r.has_results or r.state is State.derived)]
    left_out = len(every) - len(found) if found else 0
    used = {name for result in found for part in result.parts for name in part.shown_studies}
    own = dict.fromkeys(name for here in studies.values() for name in here if name not in used)
    if own:
        found.insert(0, _own_sweeps(own, studies))
    document = Document(found, registry, folders, notes, left_out)
    order = ["", *document.devices]
    for part in (part for result in found for part in result.parts):
        part.views.sort(key=lambda view: order.index(view.device))
    return document


def _part(problem: Problem, part: Part, studies: Studies, registry: Registry) -> PartResult:
    name = part.sweep or problem.sweep or ""
    names = {name, *(exhibit.sweep for exhibit in part.show)}
    involved = {device: here for device, here in studies.items() if name and names & here.keys()}
    views = [
        _view(part, name, here, device, registry)
        for device, here in (involved or {"": studies.get("", {})}).items()
    ]
    shown = [
        view
        for view in views
        if view.answer.found
        or view.coverage.measured
        or any(shown.table.measured_devices for shown in view.tables)
    ]
    if not shown:  # the same on every device
        shown = [replace(views[0], device="", coverage=Coverage())]
    command = _command(name, part) if name else ""
    result = PartResult(part, name, command, shown)
    own = [here[name] for here in involved.values() if name in here]
    statuses = Counter(
        str(record.status)
        for study in own
        for record in study.observation.records
        if not study.is_stock or record.run in asked_cells(study.name, part.filter, part.override)
    )
    if statuses and "ok" not in statuses:
        result.failures = ", ".join(f"{count} {status}" for status, count in statuses.items())
        result.command += " --retry-failed"
    return result


def _view(
    part: Part, name: str, here: Mapping[str, Study], device: str, registry: Registry
) -> DeviceView:
    """Return a part on one kind of device, from the studies `here`. Its own has a name."""
    study = here.get(name)
    view = DeviceView(device, render_answer(part, study, here, device, registry))
    for exhibit in part.show:
        if (source := here.get(exhibit.sweep or name)) is not None:
            _show(view, exhibit, source)
    if study is None:
        return view
    for table in part.more:
        if table in study.tables:
            _add_table(view, study, study.tables[table], folded=True)
    if study.is_stock and device and not device.startswith("cpu:"):
        view.others = _other_runs(view.tables)
        if view.state is not State.derived:
            view.coverage = coverage_on(study, part.filter, part.override)
    return view


def _other_runs(tables: Iterable[ShownTable]) -> int:
    """Return the number of runs in tables that the stock sweeps do not have."""
    own = [each for each in tables if each.study.is_stock and not each.folded]
    asked = {run for each in own for run in asked_cells(each.study.name)}
    cells = (cell for each in own for column in each.table.records.values() for cell in column)
    return len({record.run for cell in cells for record in cell} - asked)


def _command(study: str, part: Part) -> str:
    override = f" {shlex.quote(part.override)}" if part.override else ""
    chosen = f" --where {shlex.quote(part.filter)}" if part.filter else ""
    return f"python -m jobs.submit sweeps/{study}.yaml{override}{chosen}"


def _show(view: DeviceView, exhibit: Exhibit, study: Study) -> None:
    if exhibit.table in study.tables:
        _add_table(view, study, _only(study.tables[exhibit.table], exhibit.where))
    elif exhibit.plot in study.plots:
        _add_plot(view, study, _only(study.plots[exhibit.plot], exhibit.where))
    elif exhibit.images is not None:
        _add_pictures(view, study, exhibit.images, exhibit.where)


def _add_plot(view: DeviceView, study: Study, plot: Plot) -> None:
    with suppress(TableError):  # the runs have no such parameter
        figure = Figure.of_plot(study.observation, plot, study.results)
        view.figures.append(replace(figure, name=f"{study.name}-{figure.name}"))


def _add_pictures(view: DeviceView, study: Study, name: str | None, where: str | None) -> None:
    """Add the pictures of the runs that meet a condition."""
    results = study.results
    if where is not None:
        results = []
        for benchmark in dict.fromkeys(result.run.benchmark for result in study.results):
            with suppress(TableError):  # this benchmark has no such parameter
                view_of = Table(name="figures", benchmark=benchmark, where=where)
                results += select(study.observation, view_of, study.results).results
    figures, problems = run_pictures(results, study.folder_of, name)
    view.figures += [
        replace(figure, title=f"{study.name}: {figure.title}", name=f"{study.name}-{figure.name}")
        for figure in figures
    ]
    view.notes += problems


def _add_table(view: DeviceView, study: Study, table: Table, folded: bool = False) -> None:
    try:
        made = make_report_table(study.observation, table, study.results)
    except TableError as error:
        view.notes.append(f"table {table.name}: {error}")
        return
    if made is None:
        return
    shown = [(each.table.heading, each.table.columns) for each in view.tables]
    is_own = view.of_sweep is not None
    if is_own or (made.has_values and (made.heading, made.columns) not in shown):
        view.tables.append(ShownTable(study, made, folded))


def _only(view: AnyView, where: str | None) -> AnyView:
    """Return a table or plot of only the runs for which a condition holds, too."""
    if where is None:
        return view
    both = where if view.where is None else f"({view.where}) and ({where})"
    return view.model_copy(update={"where": both})


def _state_of_sweep(study: Study) -> State:
    measured = [result for result in study.results if result.status == "ok"]
    if not measured:
        return State.missing
    if any(result.status not in ("ok", "oom", "unsupported") for result in study.results):
        return State.partly
    records = [result.record for result in measured if result.record is not None]
    if any(map(study.is_without_code, records)):
        return State.unknown
    return State.stale if any(map(study.is_stale, records)) else State.answered


def _own_sweeps(names: Iterable[str], studies: Studies) -> ProblemResult:
    """Return a section with the tables and plots of sweeps that answer no problem."""
    parts = []
    for name in names:
        found = {device: here[name] for device, here in studies.items() if name in here}
        views = []
        for device, study in found.items():
            view = DeviceView(device, Answer(""), of_sweep=_state_of_sweep(study))
            for table in study.tables.values():
                _add_table(view, study, table)
            for plot in study.plots.values():
                _add_plot(view, study, plot)
            _add_pictures(view, study, None, None)
            views.append(view)
        study = next(iter(found.values()))
        part = Part(part=study.name, question=study.sweep.description, answer="")
        folder = "sweeps/cpu" if study.is_small else "sweeps"
        command = f"python -m jobs.submit {folder}/{study.name}.yaml" if study.is_stock else ""
        parts.append(PartResult(part, "", command, views))
    problem = Problem(id=OWN_SWEEPS, title="Your sweeps", parts=[each.part for each in parts])
    return ProblemResult(problem, parts)
