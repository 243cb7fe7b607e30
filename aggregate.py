"""Print the tables of a results folder and draw its plots, or compare measured times.

python aggregate.py logs/flash [--format md|csv|latex|html] [--plot DIR]
python aggregate.py attempts logs/flash
python aggregate.py compare logs/flash
python aggregate.py compare logs/before logs/after
python aggregate.py export logs/flash --out flash.parquet
"""

from __future__ import annotations

if __name__ == "__main__":
    from systems.terminal import exit_on_interrupt

    exit_on_interrupt()  # before the imports below, which take longer

import gc
import sys
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from jobs.command_line.completion import results_folders, sweep_files
from jobs.command_line.invocation import command, of_another_module
from jobs.command_line.parsers import as_fraction, as_path
from jobs.command_line.plain_console import plain_console
from jobs.commands.where import Where, matching, matching_runs
from jobs.errors import CommandError, InputError, TableError
from jobs.formatting import relative
from jobs.frame.file import unusable_file, write_csv, write_frame
from jobs.frame.results import Result, list_results
from jobs.report.attempts import attempt_columns, attempts_of
from jobs.report.compare_text import csv_comparison, markdown_comparison
from jobs.report.images import Image, copy_run_images, draw_plots
from jobs.report.tables.render import Format, ListFormat, markdown_image, render, render_columns
from jobs.report.tables.report_table import make_report_table
from jobs.report.texts.templates import StudyTexts
from jobs.report.views import plots_of, tables_of
from jobs.results.run_states import Observation, observe
from jobs.results.stale import with_stale
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run
from jobs.sweep.benchmarks import short_name
from jobs.sweep.load import load_sweep
from jobs.sweep.schema import Sweep
from jobs.user_files import not_a_folder
from jobs.verdicts.compare import compare_blocks, compare_folders, require_margin
from jobs.verdicts.folder_cells import read_side
from jobs.verdicts.short_records import read_short
from systems.terminal import run_command


class By(StrEnum):
    run = "run"
    process = "process"


