"""Print tables of a results folder and draw its plots, or compare two folders.

python aggregate.py logs/flash [--format md|csv|latex|html] [--plot DIR]
python aggregate.py compare logs/before logs/after
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from jobs.errors import InputError, TableError
from jobs.report.compare import REGRESSIONS, compare, comparison_columns
from jobs.report.images import Image, copy_run_images, draw_plots
from jobs.report.render import Format, markdown_image, markdown_table, render
from jobs.report.report_table import make_report_table
from jobs.report.results import Result, list_results
from jobs.report.views import plots_of, tables_of
from jobs.results.manifest import BrokenManifest
from jobs.results.run_states import Observation, observe
from jobs.sweep.benchmarks import short_name
from jobs.sweep.load import load_sweep
from jobs.sweep.schema import Sweep


class TablesByDefault(TyperGroup):
    """Commands of which `tables` need not be named: `aggregate.py logs/flash`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args[:1] == ["--help"] or (args and args[0] in self.commands)
        if args == ["tables"] and Path("tables").is_dir():  # a results folder of this name
            named = False
        return super().parse_args(ctx, args if named else ["tables", *args])


app = typer.Typer(
    cls=TablesByDefault,
    add_completion=False,
    rich_markup_mode=None,
    subcommand_metavar="[tables] FOLDER | compare BEFORE AFTER",
    help="Print a folder's tables, or compare two folders.",
    epilog="Examples: python aggregate.py logs/flash --format latex --plot plots; "
    "python aggregate.py compare logs/before logs/after",
)


@app.command(epilog="Example: python aggregate.py logs/flash --format latex --plot plots")
def tables(
    folder: Annotated[Path, typer.Argument(help="Results folder, as logs/flash.")],
    output_format: Annotated[Format, typer.Option("--format", help="Of the tables.")] = Format.md,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the sweep's plots and the images that its runs left; Markdown links "
            "to them from beside it."
        ),
    ] = None,
    table: Annotated[str | None, typer.Option(help="Only the table of this name.")] = None,
    sweep_file: Annotated[
        Path | None,
        typer.Option(
            "--views",
            help="A sweep file: its tables, texts and plots, instead of those that were submitted.",
        ),
    ] = None,
) -> None:
    """Print a folder's tables: every run of its sweeps has a cell."""
    observation = _observe(folder)
    sweep = observation.manifests[-1].sweep if sweep_file is None else _load(sweep_file)
    results = list_results(observation)
    _print_tables(observation, sweep, results, table, output_format)
    for line in (*map(str, observation.bad_lines), *observation.notes):
        print(f"note: {line}", file=sys.stderr)
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
) -> None:
    views = tables_of(sweep)
    if only is not None:
        views = [view for view in views if view.name == only]
        if not views:
            known = ", ".join(view.name for view in sweep.tables) or "none"
            _fail(f"no table {only!r}; {sweep.name} has {known}")
    for view in views:
        try:
            table = make_report_table(observation, view, results)
        except TableError as error:
            _fail(f"sweep {sweep.name}, table {view.name}: {error}")
        if table is None:
            here = short_name(str(view.benchmark)) in {r.run.benchmark for r in results}
            which = f"(where: {view.where})" if here else f"of benchmark {view.benchmark!r}"
            print(f"table {view.name}: no runs {which}", file=sys.stderr)
            continue
        for warning in table.warnings:
            print(f"note: table {view.name}: {warning}", file=sys.stderr)
        print(render(table, output_format), end="\n\n")


def _collect_images(
    observation: Observation, sweep: Sweep, results: list[Result], folder: Path
) -> list[Image]:
    """Draw the sweep's plots, copy the images that runs left, and list them on stderr."""
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
            print(f"plot {name.removesuffix('.png')}: nothing measured", file=sys.stderr)
    for image in images:
        print(image.path, file=sys.stderr)
    if not images and not declared:
        print(f"note: sweep {sweep.name} has no plots, its runs no images", file=sys.stderr)
    return images


@app.command(
    "compare",
    epilog="Example: python aggregate.py compare logs/before logs/after --tolerance 0.01",
)
def compare_folders(
    before: Annotated[Path, typer.Argument(help="Results folder of the old state.")],
    after: Annotated[Path, typer.Argument(help="Results folder of the new state.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="A relative difference that does not matter.")
    ] = 0.02,
    every: Annotated[bool, typer.Option("--all", help="Runs that stayed the same too.")] = False,
) -> None:
    """Compare two folders run by run; exit 1 on a regression.

    Prints old, new, their ratio and a verdict for every run.

    faster and slower: the whole 95% interval of the ratio of medians lies beyond the tolerance;
    same: all of it lies within; unsure: neither, so repeats are needed. broken: it was measured
    before and now is not, which is a regression too.
    """
    comparisons = compare(_observe(before), _observe(after), tolerance)
    hidden = () if every else ("same", "not measured")
    chosen = [comparison for comparison in comparisons if comparison.verdict not in hidden]
    if chosen:
        print(markdown_table(comparison_columns(chosen, comparisons), "left"), end="\n\n")
    counts = Counter(comparison.verdict for comparison in comparisons)
    print(
        ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing to compare"
    )
    if any(counts[name] for name in REGRESSIONS):
        raise SystemExit(1)
    if not any(comparison.ratio for comparison in comparisons):
        _fail("the two folders have no measured run in common")


def _observe(folder: Path) -> Observation:
    try:
        return observe(folder.resolve())
    except (FileNotFoundError, BrokenManifest) as error:
        _fail(str(error))


def _load(path: Path) -> Sweep:
    try:
        return load_sweep(path).sweep
    except InputError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    # A hundred thousand records, none in a cycle: looking for cycles costs a third.
    gc.disable()
    app(prog_name="aggregate.py")
