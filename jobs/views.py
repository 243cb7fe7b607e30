"""The checks of tables and plots for which a sweep's runs must be known.

The tables of a results folder are those of its submission: what only the report would find costs
another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jobs.conditions import Condition, ConditionError
from jobs.published import published_columns
from jobs.schema import Plot, Table, TableError
from jobs.strict_yaml import Path

if TYPE_CHECKING:
    from jobs.expand import Run


def view_problems(view: Table | Plot, runs: Sequence[Run]) -> Iterator[tuple[Path, str]]:
    """What is wrong with a view of these runs, all of its benchmark; each with its place in it.

    Its `where` can be evaluated for every run; a published figure, and what a text asks for, is of
    one run only.
    """
    if not runs:  # the filter left none: nobody knows the parameters, and nothing is shown
        return
    shown = list(runs)
    if view.where is not None:
        condition = Condition(view.where, sorted({name for run in runs for name in run.params}))
        try:
            shown = [run for run in runs if condition(run.params)]
        except ConditionError as error:
            yield ("where",), str(error)
    if isinstance(view, Table):
        yield from _ambiguous_figures(view, shown)
        yield from _ambiguous_text(view, runs)


def _ambiguous_figures(table: Table, runs: Sequence[Run]) -> Iterator[tuple[Path, str]]:
    for i, source in enumerate(table.published if runs else ()):
        dims = [name for name in table.rows if name in runs[0].params]
        keys = dict.fromkeys(tuple(run.params[name] for name in dims) for run in runs)
        try:
            published_columns(source, dims, list(keys))
        except TableError as error:
            yield ("published", i), str(error)


def _ambiguous_text(table: Table, runs: Sequence[Run]) -> Iterator[tuple[Path, str]]:
    if table.text is not None:
        from jobs.texts import ambiguities  # with what reads records: only where needed

        yield from ((("text",), what) for what in ambiguities(table.text, list(runs)))
