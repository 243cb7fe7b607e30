"""Spellings of references to code outside this project, such as `my_kernels/flash.py:MyFlash`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jobs.run import Run, varying
from systems.external.reference import BadReference, Reference, is_reference


def short_names(references: Iterable[str], shown: Iterable[Any]) -> dict[str, str]:
    """Return an unambiguous short name for each reference that is among the `shown` values.

    The short name of `my_kernels/flash.py:MyFlash` is `MyFlash`, or the shortest ending that no
    other shown value has, such as `flash.py:MyFlash`.
    """
    endings = {reference: _endings(reference) for reference in references}
    if not endings:
        return {}
    values = {value for value in shown if isinstance(value, str)}
    # A value that is not a reference has no endings besides itself.
    taken = [ending for value in values for ending in endings.get(value, [value])]
    return {
        reference: next((ending for ending in own if taken.count(ending) == 1), reference)
        for reference, own in endings.items()
        if reference in values
    }


def run_labels(runs: list[Run], default: list[str] | None = None) -> Callable[[Run], str]:
    """Return a function that labels a run by the parameters whose values differ between runs.

    If no value differs, they are those in `default`, or all. References have their short names.
    """
    names = varying(runs) or default
    references = {reference for run in runs for reference in run.code}
    short = short_names(references, (value for run in runs for value in run.params.values()))
    return lambda run: run.label(names, short)


def _endings(reference: str) -> list[str]:
    """Return the name of a reference, then longer endings, then the whole reference."""
    source, _, name = reference.rpartition(":")
    is_file = source.endswith(".py")
    starts = [match.end() for match in re.finditer(r"/" if is_file else r"\.", source)]
    sources = [source[start:] for start in reversed([0, *starts])]
    return [name, *(f"{ending}:{name}" for ending in sources)]


def as_in_runs(value: Any) -> Any:
    """Return a value of a sweep file as runs contain it: `flash.py:Mine` for `./flash.py:Mine`."""
    try:
        return str(Reference.parse(value)) if is_reference(value) else value
    except BadReference:
        return value
