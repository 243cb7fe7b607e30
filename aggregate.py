"""Records -> tables, plots, comparison.

python aggregate.py logs/flash [--format md|csv|latex|html] [--plot DIR]
python aggregate.py compare logs/before logs/after
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar
from urllib.parse import quote

import pandas as pd
import typer

from jobs.errors import InputError, TableError
from jobs.formatting import format_number
from jobs.manifest import BrokenManifest
from jobs.report.compare import REGRESSIONS, Comparison, compare
from jobs.report.entries import Entry, entries
from jobs.report.pictures import Picture, copy_pictures, draw_plots
from jobs.report.sheets import Sheet, make_sheet
from jobs.run import varying
from jobs.status import Observation, observe
from jobs.sweep.benchmarks import short_name
from jobs.sweep.load import load_sweep
from jobs.sweep.schema import Plot, Sweep, Table

View = TypeVar("View", Table, Plot)


class Format(StrEnum):
    md = "md"
    csv = "csv"
    latex = "latex"
    html = "html"


tables_app = typer.Typer(add_completion=False, rich_markup_mode=None)
compare_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@tables_app.command(
    epilog="Examples: python aggregate.py logs/flash --format latex --plot plots; "
    "python aggregate.py compare logs/before logs/after (see python aggregate.py compare --help)"
)
def tables(
    folder: Annotated[Path, typer.Argument(help="Results folder, as logs/flash.")],
    format: Annotated[Format, typer.Option(help="Of the tables.")] = Format.md,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the sweep's plots and the pictures that its runs left; Markdown links "
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
    seen = _observe(folder)
    sweep = seen.manifests[-1].sweep if sweep_file is None else _read(sweep_file)
    views = [_own(view, sweep) for view in sweep.tables] or _default_views(sweep)
    if table is not None:
        views = [view for view in views if view.name == table]
        if not views:
            known = ", ".join(v.name for v in sweep.tables) or "none"
            _fail(f"no table {table!r}; {sweep.name} has {known}")
    chosen = entries(seen)
    for view in views:
        try:
            sheet = make_sheet(seen, view, chosen)
        except TableError as error:
            _fail(f"sweep {sweep.name}, table {view.name}: {error}")
        if sheet is None:
            here = short_name(str(view.benchmark)) in {entry.run.benchmark for entry in chosen}
            which = f"(where: {view.where})" if here else f"of benchmark {view.benchmark!r}"
            print(f"table {view.name}: no runs {which}", file=sys.stderr)
            continue
        for warning in sheet.warnings:
            print(f"note: table {view.name}: {warning}", file=sys.stderr)
        print(render(sheet, format), end="\n\n")
    for line in (*map(str, seen.bad_lines), *seen.notes):
        print(f"note: {line}", file=sys.stderr)
    if plot is not None:
        pictures = _pictures(seen, sweep, plot, chosen)
        if format is Format.md and pictures:
            print("\n\n".join(_link(picture, plot) for picture in pictures))


def _own(view: View, sweep: Sweep) -> View:
    """A view with its benchmark: its sweep's, which need not be that of the folder."""
    return view.model_copy(update={"benchmark": view.benchmark or sweep.benchmark})


def _read(path: Path) -> Sweep:
    try:
        return load_sweep(path).sweep
    except InputError as error:
        _fail(str(error))


def _pictures(seen: Observation, sweep: Sweep, folder: Path, chosen: list[Entry]) -> list[Picture]:
    """Draw the sweep's plots, copy the pictures that runs left, and say on stderr which."""
    try:
        drawn = draw_plots(seen, [_own(view, sweep) for view in sweep.plots], folder, chosen)
        declared = [f"{plot.name}.png" for plot in sweep.plots]
        pictures = drawn + copy_pictures(seen, chosen, folder, declared)
    except TableError as error:
        _fail(f"sweep {sweep.name}, plots: {error}")
    except OSError as error:
        _fail(f"--plot {folder}: {error.strerror}: {error.filename}")
    for name in declared:
        if name not in [picture.path.name for picture in drawn]:
            print(f"plot {name.removesuffix('.png')}: nothing measured", file=sys.stderr)
    for picture in pictures:
        print(picture.path, file=sys.stderr)
    if not pictures and not declared:
        print(f"note: sweep {sweep.name} has no plots, its runs no pictures", file=sys.stderr)
    return pictures


def _link(picture: Picture, folder: Path) -> str:
    """A picture for a page that lies beside the folder: docs/results/flash.md has flash/x.png."""
    title = re.sub(r"([\\\[\]])", r"\\\1", picture.title)
    return f"![{title}]({quote(f'{folder.resolve().name}/{picture.path.name}')})"