class TablesByDefault(TyperGroup):
    """Command group with `tables` as the default command.

    `aggregate.py logs/flash` is short for `aggregate.py tables logs/flash`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args[:1] == ["--help"] or (args and args[0] in self.commands)
        wrong = of_another_module(args[0], self.commands) if args else None
        if wrong and not Path(args[0]).is_dir():
            ctx.fail(wrong)
        if args == ["tables"] and Path("tables").is_dir():  # a results folder, not the command
            named = False
        return super().parse_args(ctx, args if named else ["tables", *args])


app = typer.Typer(
    cls=TablesByDefault,
    add_completion=False,
    rich_markup_mode=None,
    subcommand_metavar="[tables] FOLDER | attempts FOLDER | compare FOLDER | "
    "compare BEFORE AFTER | export FOLDER...",
    help="Print the tables or the attempts of a results folder, compare measured times, or write "
    "all results to a CSV or Parquet file.",
    epilog="Examples: python aggregate.py logs/flash --format latex --plot plots; "
    "python aggregate.py attempts logs/flash; python aggregate.py compare logs/flash; "
    "python aggregate.py export logs/flash --out flash.parquet",
)


@app.command(epilog="Example: python aggregate.py logs/flash --format latex --plot plots")
def tables(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Results folder, such as logs/flash.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ],
    output_format: Annotated[
        Format, typer.Option("--format", help="Output format of the tables.")
    ] = Format.md,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Folder for images: the plots of the sweep, and copies of the PNG files that runs "
            "produced. Markdown output links to the images.",
            parser=as_path,
        ),
    ] = None,
    table: Annotated[str | None, typer.Option(help="Print only the table with this name.")] = None,
    sweep_file: Annotated[
        Path | None,
        typer.Option(
            "--views",
            metavar="SWEEP",
            help="Sweep file that declares the tables and plots. [default: the sweep of the "
            "folder's latest submission]",
            parser=as_path,
            autocompletion=sweep_files,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="TEMPLATE",
            help="Jinja2 template with the texts to print below the tables, one block per table. "
            "Example: examples/quickstart_texts.md.j2.",
            parser=as_path,
        ),
    ] = None,
) -> None:
    """Print the tables of a results folder. Failed and missing runs are shown with their status."""
    if plot is not None and (file := not_a_folder(plot)):
        _fail(f"--plot must be a folder, got the file {str(file)!r}")
    observation = with_stale(_observe(folder))
    sweep = observation.manifests[-1].sweep if sweep_file is None else _load(sweep_file)
    results = list_results(observation)
    texts = None if text is None else _read_texts(text, sweep)
    _print_tables(observation, sweep, results, table, output_format, texts)
    for line in (*map(str, observation.bad_lines), *observation.notes):
        print(f"note: {line}", file=sys.stderr)
    others = dict.fromkeys(name for each in observation.manifests for name in each.checkouts)
    if others:
        see = f"{command('compare')} {relative(observation.folder)}"
        print(f"note: the runs of {', '.join(others)} are not in tables: {see}", file=sys.stderr)
    if plot is not None:
        images = _collect_images(observation, sweep, results, plot)
        if output_format is Format.md and images:
            print("\n\n".join(markdown_image(image, plot) for image in images))


def _print_tables(
    observation: Observation,
    sweep: Sweep,
    results: list[Result],
    only: str | None,
    output_format: Format,
    texts: StudyTexts | None,
) -> None:
    views = tables_of(sweep)
    if only is not None:
        views = [view for view in views if view.name == only]
        if not views:
            known = ", ".join(view.name for view in sweep.tables) or "none"
            _fail(f"--table: sweep {sweep.name} has no table {only!r} (valid: {known})")
    for view in views:
        try:
            for_programs = output_format is Format.csv
            table = make_report_table(observation, view, results, for_programs)
            if table is not None and texts is not None:
                table.text = texts.render(observation, view, results, table.warnings.append)
        except TableError as error:
            _fail(f"sweep {sweep.name}, table {view.name}: {error}")
        if table is None:
            here = short_name(str(view.benchmark)) in {r.run.benchmark for r in results}
            which = (
                f"satisfies the condition {view.where!r}"
                if here
                else f"has benchmark {view.benchmark!r}"
            )
            print(f"note: table {view.name} is empty: no run {which}", file=sys.stderr)
            continue
        for warning in table.warnings:
            print(f"note: table {view.name}: {warning}", file=sys.stderr)
        print(render(table, output_format, plain_console().width), end="\n\n")


def _collect_images(
    observation: Observation, sweep: Sweep, results: list[Result], folder: Path
) -> list[Image]:
    """Draw the plots of the sweep, copy the PNG files of runs, and print all paths to stderr."""
    try:
        drawn = draw_plots(observation, plots_of(sweep), folder, results)
        declared = [f"{plot.name}.png" for plot in sweep.plots]
        images = drawn + copy_run_images(observation, results, folder, declared)
    except TableError as error:
        _fail(f"sweep {sweep.name}, plots: {error}")
    except OSError as error:
        _fail(f"--plot {folder}: {error.strerror}: {error.filename}")
    for name in declared:
        if name not in [image.path.name for image in drawn]:
            plot = name.removesuffix(".png")
            print(f"note: plot {plot} is not drawn: no run has a value for it", file=sys.stderr)
    for image in images:
        print(image.path, file=sys.stderr)
    if not images and not declared:
        print(f"note: sweep {sweep.name} has no plots, and no run produced images", file=sys.stderr)
    return images


@app.command(
    epilog="Example: python aggregate.py attempts logs/flash --where 'seq_len == 1024'",
)
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
    observation = _observe(folder)
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


@app.command(
    "compare",
    epilog="Example: python aggregate.py compare logs/flash --where 'seq_len > 4096'",
)
def compare_times(
    before: Annotated[
        Path,
        typer.Argument(
            help="Results folder. If it is the only one, its runs are compared with the baselines "
            "of their blocks.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ],
    after: Annotated[
        Path | None,
        typer.Argument(
            help="Results folder to compare with BEFORE.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            "--tolerance",
            metavar="FLOAT",
            parser=as_fraction,
            help="Relative difference up to which two times count as the same. [default: "
            "blocks.margin of the sweep, or 0.01]",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Only the runs that satisfy this condition, for example 'seq_len > 4096'. It may "
            "contain parameters and benchmark. [default: all runs]",
        ),
    ] = None,
    output_format: Annotated[
        ListFormat,
        typer.Option("--format", help="Output format. csv lists all cells, with exact numbers."),
    ] = ListFormat.md,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list cells that are new, gone or not measured.",
        ),
    ] = False,
) -> None:
    """Compare measured times, by run and phase.

    With one folder, each run is compared with the baseline of its block: another implementation,
    or another version of the code (--against). The verdict comes from the ratios of the rounds:

    faster, slower: the difference is significant at 0.5% and larger than that of the same code.

    same: the ratio is within the margin, by two one-sided tests at 5%.

    unsure: neither. If such a run may be slower by more than the margin, the last lines give the
    command that measures more rounds of its block.

    With two folders, AFTER is compared with BEFORE, run by run. They were not measured in turn, so
    a difference must also exceed a floor of about 5% on the same GPUs, 7% on others, and 25% if
    runs have no repeats. What differs between the folders is printed above the table: GPUs,
    versions, code and clocks.

    There are other verdicts for runs and phases without times to compare:

    broken: measured before; after, it failed or has no record.

    wrong: an attempt after, with the code that is compared, was wrong.

    fixed: the reverse of broken or wrong.

    new: not submitted before, or the phase did not exist.

    gone: not submitted after, or the phase does not exist.

    not measured: queued or running, or without times on both sides.

    Exit code: 0 if no time is slower by more than the margin, with 95% confidence; 1 if one is,
    after the adjustment for the number of cells (Holm), or if a cell is broken or wrong; 2 if the
    input is invalid; 3 otherwise.
    """
    try:
        if margin is not None:
            require_margin(margin)
        if after is None:
            observation = with_stale(read_short(before.resolve()))
            notes = [*map(str, observation.bad_lines), *observation.notes]
            runs = {task.run.id: task.run for task in observation.tasks}
            found = compare_blocks(observation, margin, _chosen(runs, where))
        else:
            old, new = read_side(before.resolve()), read_side(after.resolve())
            notes = [
                f"{each.folder}: {note}"
                for each in (old.observation, new.observation)
                for note in (*each.bad_lines, *each.notes)
            ]
            found = compare_folders(old, new, margin, _chosen(old.runs | new.runs, where))
    except CommandError as error:
        _fail(str(error))
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    as_csv, width = output_format is ListFormat.csv, plain_console().width
    print(csv_comparison(found) if as_csv else markdown_comparison(found, every, width))
    raise SystemExit(found.exit_code)


@app.command(epilog="Example: python aggregate.py export logs/flash --out flash.parquet")
def export(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER",
            help="Results folders, such as logs/flash.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, whose name ends in .csv or .parquet. An existing file is "
            "replaced. [default: -, which prints CSV]",
            parser=as_path,
        ),
    ] = None,
    by: Annotated[
        By,
        typer.Option(
            help="What a row is about: a run with all its repeats or rounds, or one process of it, "
            "with the clock, power and temperature of the GPU."
        ),
    ] = By.run,
) -> None:
    """Write the results of folders as one flat table, for pandas and other programs.

    A row is a run on one kind of device, in one phase. Numbers have all digits. The rows and
    columns are those of jobs.report.load, see docs/results_folders.md.
    """
    if out == Path("-"):
        out = None
    if out is not None and (wrong := unusable_file(out)):
        _fail(f"--out: {wrong}")
    from jobs.frame.flat import read_frame  # imports pandas, which is slow

    try:
        frame, notes = read_frame(folders, by is By.process)
    except (FileNotFoundError, UnreadableResults) as error:
        _fail(str(error))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if out is None:
        write_csv(frame, sys.stdout)
        return
    try:
        write_frame(frame, out)
    except OSError as error:
        _fail(f"--out: {str(out)!r} cannot be written: {error.strerror or error}")


@app.command(epilog="Example: python aggregate.py report logs/flash --out report")
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Results folders, and folders that contain results folders, such as logs/h200.",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write: index.html, report.md and plots. A report in it is replaced.",
            parser=as_path,
        ),
    ] = Path("report"),
) -> None:
    """Write one document with the answers to all problems of CS336, assignment 2.

    The answers, tables and plots come from the records in the folders. A problem without records
    is not measured; the document tells the command that measures it. Sweeps that belong to no
    problem have a section of their own.
    """
    from jobs.writeup.build import build_report  # imports much that other commands do not need

    if file := not_a_folder(out):
        _fail(f"--out must be a folder, got the file {str(file)!r}")
    try:
        document = build_report(folders, out)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except (UnreadableResults, CommandError) as error:
        _fail(str(error))
    for note in document.notes:
        print(f"note: {note}", file=sys.stderr)
    counts = ", ".join(f"{count} {state}" for state, count in document.counts().items() if count)
    print(f"wrote {out / 'index.html'} and {out / 'report.md'}: {counts}")


def _chosen(runs: dict[str, Run], where: str | None) -> set[str] | None:
    return None if where is None or not runs else matching_runs(list(runs.values()), where)


def _observe(folder: Path) -> Observation:
    try:
        return observe(folder.resolve())
    except (FileNotFoundError, UnreadableResults) as error:
        _fail(str(error))


def _load(path: Path) -> Sweep:
    try:
        return load_sweep(path).sweep
    except InputError as error:
        _fail(str(error))


def _read_texts(path: Path, sweep: Sweep) -> StudyTexts:
    try:
        return StudyTexts(path, [view.name for view in tables_of(sweep)])
    except TableError as error:
        _fail(f"--text: {error}")


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    # Garbage collection would take a third of the time with 100,000 records. It is not needed,
    # because records have no reference cycles.
    gc.disable()
    run_command(partial(app, prog_name="aggregate.py"))
