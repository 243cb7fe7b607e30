"""The command `attempts`: list all attempts of the runs in a results folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from jobs.cli.arguments import Folder, Where
from jobs.cli.observed import observed
from jobs.cli.output import note, width
from jobs.cli.where import matching
from jobs.report.attempts import attempt_columns, attempts_of
from jobs.report.tables.markdown import markdown_table
from jobs.report.tables.render import ListFormat, csv_table

EXAMPLES = "logs/flash --where 'seq_len == 1024'"


def attempts(
    folder: Folder = None,
    where: Where = None,
    output_format: Annotated[
        ListFormat, typer.Option("--format", help="Output format of the list.")
    ] = "md",
) -> None:
    """List all attempts of the runs in a results folder, with their median times.

    An attempt is one execution of a run. The column 'shown' tells whether tables show it, and 'why'
    gives the reason. With --where, the status is that of the attempt.
    """
    observation = observed(folder, tell=True)
    note(*observation.bad_lines)
    every = replace(observation, tasks=attempts_of(observation))
    chosen = matching(every, where).tasks
    if chosen:
        columns = attempt_columns(observation, chosen)
        as_csv = output_format == "csv"
        print(csv_table(columns) if as_csv else markdown_table(columns, "left", width()))
    else:
        note("the folder has no attempts" if where is None else f"no attempt satisfies {where!r}")
