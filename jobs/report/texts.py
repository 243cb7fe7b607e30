"""Texts with their numbers: the template under a table, rendered from the records.

What is not there (a run that failed, or is missing) is `not measured`, so a report stands whatever
became of its runs. A wrong name is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from jobs.errors import TableError, nearest
from jobs.observation import Observation
from jobs.report.entries import Entry, coordinate, selected
from jobs.report.tables import Cell
from jobs.report.values import measured_phases, phases, value_named
from jobs.status import Status
from jobs.sweep.schema import Table
from jobs.sweep.text_language import (
    BESIDE_PARAMETERS,
    Compared,
    NotMeasured,
    TextFunctions,
    environment,
    pairs,
    several_runs,
    wrong_value,
)

_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
)  # by what stands in a text  # fmt: skip


def render_text(
    observation: Observation, view: Table, chosen: list[Entry], warn: Callable[[str], None]
) -> str:
    """A table's text with its numbers.

    Args:
        chosen: every run of the folder; the table's own `where` does not hold for its text.
        warn: is called with what whoever makes the report should know, such as a run that no sweep
            of the folder has.

    Raises:
        TableError: a name that is not known, or several runs where one is wanted.
    """
    runs = selected(observation, view.model_copy(update={"where": None}), chosen)
    try:
        template = environment().from_string(view.text or "")
        return template.render(_Numbers(runs, warn).by_name).strip()
    except Compared:
        return "Not all of what this text compares is measured."
    except TemplateSyntaxError as error:
        raise TableError(f"text: line {error.lineno}: {error.message}") from error
    except _RAISED as error:
        raise TableError(f"text: {_line_of(error)}{error}") from error


def _line_of(error: Exception) -> str:
    """Which line of the text raised an error."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":  # as Jinja names a text
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


class _Numbers(TextFunctions):
    """What a text may ask of the records."""

    def __init__(self, runs: list[Entry], warn: Callable[[str], None]):
        self.runs = runs
        self.warn = warn

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """A number, as a table with this value shows it, of the one run with these parameters."""
        wrong = wrong_value(name, statistic, unit)
        if wrong:
            raise TableError(wrong)
        cell = Cell(value_named(name, unit))
        for entry in self._pick(f"value({name!r})", params):
            cell.add(entry, self._phase(name, entry, phase))
        number = cell.number(statistic)
        if number is None:
            texts = [text for text in cell.texts if text != "–"]
            return texts[0] if texts else NotMeasured()
        return number

    def state(self, **params: Any) -> str:
        """What became of the one run with these parameters: ok where any repeat is."""
        states = [entry.state for entry in self._pick("state()", params)]
        return "ok" if "ok" in states else (states or [Status.missing])[0]

    def _phase(self, name: str, entry: Entry, given: str | None) -> str:
        """The phase that is given, or else the only one that a run has this value for."""
        measured = entry.record.measurements if entry.record else None
        if measured is None or not value_named(name).has_phases:
            return given or ""
        if given:
            has = measured_phases(measured)
            if given not in has:
                self.warn(f"text: value({name!r}): no phase {given!r}{nearest(given, has)}")
            return given
        found = phases(measured, name)
        if len(found) > 1:
            raise TableError(f"value({name!r}): which phase? there are {', '.join(found)}")
        return found[0] if found else ""

    def _pick(self, asked: str, params: dict[str, Any]) -> list[Entry]:
        """The repeats of the one run that has these parameters; none where no run has."""
        known = [
            *dict.fromkeys(key for entry in self.runs for key in entry.run.params),
            *BESIDE_PARAMETERS,
        ]
        for name in params:
            if name not in known:
                raise TableError(f"{asked}: no parameter {name!r}{nearest(name, known)}")
        found = [
            entry
            for entry in self.runs
            if all(coordinate(entry, name) == given for name, given in params.items())
        ]
        if not found:
            self.warn(f"text: {asked}: no run has {pairs(params)}")
        runs = list({entry.run.id: entry.run for entry in found}.values())
        several = several_runs(runs, params, [entry.device for entry in found])
        if several:
            raise TableError(f"{asked}: {several}")
        return found
