"""Renders the answers of the document, with numbers from the records and from arithmetic.

An answer is a Markdown text with the names of numbers, each of which has one definition:

    numbers:
      at: {size: xl, precision: fp32}
      forward: value("time", "forward", **at)
    answer: Forward takes {{ forward | n(3) }} ms.

    value(NAME, PHASE, ...)      metric of a run, see `jobs.writeup.cell_lookup`
    state(...), published(...)   status of a run; figure that other authors published
    n, pct                       filters that format a number, or a fraction as a percentage
    sweep=NAME, benchmark=NAME   look into another study, or at the runs of one benchmark
    speed(...)                   paired speedup of two runs with its interval
    by(PARAMETER, VALUES, ...)   `value` for each value of a parameter, see `Family`; with of=speed
                                 or of=state, that function
    items(...)                   list that a run returned
    failure(...)                 how a run failed
    accounting.NAME(...)         functions of `systems.accounting`
    sizes, device, devices       names of the models; kind of GPU, None without results; all kinds
    sci                          filter that formats small numbers
    kernel                       filter that names a matmul kernel as people do

A paragraph with a number that was not measured is left out. A statement of Jinja begins and ends in
one paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

from jinja2 import Environment, TemplateError

from jobs.errors import TableError
from jobs.formatting import counted, format_number
from jobs.writeup.language import Missing, NotMeasured, environment
from jobs.writeup.lookups import AnswerLookups
from jobs.writeup.matmul_names import matmul_name
from jobs.writeup.problem import Part
from jobs.writeup.studies import Registry, Studies, Study
from jobs.writeup.traced import Recorded, shown
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
    part: Part,
    study: Study | None,
    studies: Studies,
    device: str,
    registry: Registry,
) -> Answer:
    """Render an answer with the results of one kind of device.

    Args:
        part: its numbers are evaluated in their order, then its answer is rendered.
        study: study of the part. None: the answer needs no records, or there are none.
        device: kind of GPU. Empty: there are no results.
    """
    answer = Answer("")
    lookups = AnswerLookups(study, studies.get(device, {}), registry)
    jinja = environment()
    jinja.filters |= {"n": _n, "pct": _pct, "sci": _sci, "kernel": matmul_name}
    jinja.finalize = lambda value: _n(value) if isinstance(value, (float, Recorded)) else value
    known: dict[str, Any] = {
        **lookups.functions,
        "accounting": _accounting(lookups),
        "sizes": list(accounting.MODEL_SIZES),
        "device": device or None,
        "devices": list(studies),
    }
    where = ""
    try:
        for name, given in part.numbers.items():
            where = f"{name}: "
            if name in known or name in jinja.globals:
                raise ValueError("this name is taken")
            known[name] = given if isinstance(given, dict) else _evaluated(jinja, given, known)
        where = ""
        answer.text = _complete(jinja, part.answer, known)
    except _RAISED as error:
        answer.problem = f"{where}{error}"
        answer.missing += 1
    answer.found, answer.impossible = lookups.found, lookups.impossible
    answer.missing += lookups.missing
    answer.basis = lookups.basis()
    answer.stale = lookups.stale()
    return answer


def _evaluated(jinja: Environment, expression: str, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression. It is missing if a number that it needs is."""
    try:
        return jinja.compile_expression(expression, undefined_to_none=False)(known)
    except NotMeasured:
        return Missing()


def _complete(jinja: Environment, text: str, known: Mapping[str, Any]) -> str:
    """Return the paragraphs of a template that have all of their numbers."""
    complete = []
    for paragraph in paragraphs_of(text):
        with suppress(NotMeasured):
            complete.append(jinja.from_string(paragraph).render(known).strip())
    return "\n\n".join(complete)


def _n(number: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits and mark its records."""
    return _shown(number, lambda: format_number(number, digits))


def _pct(number: Any, digits: int = 3) -> str:
    """Format a fraction as a percentage and mark its records."""
    return _shown(number, lambda: f"{format_number(100 * number, digits)}%")


def _sci(number: Any, digits: int = 2) -> str:
    """Format a small number with an exponent, such as 2.3e-06, and mark its records."""
    return _shown(number, lambda: f"{number:.{digits - 1}e}")


def _shown(value: Any, text_of: Callable[[], str]) -> str:
    return shown(value, text_of() if isinstance(value, (int, float)) else str(value))


def _accounting(lookups: AnswerLookups) -> SimpleNamespace:
    """Return the public names of `systems.accounting`, for templates.

    What a function does not know, such as the bandwidth of an unknown GPU, is a missing number.
    """

    def known(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_known(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            return lookups.missing_number() if found is None else found

        return of_known

    public = {name: found for name, found in vars(accounting).items() if not name.startswith("_")}
    functions = {name: known(f) for name, f in public.items() if isinstance(f, FunctionType)}
    return SimpleNamespace(**(public | functions))
