"""The document: problems with their exhibits, answers and statuses, ready to be rendered.

`jobs.writeup.assemble` makes it.
"""

from __future__ import annotations

import operator
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, reduce

from jobs.errors import TableError
from jobs.formatting import counted
from jobs.report.figures import Drawing, Figure
from jobs.report.tables.table import ReportTable
from jobs.writeup.answer import Answer, paragraphs_of
from jobs.writeup.coverage import Coverage
from jobs.writeup.problem import Part, Problem
from jobs.writeup.studies import Registry, Study

# Stand for, or follow, an answer without its numbers
OWN_SWEEPS = "own_sweeps"  # anchor of the section with what no problem shows
IMPOSSIBLE = "The runs of this answer have no numbers: memory ran out, or they are not supported."
NO_NUMBERS = "The numbers of this answer are not measured on this device."
SOME_NUMBERS = "Some numbers of this answer are not measured on this device."


class State(StrEnum):
    """Whether a part is answered by the results. The best state comes first."""

    answered = "answered"
    derived = "no measurement needed"
    stale = "stale"
    unknown = "code not found"
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
    State.unknown: "All cells are measured, but code is not found from here: it may have changed.",
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
class DeviceView:
    """A part of a problem on one kind of device: its answer and its exhibits."""

    device: str  # "" if the answer needs no records, or if there are none
    answer: Answer
    coverage: Coverage = field(default_factory=Coverage)  # of a stock sweep, on GPUs
    others: int = 0  # number of runs in the tables that the stock sweep does not have
    tables: list[ShownTable] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on what could not be shown
    of_sweep: State | None = None  # state of a sweep that answers no problem

    @property
    def state(self) -> State:
        if self.of_sweep is not None:
            return self.of_sweep
        state = State.partly if self.is_impossible else self._state_of_answer
        if not self.coverage.measured:
            return state
        if not self.coverage.are_complete or state is State.missing:
            return State.partly
        return State.stale if self.coverage.stale and state is State.answered else state

    @property
    def _state_of_answer(self) -> State:
        """The state by the numbers of the answer, without the cells."""
        answer = self.answer
        if not answer.found:
            # Without lookups, an answer is arithmetic or a derivation.
            is_derived = answer.text and not answer.missing and not answer.impossible
            return State.derived if is_derived else State.missing
        if answer.missing:
            return State.partly
        return State.stale if answer.stale else State.answered

    @property
    def has_results(self) -> bool:
        """Whether a run that the part asks for is measured."""
        return bool(self.answer.found or self.answer.impossible or self.coverage.measured)

    @property
    def is_impossible(self) -> bool:
        """Whether each paragraph of the answer needs a number that its run cannot have."""
        answer = self.answer
        return bool(self.device and answer.impossible) and not (answer.missing or answer.text)

    @property
    def heading(self) -> str:
        """The device, and the state if the part is not answered on it."""
        if not self.device or self.state in (State.answered, State.derived):
            return self.device
        older = ", stale" if self.state is State.partly and self.answer.stale else ""
        return f"{self.device} ({self.state}{older})"

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
        if not self.coverage.asked:
            return self.answer.notes
        where = "of earlier versions of the sweep, or with other values"
        others = f" The tables have {counted(self.others, 'run')} {where}." if self.others else ""
        return [f"{self.coverage.text}.{others}", *self.answer.notes]


@dataclass
class PartResult:
    """A part of a problem with everything that the document shows of it."""

    part: Part
    study: str  # name of the study of the answer; "" if there is none
    command: str  # measures the part; "" if the answer needs no records
    views: list[DeviceView]  # in the order of `Document.devices`
    failures: str = ""  # statuses of the runs, if none of them succeeded

    @property
    def state(self) -> State:
        """The state on the kind of device that answers the part best."""
        return self.state_on(None)

    def state_on(self, device: str | None) -> State:
        """The state on one kind of device. None: on that which answers the part best."""
        # An answer that needs no records has the device "".
        found = [view.state for view in self.views if device is None or view.device in ("", device)]
        return min(found, key=list(State).index, default=State.missing)

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
        if self.state is not State.missing or not self.study:
            return ""
        if wrong := [view.answer.wrong for view in self.views if view.answer.wrong]:
            return wrong[0]
        if self.failures:
            return f"All runs of this answer failed ({self.failures})."
        return "The runs of this answer are not measured."


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
        return self.state_on(None)

    def state_on(self, device: str | None) -> State:
        """The state of the problem on one kind of device, None: on the best for each part."""
        states = {part.state_on(device) for part in self.parts}
        if len(states) > 1:
            states.discard(State.derived)
        if len(states) == 1:
            return states.pop()
        if states <= {State.answered, State.stale, State.unknown}:
            return max(states, key=list(State).index)
        return State.partly

    @property
    def states_of_parts(self) -> str:
        """The states of the parts with their letters, such as `answered (a, b), stale (c)`."""
        return _with_letters(self.parts, None)

    def states_on(self, device: str) -> str:
        """The states of the parts that need records on one kind of device, and their cells.

        For example `answered (a), partly (b); 12 of 20 cells, 3 with older code`. "" if no part
        needs records.
        """
        parts = [part for part in self.parts if part.state is not State.derived]
        states = _with_letters(parts, device)
        views = [view for part in parts for view in part.views if view.device == device]
        cells = reduce(operator.or_, (view.coverage for view in views), Coverage())
        return f"{states}; {cells.summary}" if cells.asked else states


def _with_letters(parts: list[PartResult], device: str | None) -> str:
    """Return states with the letters of their parts, such as `answered (a, b), stale (c)`."""
    letters: dict[State, list[str]] = {state: [] for state in State}
    for part in parts:
        letters[part.state_on(device)].append(part.part.part)
    found = {state: names for state, names in letters.items() if names}
    if len(found) == 1:
        return str(*found)
    return ", ".join(f"{state} ({', '.join(names)})" for state, names in found.items())


@dataclass
class Document:
    problems: list[ProblemResult]
    registry: Registry  # records behind the tables and answers
    folders: list[str]  # paths of the results folders
    notes: list[str]  # on results that could not be read
    left_out: int = 0  # number of problems without results

    @property
    def is_own(self) -> bool:
        """Whether all results are of sweeps of which no problem shows anything."""
        return [each.problem.id for each in self.problems] == [OWN_SWEEPS]

    @property
    def title(self) -> str:
        if self.is_own:
            return "Measured results"
        return "Systems for language models: the problems and their measured answers"

    @property
    def left_out_text(self) -> str:
        """A sentence with the number of problems without results. "" if there are none."""
        problems = counted(self.left_out, "problem")
        text = f"Left out: {problems} of which these folders have no results."
        return text if self.left_out else ""

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
        states = [part.state_on(device) for part in parts]
        return {state: states.count(state) for state in State}
