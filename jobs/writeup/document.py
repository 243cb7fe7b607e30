"""The document: all problems with their exhibits, answers and statuses, ready to be rendered."""

from __future__ import annotations

import operator
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from itertools import groupby

from jobs.errors import TableError
from jobs.report.tables.report_table import ReportTable, make_report_table
from jobs.report.views import Shown, select
from jobs.sweep.views import Plot, Table
from jobs.writeup.answer import Answer, devices_of, render_answer
from jobs.writeup.cells import Cells, cells_on
from jobs.writeup.drawings import Drawing, drawings_of
from jobs.writeup.problem import Exhibit, Part, Problem
from jobs.writeup.registry import Registry
from jobs.writeup.studies import Study
from jobs.writeup.traced import joined, without_marks

# Follows the answer of a device without some numbers, if another device has all of them
SOME_NUMBERS = (
    "Some runs of this answer are not measured on this device. The tables have those that are."
)
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
    State.partly: "Some cells that the problem asks for, or some numbers, are not measured.",
    State.missing: "There are no results. The command measures them.",
}


@dataclass
class ShownTable:
    """A table of the document."""

    study: Study
    table: ReportTable
    folded: bool  # whether it is folded away


@dataclass
class ShownPlot:
    """A plot of the document, as its declaration. The renderers draw it."""

    study: Study
    plot: Plot
    device: str = ""  # kind of GPU, if the study has another plot of another one

    @property
    def title(self) -> str:
        title = self.shown.title
        return f"{title}, {self.device}" if self.device else title

    @property
    def shown(self) -> Shown:
        """What the plot shows.

        Raises:
            TableError: if the plot names an unknown parameter or has an invalid condition.
        """
        return select(self.study.observation, self.plot, self.study.results)


@dataclass
class ShownAnswer:
    """An answer of one or several kinds of device."""

    devices: str  # with their states, except answered; "" if it has no numbers
    text: str  # Markdown with marks, see `jobs.writeup.traced`
    notes: list[str]  # on what the numbers rest


@dataclass
class PartResult:
    """A part of a problem with everything that the document shows of it."""

    part: Part
    study: str | None  # name of the study
    state: State
    command: str  # measures the part; "" if the answer needs no records
    # By kind of device, the best state first. The key is "" if the answer needs no records.
    answers: dict[str, Answer]
    tables: list[ShownTable] = field(default_factory=list)
    plots: list[ShownPlot] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on what could not be shown
    failures: str = ""  # statuses of the runs, if none of them succeeded
    cells: dict[str, Cells] = field(default_factory=dict)  # those asked for, by kind of GPU

    @property
    def shown_answers(self) -> Iterator[ShownAnswer]:
        """The answers, the best state first.

        Devices whose answers differ only in the records have one together.
        """
        order = list(State)
        devices = sorted(self.answers, key=lambda device: order.index(self.state_on(device)))
        texts = {device: self._text(self.answers[device]) for device in devices}
        for _, group in groupby(texts, lambda device: without_marks(texts[device])):
            devices = list(group)
            answers = [self.answers[device] for device in devices]
            named = [self._with_state(device) for device in devices if device]
            # The comma separates a state from the devices before it.
            same = len({self.state_on(device) for device in devices}) == 1
            yield ShownAnswer(
                (" and " if same else ", and ").join(named)
                if any(a.found or a.missing for a in answers)
                else "",
                joined([texts[device] for device in devices]),
                [
                    *[f"{d}: {self.cells[d].text}" for d in devices if d in self.cells],
                    *[note for answer in answers for note in answer.notes],
                ],
            )

    def state_on(self, device: str) -> State:
        """Return the state of the part on one kind of device."""
        answer, cells = self.answers.get(device), self.cells.get(device)
        state = State.missing if answer is None else state_of(answer)
        if cells is None or state in (State.missing, State.derived):
            return state
        if not cells.are_complete:
            return State.partly
        return State.stale if cells.stale and state is State.answered else state

    def _text(self, answer: Answer) -> str:
        if not answer.missing or (self.state is State.missing and not answer.found):
            return answer.text
        return "\n\n".join([*answer.complete_paragraphs, SOME_NUMBERS])

    def _with_state(self, device: str) -> str:
        state = self.state_on(device)
        if state is State.answered:
            return device
        older = ", stale" if state is State.partly and self.answers[device].stale else ""
        return f"{device} ({state}{older})"

    @property
    def not_measured(self) -> str:
        """Text in place of the answer, if it is not measured. "" if there is an answer."""
        if self.state is not State.missing or self.study is None:
            return ""
        if self.failures:
            return f"All runs of this answer failed ({self.failures})."
        if not self.tables:
            return "Not measured."
        return "The runs of this answer are not measured. The tables show other runs of the study."


