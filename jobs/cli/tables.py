"""The command `tables`: print the tables of a results folder and draw its plots."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.arguments import Folder, WhereParams, as_path
from jobs.cli.completion import sweep_files
from jobs.cli.observed import observed
from jobs.cli.output import fail, note, width
from jobs.cli.where import matching_runs
from jobs.errors import TableError
from jobs.formatting import abridged, relative
from jobs.frame.results import Result, list_results
from jobs.report.figures import Drawing, Figure
from jobs.report.plots import ImageFormat
from jobs.report.run_pictures import run_pictures
from jobs.report.tables.render import Format, markdown_image, render
from jobs.report.tables.report_table import make_report_table
from jobs.report.views import Shown, plots_of, tables_of
from jobs.results.run_states import Observation
from jobs.results.stale import with_stale
from jobs.run import varying
from jobs.sweep.benchmarks import short_name
from jobs.sweep.schema import Sweep
from jobs.user_files import not_a_folder

MOST_LISTED = 5  # runs without a point
EXAMPLES = "logs/flash --format latex --plot plots"


def tables(
    folder: Folder = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="Output format of the tables.")
    ] = "md",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the plots of the sweep and the pictures of its runs.",
            parser=as_path,
        ),
    ] = None,
    plot_format: Annotated[
        ImageFormat, typer.Option(help="Format of the plots. Only PNG has the title in the plot.")
    ] = "png",
    table: Annotated[str | None, typer.Option(help="Print only the table with this name.")] = None,
    where: WhereParams = None,
    sweep_file: Annotated[
        Path | None,
        typer.Option(
            "--views",
            metavar="SWEEP",
            help="Sweep file with the tables and plots. [default: that of the last submission]",
            parser=as_path,
            autocompletion=sweep_files,
        ),
    ] = None,
) -> None:
    """Print the tables of a results folder. Failed and missing runs are shown with their status."""
    if plot is not None and (file := not_a_folder(plot)):
        fail(f"--plot must be a folder, got the file {str(file)!r}")
    observation = with_stale(observed(folder, tell=True))
    sweep = observation.manifests[-1].sweep
    if sweep_file is not None:
        from jobs.sweep.load import load_sweep  # imports what reads sweep files

        sweep = load_sweep(sweep_file).sweep
    results = list_results(observation)
    if where is not None:
        chosen = matching_runs([result.run for result in results], where)
        results = [result for result in results if result.run.id in chosen]
    _print_tables(observation, sweep, results, table, output_format)
    note(*observation.bad_lines, *observation.notes)
    others = dict.fromkeys(name for each in observation.manifests for name in each.checkouts)
    if others:
        see = f"python -m jobs compare {shlex.quote(str(relative(observation.folder)))}"
        note(f"the runs of {', '.join(others)} are not in tables: {see}")
    if plot is not None:
        images = _draw(observation, sweep, results, plot, plot_format)
        if output_format == "md" and images:
            print("\n\n".join(markdown_image(image, plot) for image in images))


def _print_tables(
    observation: Observation,
    sweep: Sweep,
    results: list[Result],
    only: str | None,
    output_format: Format,
) -> None:
    views = tables_of(sweep)
    if only is not None:
        views = [view for view in views if view.name == only]
        if not views:
            known = ", ".join(view.name for view in sweep.tables) or "none"
            fail(f"--table: sweep {sweep.name} has no table {only!r} (valid: {known})")
    for view in views:
        try:
            for_programs = output_format == "csv"
            table = make_report_table(observation, view, results, for_programs)
        except TableError as error:
            fail(f"sweep {sweep.name}, table {view.name}: {error}")
        if table is None:
            here = short_name(str(view.benchmark)) in {r.run.benchmark for r in results}
            condition = f"satisfies the condition {view.where!r}"
            which = condition if here else f"has benchmark {view.benchmark!r}"
            note(f"table {view.name} is empty: no run {which}")
            continue
        note(*(f"table {view.name}: {warning}" for warning in table.warnings))
        if not table.has_values and only is None and not for_programs:
            note(f"table {view.name} is left out: no run measured what it shows")
            continue
        print(render(table, output_format, width()), end="\n\n")


def _draw(
    observation: Observation,
    sweep: Sweep,
    results: list[Result],
    folder: Path,
    form: ImageFormat,
) -> list[Drawing]:
    """Draw the plots of the sweep and the pictures of runs, and print all paths to stderr."""
    drawn, taken, shown = [], set[str](), list[Result]()
    try:
        plots = [Figure.of_plot(observation, plot, results) for plot in plots_of(sweep)]
        pictures, left_out = run_pictures(results, lambda _: observation.folder)
        for figure in (*plots, *pictures):
            drawing = figure.draw(taken, form)
            if drawing is None:
                note(f"plot {figure.name} is not drawn: no run has a value for it")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            (folder / drawing.name).write_bytes(drawing.content)
            drawn.append(drawing)
            if isinstance(figure.content, Shown):
                shown += figure.content.results
    except TableError as error:
        fail(f"sweep {sweep.name}, plots: {error}")
    except OSError as error:
        fail(f"--plot {folder}: {error.strerror}: {error.filename}")
    note(*_without_points(shown), *left_out)
    for drawing in drawn:
        print(folder / drawing.name, file=sys.stderr)
    if not drawn and not plots:
        how = "add the key plots to a sweep file, and name the file with --views"
        note(f"sweep {sweep.name} has no plots, and no run produced images: {how}")
    return drawn


def _without_points(results: list[Result]) -> list[str]:
    """Return a note on the runs that have no result, so that plots do not show them."""
    measured = {(each.run.id, each.device) for each in results if each.status == "ok"}
    absent = {(each.run.id, each.device): each for each in results}
    absent = {key: each for key, each in absent.items() if key not in measured}
    names = varying([each.run for each in results])
    texts = [f"{each.run.label(names)} ({each.failure_text})" for each in absent.values()]
    return [f"plots have no point of {abridged(texts, MOST_LISTED)}"] if texts else []
