"""Renders the template of the text under a table, with numbers from the records.

A number that is not there, because its run failed or is missing, is `not measured`: a report can be
made whatever became of its runs. An unknown name is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from jobs.errors import TableError, nearest
from jobs.report.metrics import measured_phases, metric_named, phases_with
from jobs.report.pivot import Cell
from jobs.report.results import Result
from jobs.report.views import select_results
from jobs.results.run_states import Observation
from jobs.status import Status
from jobs.sweep.schema import Table
from jobs.sweep.text_language import (
    BESIDE_PARAMETERS,
    Compared,
    NotMeasured,
    TextFunctions,
    ambiguity,
    environment,
    format_params,
    value_problem,
)

_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
)  # by what a text says  # fmt: skip


def render_text(
    observation: Observation, view: Table, results: list[Result], warn: Callable[[str], None]
) -> str:
    """Render a table's text.

    Args:
        results: all those of the folder; the table's own `where` does not hold for its text.
        warn: is called with what whoever makes the report should know, such as a run that no sweep
            of the folder has.

    Raises:
        TableError: an unknown name, or several runs where one is wanted.
    """
    own = select_results(observation, view.model_copy(update={"where": None}), results)
    try:
        template = environment().from_string(view.text or "")
        return template.render(_Numbers(own, warn).by_name).strip()
    except Compared:
        return "Not all of what this text compares is measured."
    except TemplateSyntaxError as error:
        raise TableError(f"text: line {error.lineno}: {error.message}") from error
    except _RAISED as error:
        raise TableError(f"text: {_line_of(error)}{error}") from error


def _line_of(error: Exception) -> str:
    """The line of the text that raised an error."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":  # as Jinja names a text
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


class _Numbers(TextFunctions):
    """Answers a text's functions from results."""

    def __init__(self, results: list[Result], warn: Callable[[str], None]):
        self.results = results
        self.warn = warn

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        problem = value_problem(name, statistic, unit)
        if problem:
            raise TableError(problem)
        cell = Cell(metric_named(name, unit))
        for result in self._find(f"value({name!r})", params):
            cell.add(result, self._phase(name, result, phase))
        number = cell.number(statistic)
        if number is None:
            texts = [text for text in cell.texts if text != "–"]
            return texts[0] if texts else NotMeasured()
        return number

    def state(self, **params: Any) -> str:
        states = [result.status for result in self._find("state()", params)]
        return "ok" if "ok" in states else (states or [Status.missing])[0]

    def _phase(self, name: str, result: Result, given: str | None) -> str:
        """The phase that is given, or else the only one for which a run has this value."""
        measured = result.measurements
        if measured is None or not metric_named(name).has_phases:
            return given or ""
        if given:
            has = measured_phases(measured)
            if given not in has:
                self.warn(f"text: value({name!r}): no phase {given!r}{nearest(given, has)}")
            return given
        found = phases_with(measured, name)
        if len(found) > 1:
            raise TableError(f"value({name!r}): which phase? there are {', '.join(found)}")
        return found[0] if found else ""

    def _find(self, call: str, params: dict[str, Any]) -> list[Result]:
        """The repeats of the one run that has these parameters; none where no run has."""
        known = [
            *dict.fromkeys(key for result in self.results for key in result.run.params),
            *BESIDE_PARAMETERS,
        ]
        for name in params:
            if name not in known:
                raise TableError(f"{call}: no parameter {name!r}{nearest(name, known)}")
        found = [
            result
            for result in self.results
            if all(result.coordinate(name) == given for name, given in params.items())
        ]
        if not found:
            self.warn(f"text: {call}: no run has {format_params(params)}")
        runs = list({result.run.id: result.run for result in found}.values())
        problem = ambiguity(runs, params, [result.device for result in found])
        if problem:
            raise TableError(f"{call}: {problem}")
        return found
