"""The document: all problems with their exhibits, answers and statuses, ready to be rendered."""

from __future__ import annotations

import operator
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, reduce
from typing import TypeVar

from jobs.errors import TableError
from jobs.formatting import counted
from jobs.report.figures import Drawing, Figure
from jobs.report.run_pictures import run_pictures
from jobs.report.tables.report_table import ReportTable, make_report_table
from jobs.report.views import select
from jobs.sweep.views import Plot, Table
from jobs.writeup.answer import Answer, paragraphs_of, render_answer
from jobs.writeup.cells import Cells, asked_cells, cells_on
from jobs.writeup.problem import Exhibit, Part, Problem
from jobs.writeup.registry import Registry
from jobs.writeup.studies import Studies, Study

# Stand for, or follow, an answer without its numbers
IMPOSSIBLE = "The runs of this answer have no numbers: memory ran out, or they are not supported."
NO_NUMBERS = "The numbers of this answer are not measured on this device."
SOME_NUMBERS = "Some numbers of this answer are not measured on this device."
AnyView = TypeVar("AnyView", Table, Plot)
OWN_SWEEPS = "own_sweeps"  # anchor of the section with the sweeps that answer no problem


class State(StrEnum):
    """Whether a part is answered by the results. The best state comes first."""

    answered = "answered"
    derived = "no measurement needed"
    stale = "stale"
    partly = "partly"
    missing = "not measured"

    @property
    def meaning(self) -> str:
        """A sentence that explains the state of a part or a problem."""
        return _MEANINGS[self]


_MEANINGS = {
    State.answered: "All cells are measured with the present code, on one kind of GPU or more.",
    State.derived: "The answer is code, arithmetic or a derivation.",
    State.stale: "All cells are measured, some with code that has changed since.",
    State.partly: "Some cells or numbers are not measured, or not as often as the problem asks.",
    State.missing: "There are no results. The command measures them.",
}


@dataclass
class ShownTable:
    """A table of the document."""

    study: Study
    table: ReportTable
    folded: bool  # whether it is folded away


@dataclass
class View:
    """A part of a problem on one kind of device: its answer and its exhibits."""

    device: str  # "" if the answer needs no records, or if there are none
    answer: Answer
    cells: Cells | None = None  # those asked for; None: not of a stock sweep, or on a CPU
    tables: list[ShownTable] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on what could not be shown
    of_sweep: State | None = None  # state of a sweep that answers no problem

    @property
    def state(self) -> State:
        if self.of_sweep is not None:
            return self.of_sweep
        state = State.partly if self.is_impossible else _state_of(self.answer)
        if self.cells is None or not self.cells.measured or state is State.derived:
            return state
        if not self.cells.are_complete or state is State.missing:
            return State.partly
        return State.stale if self.cells.stale and state is State.answered else state

    @property
    def has_results(self) -> bool:
        """Whether a run that the part asks for is measured."""
        is_measured = self.cells is not None and self.cells.measured
        return bool(self.answer.found or self.answer.impossible or is_measured)

    @property
    def is_impossible(self) -> bool:
        """Whether each paragraph of the answer needs a number that its run cannot have."""
        answer = self.answer
        return bool(self.device and answer.impossible) and not (answer.missing or answer.text)

    @property
    def heading(self) -> str:
        """The device, and the state if the part is not answered on it."""
        if not self.device or self.state is State.derived:
            return self.device
        older = ", stale" if self.state is State.partly and self.answer.stale else ""
        return (
            self.device if self.state is State.answered else f"{self.device} ({self.state}{older})"
        )

    @property
    def text(self) -> str:
        """The answer as Markdown with marks, see `jobs.writeup.traced`.

        These are the paragraphs that have all of their numbers.
        """
        answer = self.answer
        if not self.device:
            return answer.text
        if self.is_impossible:
            return IMPOSSIBLE
        more = (SOME_NUMBERS if answer.text else NO_NUMBERS) if answer.missing else ""
        return "\n\n".join(filter(None, [answer.text, more]))

    @property
    def verdict(self) -> str:
        """The first paragraph of the answer, with the list or table that it announces."""
        return paragraphs_of(self.text)[0]

    @property
    def rest(self) -> str:
        """The answer after its first paragraph."""
        return self.text.removeprefix(self.verdict).strip()

    @cached_property
    def drawn(self) -> list[Drawing]:
        """The figures, drawn once for all renderers. Those without a value are left out."""
        taken: set[str] = set()
        drawn = []
        for figure in self.figures:
            with suppress(TableError):  # a prediction fails
                drawn.append(figure.draw(taken))
        return [each for each in drawn if each is not None]

    @property
    def basis(self) -> list[str]:
        """Which cells are measured, and on what the numbers rest."""
        return [*([f"{self.cells.text}."] if self.cells else []), *self.answer.notes]


