"""Renders the answers of the document, with numbers from the records and from arithmetic.

An answer is a Markdown text with the names of numbers, each of which has one definition:

    numbers:
      at: {size: xl, precision: fp32}
      forward: value("time", "forward", **at)
    answer: Forward takes {{ forward | n(3) }} ms.

    value(NAME, PHASE, ...)      metric of a run, see `AnswerLookups.value`
    state(...), published(...)   status of a run; figure that other authors published
    n, pct                       filters that format a number, or a fraction as a percentage
    sweep=NAME, benchmark=NAME   look into another study, or at the runs of one benchmark
    speed(...)                   paired speedup of two runs with its interval
    items(...)                   list that a run returned, with key=FIELD as a dict by this field
    failure(...)                 how a run failed
    accounting.NAME(...)         functions of `systems.accounting`
    device                       kind of GPU, None without results
    sci, commas                  filters that format small numbers, and large ones such as 16,384
    kernel                       filter that names a matmul kernel as people do

A list in place of a value gives a `Family` of results: value("time", size=["small", "xl"]).small is
that of size small. A paragraph with a number that was not measured is left out. A statement of
Jinja begins and ends in one paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from jobs.errors import TableError
from jobs.formatting import counted, format_number
from jobs.writeup.language import Missing, NotMeasured, by_lists, of_values
from jobs.writeup.lookups import AnswerLookups, published
from jobs.writeup.matmul_names import matmul_name
from jobs.writeup.problem import Part
from jobs.writeup.studies import Registry, Study
from jobs.writeup.traced import Recorded, Traced, escaped, marked
from systems import accounting

# Exceptions that the expressions of a template can raise.
_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
)  # fmt: skip


@dataclass
class Answer:
    """A rendered answer, with marks around its measured numbers (see `jobs.writeup.traced`)."""

    text: str
    basis: str = ""  # device, processes, GPUs, commits and spread behind the numbers
    found: int = 0  # number of looked-up values that were measured
    missing: int = 0  # number of looked-up values that were not measured
    impossible: int = 0  # number of those of runs that ended as oom or unsupported
    stale: int = 0  # number of records behind the answer that are of older code
    problem: str = ""  # why the template could not be rendered

    @property
    def notes(self) -> list[str]:
        """Notes on what the numbers rest. Empty if there are none."""
        older = f"; {counted(self.stale, 'record')} of older code" if self.stale else ""
        return [each for each in (self.wrong, self.basis and self.basis + older) if each]

    @property
    def wrong(self) -> str:
        """A sentence on a mistake in the template. "" if there is none."""
        return f"The answer cannot be written: {self.problem}" if self.problem else ""


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs of a text, each with the list or table that it announces."""
    return re.split(r"(?<!:)\n\s*\n", text)


def render_answer(
    part: Part, study: Study | None, studies: Mapping[str, Study], device: str, registry: Registry
) -> Answer:
    """Render an answer with the results of one kind of device.

    Args:
        part: its numbers are evaluated in their order, then its answer is rendered.
        study: study of the part. None: the answer needs no records, or there are none.
        studies: those of this kind of device by name.
        device: kind of GPU. Empty: there are no results.
    """
    lookups = AnswerLookups(study, studies, registry)
    known: dict[str, Any] = {
        "value": by_lists(lookups.value),
        "state": by_lists(lookups.state),
        "speed": by_lists(lookups.speed),
        "items": by_lists(lookups.items),
        "failure": by_lists(lookups.failure),
        "published": by_lists(published),
        "accounting": _accounting(lookups),
        "device": device or None,
    }
    text = problem = where = ""
    try:
        for name, given in part.numbers.items():
            where = f"{name}: "
            if name in known or name in _JINJA.globals:
                raise ValueError("this name is taken")
            known[name] = given if isinstance(given, dict) else _evaluated(given, known)
        where = ""
        text = _complete(part.answer, known)
    except _RAISED as error:
        problem = f"{where}{error}"
    return Answer(
        text,
        basis=lookups.basis(),
        found=lookups.found,
        missing=lookups.missing + bool(problem),
        impossible=lookups.impossible,
        stale=lookups.stale(),
        problem=problem,
    )


def _evaluated(expression: str, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression. It is missing if a number that it needs is."""
    try:
        return _JINJA.compile_expression(expression, undefined_to_none=False)(known)
    except NotMeasured:
        return Missing()


def _complete(text: str, known: Mapping[str, Any]) -> str:
    """Return the paragraphs of a template that have all of their numbers."""
    complete = []
    for paragraph in paragraphs_of(text):
        with suppress(NotMeasured):
            complete.append(_JINJA.from_string(paragraph).render(known).strip())
    return "\n\n".join(complete)


def _filter(text_of: Callable[[Any, int], str], digits: int) -> Callable[..., str]:
    """Return a filter that formats a number, by default with some digits, and marks its records."""

    def shown(value: Any, digits: int = digits) -> str:
        text = text_of(value, digits) if isinstance(value, (int, float)) else str(value)
        if isinstance(value, Traced):
            return marked(text, value.records)
        return escaped(text) if isinstance(value, Recorded) else text

    return shown


_n = _filter(format_number, 4)
_JINJA = Environment(
    undefined=StrictUndefined,
    finalize=lambda value: _n(value) if isinstance(value, (float, Recorded)) else value,
)
_JINJA.globals = {"max": of_values(max), "min": of_values(min)}
_JINJA.filters |= {
    "n": _n,
    "pct": _filter(lambda number, digits: f"{format_number(100 * number, digits)}%", 3),
    "commas": _filter(lambda number, _: f"{number:,.0f}", 0),
    "sci": _filter(lambda number, digits: f"{number:.{digits - 1}e}", 2),
    "kernel": matmul_name,
}


def _accounting(lookups: AnswerLookups) -> SimpleNamespace:
    """Return the public names of `systems.accounting`, for templates.

    What a function does not know, such as the bandwidth of an unknown GPU, is a missing number.
    """

    def known(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return lookups.missing_number() if found is None else found

    names = SimpleNamespace()
    for name, found in vars(accounting).items():
        if not name.startswith("_"):
            is_function = isinstance(found, FunctionType)
            setattr(names, name, partial(known, found) if is_function else found)
    return names