def _default_views(sweep: Sweep) -> list[Table]:
    """All that was swept, a table a benchmark."""
    names = dict.fromkeys(case.benchmark or sweep.benchmark for case in sweep.cases)
    if len(names) < 2:
        return [Table(name=sweep.name, benchmark=next(iter(names), None))]
    return [
        Table(name=sweep.name, title=f"{sweep.name}, {short_name(name)}", benchmark=name)
        for name in names
    ]


def render(sheet: Sheet, format: Format) -> str:
    """One table as text: a heading, the table as pandas writes it, what it was made of."""
    heading, data = sheet.heading, sheet.data
    notes = ". ".join(sheet.notes)
    if format is Format.csv:
        comments = "".join(f"# {line}\n" for line in (heading, notes) if line)
        return comments + data.to_csv(index=False)
    if format is Format.md:
        parts = [f"### {heading}", _markdown(data), notes, sheet.text]
        return "\n\n".join(part for part in parts if part) + "\n"
    if format is Format.latex:
        table = (
            data.style.hide(axis="index")
            .format(escape="latex")
            .format_index(escape="latex", axis=1)
            .to_latex(caption=_latex(f"{heading}. {notes}"), hrules=True)
        )
        return str(table) + (f"\n{_latex(sheet.text)}\n" if sheet.text else "")
    body = data.to_html(index=False, border=0)
    paragraphs = [notes, *re.split(r"\n\s*\n", sheet.text)]
    below = "\n".join(f"<p>{escape(text)}</p>" for text in paragraphs if text)
    return f"<h3>{escape(heading)}</h3>\n{body}\n{below}"


def _markdown(data: pd.DataFrame, align: str = "right") -> str:
    """A table whose cells stand as they are: a kernel's name may hold |, <float> and *."""
    plain = data.rename(columns=_markdown_cell).map(_markdown_cell)
    aligned = [align] * len(data.columns)
    return str(plain.to_markdown(index=False, disable_numparse=True, colalign=aligned))


def _markdown_cell(text: str) -> str:
    return re.sub(r"([\\|<*`])", r"\\\1", text).replace("\n", " ")


_LATEX = {"±": r"$\pm$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"} | {
    character: f"\\{character}" for character in "%_&#${}"
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


@compare_app.command(
    epilog="Example: python aggregate.py compare logs/before logs/after --tolerance 0.01"
)
def compare_folders(
    before: Annotated[Path, typer.Argument(help="Results folder of the old state.")],
    after: Annotated[Path, typer.Argument(help="Results folder of the new state.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="A relative difference that does not matter.")
    ] = 0.02,
    all: Annotated[bool, typer.Option("--all", help="Runs that stayed the same too.")] = False,
) -> None:
    """Old, new, ratio and a verdict for every run; exit 1 on a regression.

    faster and slower: the whole 95% interval of the ratio of medians lies beyond the tolerance;
    same: all of it lies within; unsure: neither, so repeats are needed. broken: it was measured
    before and now is not, which is a regression too.
    """
    results = compare(_observe(before), _observe(after), tolerance)
    hidden = () if all else ("same", "not measured")
    told = [result for result in results if result.verdict not in hidden]
    if told:
        names = varying([result.run for result in results])
        mixed = len({result.run.benchmark for result in results}) > 1
        print(_markdown(_comparison_frame(told, names, mixed), "left"), end="\n\n")
    counts = Counter(result.verdict for result in results)
    print(
        ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing to compare"
    )
    if any(counts[name] for name in REGRESSIONS):
        raise SystemExit(1)
    if not any(result.ratio for result in results):
        _fail("the two folders have no measured run in common")


def _comparison_frame(results: list[Comparison], names: list[str], mixed: bool) -> pd.DataFrame:
    devices = len({result.device for result in results}) > 1
    rows = []
    for result in results:
        row = {"benchmark": result.run.benchmark} if mixed else {}
        row |= {name: str(result.run.params.get(name, "")) for name in names}
        if devices:
            row["device"] = result.device
        row["phase"] = result.phase
        row["before ms"] = format_number(result.before) if result.before is not None else ""
        row["after ms"] = format_number(result.after) if result.after is not None else ""
        row["after/before"] = f"{result.ratio:.3f}" if result.ratio is not None else ""
        row["95% interval"] = (
            f"{result.low:.3f} to {result.high:.3f}" if result.low is not None else ""
        )
        row["verdict"] = result.verdict
        rows.append(row)
    return pd.DataFrame(rows)


def _observe(folder: Path) -> Observation:
    try:
        return observe(folder.resolve())
    except (FileNotFoundError, BrokenManifest) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    gc.disable()  # a hundred thousand records, none in a cycle: looking for cycles costs a third
    if sys.argv[1:2] == ["compare"]:
        compare_app(sys.argv[2:], prog_name="aggregate.py compare")
    tables_app(prog_name="aggregate.py")


if __name__ == "__main__":
    main()