@dataclass
class PartResult:
    """A part of a problem with everything that the document shows of it."""

    part: Part
    study: str | None  # name of the study
    command: str  # measures the part; "" if the answer needs no records
    views: list[View]  # in the order of `Document.devices`
    failures: str = ""  # statuses of the runs, if none of them succeeded

    @property
    def state(self) -> State:
        """The state on the kind of device that answers the part best."""
        return min((view.state for view in self.views), key=list(State).index)

    def state_on(self, device: str) -> State:
        """The state on one kind of device, which is that of all if the answer needs no records."""
        found = (view.state for view in self.views if view.device in ("", device))
        return next(found, State.missing)

    @property
    def shown_studies(self) -> set[str]:
        """The names of the studies of which this part shows results or failures."""
        tables = [shown for view in self.views for shown in view.tables if not shown.folded]
        names = {shown.study.name for shown in tables if shown.table.measured_devices}
        has_results = self.failures or any(view.has_results for view in self.views)
        return names | ({self.study} if has_results and self.study else set())

    @property
    def not_measured(self) -> str:
        """Text in place of the answer, if it is not measured. "" if there is an answer."""
        is_own = any(view.of_sweep is not None for view in self.views)
        if self.state is not State.missing or self.study is None or is_own:
            return ""
        if wrong := [view.answer.wrong for view in self.views if view.answer.wrong]:
            return wrong[0]
        if self.failures:
            return f"All runs of this answer failed ({self.failures})."
        if not any(view.tables for view in self.views):
            return "Not measured."
        return "The runs of this answer are not measured. The tables show other runs of the study."


@dataclass
class ProblemResult:
    problem: Problem
    parts: list[PartResult]

    @property
    def has_results(self) -> bool:
        """Whether there are runs of the problem, also if all of them failed."""
        return any(part.shown_studies for part in self.parts)

    @property
    def state(self) -> State:
        """The state of the problem: partly if some but not all of its parts are answered."""
        return self._state([part.state for part in self.parts])

    def state_on(self, device: str) -> State:
        """The state of the problem on one kind of device."""
        return self._state([part.state_on(device) for part in self.parts])

    @staticmethod
    def _state(of_parts: Iterable[State]) -> State:
        states = set(of_parts)
        if len(states) > 1:
            states.discard(State.derived)
        if len(states) == 1:
            return states.pop()
        if states == {State.answered, State.stale}:
            return State.stale
        return State.partly

    @property
    def states_of_parts(self) -> str:
        """The states of the parts with their letters, such as `answered (a, b), stale (c)`."""
        return _with_letters([(part.state, part) for part in self.parts])

    def states_on(self, device: str) -> str:
        """The states of the parts that need records on one kind of device, and their cells.

        For example `answered (a), partly (b); 12 of 20 cells, 3 with older code`. "" if no part
        needs records.
        """
        parts = [part for part in self.parts if part.state is not State.derived]
        states = _with_letters([(part.state_on(device), part) for part in parts])
        views = [view for part in parts for view in part.views if view.device == device]
        cells = [view.cells for view in views if view.cells is not None]
        return f"{states}; {reduce(operator.or_, cells).summary}" if cells else states


def _with_letters(parts: list[tuple[State, PartResult]]) -> str:
    """Return states with the letters of their parts, such as `answered (a, b), stale (c)`."""
    letters: dict[State, list[str]] = {}
    for state, part in parts:
        letters.setdefault(state, []).append(part.part.part)
    if len(letters) == 1:
        return str(*letters)
    in_order = sorted(letters.items(), key=lambda item: list(State).index(item[0]))
    return ", ".join(f"{state} ({', '.join(names)})" for state, names in in_order)


