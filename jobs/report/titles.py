"""Titles of tables and plots, in which `{NAME}` stands for the values of a parameter."""

from __future__ import annotations

from jobs.formatting import format_scalar
from jobs.report.results import Result
from jobs.report.views import declared_order, select_results, sort_keys
from jobs.results.run_states import Observation
from jobs.sweep.schema import Plot, Table, names_in_title


def title_of(observation: Observation, view: Table | Plot, results: list[Result]) -> str:
    """Return the title of a table or plot in one line, with the values of the runs that it shows.

    A parameter that the runs do not have stays as it is: in results of an earlier version of the
    sweep file, braces may have had no meaning.

    Raises:
        TableError: see `select_results`.
    """
    title = " ".join((view.title or "").split()) or view.name
    names = names_in_title(title)
    if not names:
        return title
    shown, _ = select_results(observation, view, results)
    order = declared_order(observation, shown, [])
    for name in names:
        values = {(result.run.params[name],) for result in shown if name in result.run.params}
        if values:
            texts = [format_scalar(value) for (value,) in sort_keys(values, [name], order)]
            title = title.replace(f"{{{name}}}", ", ".join(texts))
    return title
