"""The command `compare`: compare measured times of one or two results folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.arguments import RESULTS, WhereParams, flag
from jobs.cli.observed import observed
from jobs.cli.output import note, width
from jobs.cli.where import matching_runs
from jobs.report.compare_text import csv_comparison, latex_comparison, markdown_comparison
from jobs.report.tables.render import Format
from jobs.results.run_states import observe
from jobs.results.stale import with_stale
from jobs.run import Run
from jobs.verdicts.compare import compare_blocks, compare_folders

EXAMPLES = """
logs/flash --where 'seq_len > 4096'
logs/before logs/after
"""


def as_margin(text: str) -> float:
    """Return a margin from the command line."""
    with suppress(ValueError):
        if 0 < (margin := float(text)) < 1:  # False for NaN
            return margin
    raise typer.BadParameter(
        f"must be more than 0 and less than 1, such as 0.01 for 1%, got {text!r}"
    )


def compare(
    before: Annotated[
        Path | None,
        typer.Argument(
            metavar="BEFORE",
            help="Results folder. Without AFTER, runs are compared with baselines of blocks. "
            "[default: the folder of the last accepted submission]",
            **RESULTS,
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Argument(metavar="AFTER", help="Results folder to compare with BEFORE.", **RESULTS),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            "--tolerance",
            metavar="FLOAT",
            parser=as_margin,
            help="Relative difference of equal times. [default: blocks.margin, or 0.01]",
        ),
    ] = None,
    where: WhereParams = None,
    output_format: Annotated[
        Format,
        typer.Option("--format", help="Output format. csv lists all cells, with exact numbers."),
    ] = "md",
    every: Annotated[
        bool, flag("--all", "Also list cells that are new, gone or not measured.")
    ] = False,
) -> None:
    """Compare measured times, by run and phase.

    With one folder, each run is compared with the baseline of its block: another implementation,
    or another version of the code (--against). The verdict comes from the ratios of the rounds:
    faster or slower (significant at 0.5%), same (within the margin, by two one-sided tests at 5%),
    or unsure. The last lines give the command that measures more rounds of unsure blocks.

    With two folders, AFTER is compared with BEFORE, run by run. They were not measured in turn, so
    a difference must also exceed a floor of about 5% on the same GPUs, 7% on others, and 25% on
    CPUs or if runs have no repeats. What differs between the folders is printed above the table.

    Runs that failed more often than they were measured are broken. Runs without times to compare
    are wrong, fixed, new, gone or not measured, see docs/verdicts.md.

    Exit code: 0 if no time is slower by more than the margin, with 95% confidence; 1 if one is,
    after the adjustment for the number of cells (Holm), or if a cell is broken or wrong; 2 if the
    input is invalid; 3 otherwise.
    """
    if before is None or after is None:
        seen = with_stale(observed(before, tell=True))
        found = compare_blocks(seen, margin, _chosen(seen.runs, where))
        note(*seen.bad_lines, *seen.notes)
    else:
        old, new = observe(before.resolve()), observe(after.resolve())
        found = compare_folders(old, new, margin, _chosen(old.runs | new.runs, where))
        for seen in (old, new):
            note(*(f"{seen.folder}: {text}" for text in (*seen.bad_lines, *seen.notes)))
    if output_format == "csv":
        print(csv_comparison(found))
    elif output_format == "latex":
        print(latex_comparison(found, every))
    else:
        print(markdown_comparison(found, every, width()))
    raise SystemExit(found.exit_code)


def _chosen(runs: dict[str, Run], where: str | None) -> set[str] | None:
    return None if where is None or not runs else matching_runs(list(runs.values()), where)