@dataclass
class Document:
    problems: list[ProblemResult]
    registry: Registry  # records behind the tables and answers
    folders: list[str]  # paths of the results folders
    notes: list[str]  # on results that could not be read
    left_out: int = 0  # number of problems without results

    @property
    def devices(self) -> list[str]:
        """The kinds of device with answers, that with most answered parts first."""
        views = [v for p in self.problems for part in p.parts for v in part.views if v.device]
        numbers, answered = Counter[str](), Counter[str]()
        for view in views:
            numbers[view.device] += view.answer.found
            answered[view.device] += view.of_sweep is None and view.state is State.answered
        return sorted(numbers, key=lambda name: (-answered[name], -numbers[name], name))

    def counts(self, device: str | None = None) -> dict[State, int]:
        """Return the number of parts by state, on one kind of device or on the best for each."""
        parts = [part for problem in self.problems for part in problem.parts]
        states = [part.state if device is None else part.state_on(device) for part in parts]
        return {state: states.count(state) for state in State}


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
    every = [_problem(problem, studies, registry) for problem in problems]
    with_results = [result for result in every if result.has_results]
    found = [r for r in every if with_results and (r.has_results or r.state is State.derived)]
    left_out = len(every) - len(found)
    used = {name for result in found for part in result.parts for name in part.shown_studies}
    own = dict.fromkeys(name for here in studies.values() for name in here if name not in used)
    if own:
        found.insert(0, _own_sweeps(own, studies))
    _remove_dead_links(found)
    document = Document(found, registry, folders, notes, left_out)
    order = ["", *document.devices]
    for part in (part for result in found for part in result.parts):
        part.views.sort(key=lambda view: order.index(view.device))
    return document


def _remove_dead_links(found: Iterable[ProblemResult]) -> None:
    """Let links to problems that are left out be text."""
    anchors = {anchor for result in found for anchor in result.problem.anchors}

    def linked(link: re.Match[str]) -> str:
        return link[0] if link[2] in anchors else link[1]

    for view in (view for result in found for part in result.parts for view in part.views):
        view.answer.text = re.sub(r"\[([^]]+)]\(#([^)]+)\)", linked, view.answer.text)


def _problem(problem: Problem, studies: Studies, registry: Registry) -> ProblemResult:
    return ProblemResult(
        problem, [_part(problem, part, studies, registry) for part in problem.parts]
    )


def _part(problem: Problem, part: Part, studies: Studies, registry: Registry) -> PartResult:
    name = part.sweep or problem.sweep
    names = {name, *(exhibit.sweep for exhibit in part.show)}
    involved = {
        device: here
        for device, found in studies.items()
        if name and (here := {each: study for each, study in found.items() if each in names})
    }
    views = []
    for device, here in (involved or {"": {}}).items():
        study = here.get(name or "")
        answer = render_answer(part, study, studies, device, registry)
        view = View(device, answer)
        for exhibit in part.show:
            _show(view, exhibit, here.get(exhibit.sweep or name or ""))
        if study is not None:
            for table in part.more:
                _add_table(view, study, study.tables.get(table), None, folded=True)
        if study is not None and study.is_stock and device and not device.startswith("cpu:"):
            is_derived = _state_of(answer) is State.derived
            view.cells = None if is_derived else cells_on(study, part.filter)
            view.notes += _other_runs(view.tables)
        views.append(view)
    shown = [
        view
        for view in views
        if view.answer.found
        or (view.cells is not None and view.cells.measured)
        or any(shown.table.measured_devices for shown in view.tables)
    ]
    if not shown:  # the same on every device
        shown = [replace(views[0], device="", cells=None)]
    command = _command(name, part) if name else ""
    result = PartResult(part, name, command, shown)
    own = [here[name] for here in involved.values() if name in here]
    statuses = Counter(
        str(record.status)
        for study in own
        for record in study.observation.records
        if not study.is_stock or record.run in asked_cells(study.name, part.filter)[0]
    )
    if statuses and "ok" not in statuses:
        result.failures = ", ".join(f"{count} {status}" for status, count in statuses.items())
        result.command += " --retry-failed"
    return result


