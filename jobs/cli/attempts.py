"""The command `attempts`: list all attempts of the runs in a results folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.completion import results_folders
from jobs.cli.consoles import plain_console
from jobs.cli.find import read_folder
from jobs.cli.parsers import as_path
from jobs.cli.where import Where, matching
from jobs.report.attempts import attempt_columns, attempts_of
from jobs.report.tables.render import ListFormat, render_columns

EXAMPLES = "logs/flash --where 'seq_len == 1024'"


def attempts(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Results folder, such as logs/flash.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ],
    where: Where = None,
    output_format: Annotated[
        ListFormat, typer.Option("--format", help="Output format of the list.")
    ] = ListFormat.md,
) -> None:
    """List all attempts of the runs in a results folder, with their median times.

    An attempt is one execution of a run. The column 'shown' tells whether tables show it, and 'why'
    gives the reason. With --where, the status is that of the attempt.
    """
    observation = read_folder(folder)
    for line in map(str, observation.bad_lines):
        print(f"note: {line}", file=sys.stderr)
    every = replace(observation, tasks=attempts_of(observation))
    chosen = matching(every, where).tasks
    if chosen:
        columns = attempt_columns(observation, chosen)
        print(render_columns(columns, output_format, plain_console().width), end="")
    else:
        what = "the folder has no attempts" if where is None else f"no attempt satisfies {where!r}"
        print(f"note: {what}", file=sys.stderr)