@dataclass
class ProblemResult:
    problem: Problem
    parts: list[PartResult]

    @property
    def state(self) -> State:
        """The state of the problem: partly if some but not all of its parts are answered."""
        states = {part.state for part in self.parts}
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

        For example `answered (a), partly (b); 12 of 20 cells`. "" if no part needs records.
        """
        parts = [part for part in self.parts if part.state is not State.derived]
        states = _with_letters([(part.state_on(device), part) for part in parts])
        cells = [part.cells[device] for part in parts if device in part.cells]
        return f"{states}; {reduce(operator.or_, cells).count}" if cells else states


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

    @property
    def devices(self) -> list[str]:
        """The kinds of device with answers, if there are several."""
        found = {
            device
            for problem in self.problems
            for part in problem.parts
            for device in part.answers
            if device
        }
        return sorted(found) if len(found) > 1 else []

    def counts(self) -> dict[State, int]:
        """Return the number of parts by state."""
        states = [part.state for problem in self.problems for part in problem.parts]
        return {state: states.count(state) for state in State}


def make_document(
    problems: Iterable[Problem],
    studies: Mapping[str, Study],
    folders: list[str],
    notes: list[str],
) -> Document:
    """Answer all problems from the results.

    A sweep that belongs to no problem has a section of its own at the end.

    Args:
        folders: paths of the results folders, as shown.
        notes: notes on what could not be read.
    """
    registry = Registry()
    problems = list(problems)
    used = {
        name
        for problem in problems
        for part in problem.parts
        for name in (problem.sweep, part.sweep, *(exhibit.sweep for exhibit in part.show))
    }
    found = [_problem(problem, studies, registry) for problem in problems]
    own = [study for name, study in studies.items() if name not in used]
    if own:
        found.append(_own_sweeps(own, registry))
    return Document(found, registry, folders, notes)


def _problem(problem: Problem, studies: Mapping[str, Study], registry: Registry) -> ProblemResult:
    return ProblemResult(
        problem, [_part(problem, part, studies, registry) for part in problem.parts]
    )


def _part(
    problem: Problem, part: Part, studies: Mapping[str, Study], registry: Registry
) -> PartResult:
    name = part.sweep or problem.sweep
    study = studies.get(name) if name else None
    names = dict.fromkeys([name, *(exhibit.sweep for exhibit in part.show)])
    involved = [studies[each] for each in names if each is not None and each in studies]
    devices: list[str | None] = list(devices_of(involved)) if name else [None]
    answers = {
        device or "": render_answer(part.answer, study, studies, device, registry)
        for device in devices or [None]
    }
    command = _command(name, part) if name else ""
    result = PartResult(part, name, State.missing, command, {})
    for exhibit in part.show:
        _show(result, exhibit, studies.get(exhibit.sweep or name or ""))
    if study is not None:
        for table in part.more:
            _add_table(result, study, study.tables.get(table), None, folded=True)
    in_tables = {device for shown in result.tables for device in shown.table.measured_devices}
    kept = {
        device: answer
        for device, answer in answers.items()
        if answer.found or (answer.missing and device in in_tables)
    }
    if not any(answer.found for answer in kept.values()):  # the same for every device
        kept = dict(list(answers.items())[:1])
    if study is not None and study.is_stock:
        result.cells = {
            device: cells_on(study, part.filter, device)
            for device, answer in kept.items()
            if not device.startswith("cpu:") and state_of(answer) is not State.derived
        }
    order = list(State)
    result.answers = kept
    result.answers = {
        device: kept[device]
        for device in sorted(kept, key=lambda device: order.index(result.state_on(device)))
    }
    result.state = result.state_on(next(iter(result.answers)))
    statuses = Counter(
        str(record.status) for each in involved for record in each.observation.records
    )
    if statuses and "ok" not in statuses:
        result.failures = ", ".join(f"{count} {status}" for status, count in statuses.items())
        result.command += " --retry-failed"
    return result


def state_of(answer: Answer) -> State:
    """Return the state of a part with this answer, which is that of one kind of device."""
    if not answer.found:
        # Without lookups, an answer is arithmetic or a derivation.
        return State.derived if answer.text and not answer.missing else State.missing
    if answer.missing:
        return State.partly
    return State.stale if answer.stale else State.answered


def _command(study: str, part: Part) -> str:
    chosen = f" --filter {shlex.quote(part.filter)}" if part.filter else ""
    return f"python -m jobs.submit sweeps/{study}.yaml{chosen}"


def _show(result: PartResult, exhibit: Exhibit, study: Study | None) -> None:
    if study is None:
        return
    if exhibit.table is not None:
        table = study.tables.get(exhibit.table)
        _add_table(result, study, table, exhibit.where, folded=False)
    elif exhibit.plot is not None and exhibit.plot in study.plots:
        result.plots += _plots(study, study.plots[exhibit.plot])
    elif exhibit.images is not None:
        result.drawings += drawings_of(study, exhibit.images, exhibit.where)


def _plots(study: Study, plot: Plot) -> list[ShownPlot]:
    """Return a plot for each kind of GPU, because their values are seldom of one scale."""
    of_device = {device: study.on(device) for device in devices_of([study])}
    having = {device: one for device, one in of_device.items() if _has_values(one, plot)}
    if len(having) < 2:
        return [ShownPlot(study, plot)]
    return [ShownPlot(one, plot, device) for device, one in having.items()]


def _has_values(study: Study, plot: Plot) -> bool:
    try:
        results = ShownPlot(study, plot).shown.results
    except TableError:
        return False
    return any(result.status == "ok" for result in results)


def _add_table(
    result: PartResult, study: Study, table: Table | None, where: str | None, folded: bool
) -> None:
    if table is None:
        return
    if where is not None:
        both = where if table.where is None else f"({table.where}) and ({where})"
        table = table.model_copy(update={"where": both})
    try:
        made = make_report_table(study.observation, table, study.results)
    except TableError as error:
        result.notes.append(f"table {table.name}: {error}")
        return
    if made is not None:
        result.tables.append(ShownTable(study, made, folded))


def _state_of_sweep(study: Study) -> State:
    measured = [result for result in study.results if result.status == "ok"]
    if not measured:
        return State.missing
    if any(result.status not in ("ok", "oom", "unsupported") for result in study.results):
        return State.partly
    stale = any(r.record is not None and study.is_stale(r.record) for r in measured)
    return State.stale if stale else State.answered


def _own_sweeps(studies: list[Study], registry: Registry) -> ProblemResult:
    """Return a section with the tables and plots of sweeps that answer no problem."""
    parts = []
    for study in studies:
        part = Part(part=study.name, question=study.sweep.description, answer="")
        state = _state_of_sweep(study)
        command = f"python -m jobs.submit sweeps/{study.name}.yaml" if study.is_stock else ""
        result = PartResult(part, study.name, state, command, {"": Answer("")})
        for table in study.tables.values():
            _add_table(result, study, table, None, folded=False)
        for plot in study.plots.values():
            result.plots += _plots(study, plot)
        result.drawings += drawings_of(study, None, None)
        parts.append(result)
    problem = Problem(id=OWN_SWEEPS, title="Other sweeps", parts=[each.part for each in parts])
    return ProblemResult(problem, parts)