def _other_runs(tables: Iterable[ShownTable]) -> list[str]:
    """Return a note on runs that stock sweeps do not have, such as those of earlier versions."""
    own = [each for each in tables if each.study.is_stock and not each.folded]
    asked = {run for each in own for run in asked_cells(each.study.name, None)[0]}
    cells = (cell for each in own for column in each.table.records.values() for cell in column)
    others = len({record.run for cell in cells for record in cell} - asked)
    where = "not in the present sweep, but of earlier versions or with other values"
    return [f"{counted(others, 'run')} in these tables: {where}."] if others else []


def _state_of(answer: Answer) -> State:
    """Return the state of a part by the numbers of its answer, without its cells."""
    if not answer.found:
        # Without lookups, an answer is arithmetic or a derivation.
        is_derived = answer.text and not answer.missing and not answer.impossible
        return State.derived if is_derived else State.missing
    if answer.missing:
        return State.partly
    return State.stale if answer.stale else State.answered


def _command(study: str, part: Part) -> str:
    chosen = f" --filter {shlex.quote(part.filter)}" if part.filter else ""
    return f"python -m jobs.submit sweeps/{study}.yaml{chosen}"


def _show(view: View, exhibit: Exhibit, study: Study | None) -> None:
    if study is None:
        return
    if exhibit.table is not None:
        table = study.tables.get(exhibit.table)
        _add_table(view, study, table, exhibit.where, folded=False)
    elif exhibit.plot is not None and exhibit.plot in study.plots:
        _add_plot(view, study, _only(study.plots[exhibit.plot], exhibit.where))
    elif exhibit.images is not None:
        _add_pictures(view, study, exhibit.images, exhibit.where)


def _add_plot(view: View, study: Study, plot: Plot) -> None:
    with suppress(TableError):  # the runs have no such parameter
        figure = Figure.of_plot(study.observation, plot, study.results)
        view.figures.append(replace(figure, name=f"{study.name}-{figure.name}"))


def _add_pictures(view: View, study: Study, name: str | None, where: str | None) -> None:
    """Add the pictures of the runs that meet a condition."""
    results = study.results
    if where is not None:
        results = []
        for benchmark in dict.fromkeys(result.run.benchmark for result in study.results):
            with suppress(TableError):  # this benchmark has no such parameter
                view_of = Table(name="figures", benchmark=benchmark, where=where)
                results += select(study.observation, view_of, study.results).results
    figures, problems = run_pictures(results, study.observation.records, study.folder_of, name)
    view.figures += [
        replace(figure, title=f"{study.name}: {figure.title}", name=f"{study.name}-{figure.name}")
        for figure in figures
    ]
    view.notes += problems


def _add_table(
    view: View, study: Study, table: Table | None, where: str | None, folded: bool
) -> None:
    if table is None:
        return
    table = _only(table, where)
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
    stale = any(r.record is not None and study.is_stale(r.record) for r in measured)
    return State.stale if stale else State.answered


def _own_sweeps(names: Iterable[str], studies: Studies) -> ProblemResult:
    """Return a section with the tables and plots of sweeps that answer no problem."""
    parts = []
    for name in names:
        views = []
        for device, found in studies.items():
            if (study := found.get(name)) is None:
                continue
            view = View(device, Answer(""), of_sweep=_state_of_sweep(study))
            for table in study.tables.values():
                _add_table(view, study, table, None, folded=False)
            for plot in study.plots.values():
                _add_plot(view, study, plot)
            _add_pictures(view, study, None, None)
            views.append(view)
        study = next(found[name] for found in studies.values() if name in found)
        part = Part(part=study.name, question=study.sweep.description, answer="")
        folder = "sweeps/cpu" if study.is_small else "sweeps"
        command = f"python -m jobs.submit {folder}/{study.name}.yaml" if study.is_stock else ""
        parts.append(PartResult(part, study.name, command, views))
    problem = Problem(id=OWN_SWEEPS, title="Your sweeps", parts=[each.part for each in parts])
    return ProblemResult(problem, parts)
