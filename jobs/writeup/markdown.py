"""Renders the document as one Markdown file, with plots as PNG files beside it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from jobs.report.plots import draw_plot
from jobs.report.tables.markdown import markdown_table
from jobs.writeup.document import Document, PartResult, ProblemResult, View
from jobs.writeup.drawings import Drawing
from jobs.writeup.problem import Problem
from jobs.writeup.terms import TERMS
from jobs.writeup.traced import escaped, without_marks

PLOTS = "plots"  # folder of the PNG files
TITLE = "Systems for language models: the problems and their measured answers"


def markdown_report(document: Document, folder: Path) -> str:
    """Return the document as Markdown, and write its plots as PNG files.

    Args:
        folder: folder of the document. The PNG files are written into its subfolder `PLOTS`.

    Raises:
        OSError: if a file cannot be written.
    """
    lines = [f"# {TITLE}", "", *_summary(document), ""]
    for result in document.problems:
        lines += _problem(result, folder)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def names_of(problem: Problem) -> str:
    """Return the names of a problem in the editions of the assignment, such as `2025: name`."""
    by_name: dict[str, list[str]] = {}
    for edition, name in problem.names.items():
        by_name.setdefault(name, []).append(str(edition))
    return "; ".join(f"{' and '.join(years)}: {name}" for name, years in by_name.items())


def _summary(document: Document) -> Iterator[str]:
    counts = ", ".join(f"{count} {state}" for state, count in document.counts().items() if count)
    yield f"Parts: {counts}."
    yield ""
    yield (
        "This file has short tables and plots of one kind of GPU. The page index.html, made with "
        "it by `make report`, has all tables and figures, and the records of each number."
    )
    yield ""
    for state in document.counts():
        yield f"- {state}: {state.meaning}"
    yield ""
    headings = ["problem", "editions", "status", *(f"on {escaped(d)}" for d in document.devices)]
    yield f"| {' | '.join(headings)} |"
    yield "|" + len(headings) * " --- |"
    for result in document.problems:
        problem = result.problem
        title = escaped(problem.title)
        names = names_of(problem) or "beyond the assignment"
        states = [result.states_of_parts, *(result.states_on(d) for d in document.devices)]
        cells = [f"[{title}](#{problem.id})", names.replace("_", chr(92) + "_"), *states]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "<details><summary>Terms</summary>"
    yield ""
    for term, meaning in TERMS.items():
        yield f"- {escaped(term)}: {escaped(meaning)}"
    yield ""
    yield "</details>"


def _problem(result: ProblemResult, folder: Path) -> Iterator[str]:
    problem = result.problem
    anchors = "".join(f'<a id="{anchor}"></a>' for anchor in problem.anchors)
    yield ""
    yield f"## {anchors}{escaped(problem.title)}"
    yield ""
    names = names_of(problem)
    status = f"Status: {result.states_of_parts}."
    yield f"{escaped(names)}. {status}" if names else status
    for part in result.parts:
        yield from _part(part, folder)


def _part(part: PartResult, folder: Path) -> Iterator[str]:
    question = escaped(part.part.question)
    letter = f"({escaped(part.part.part)}) " if part.part.part else ""
    yield ""
    yield f"**{letter}{question}**" if question else f"### {escaped(part.part.part)}"
    yield ""
    if part.command:
        yield f"`{part.command}`"
        yield ""
    if part.not_measured:
        yield escaped(part.not_measured)
        yield ""
    for i, view in enumerate(part.views):
        if i:
            yield f"<details><summary>On {escaped(view.heading)}</summary>"
            yield ""
        elif view.heading:
            yield f"On {escaped(view.heading)}:"
            yield ""
        text = "" if part.not_measured else without_marks(view.text)
        yield from _view(view, text, folder, has_exhibits=i == 0)
        if i:
            yield "</details>"
            yield ""


def _view(view: View, text: str, folder: Path, has_exhibits: bool) -> Iterator[str]:
    yield text
    yield ""
    for note in view.basis if text else ():
        yield f"*{escaped(note)}*"
        yield ""
    for shown in view.tables if has_exhibits else ():
        if not shown.folded:  # those are in the page
            yield f"**{escaped(shown.table.heading)}**"
            yield ""
            yield _compact(markdown_table(shown.table.columns))
            yield ""
            yield escaped(". ".join(shown.table.notes))
            yield ""
    for plot in view.plots if has_exhibits else ():
        path = draw_plot(
            plot.shown, folder / PLOTS / _as_name(plot.study.name) / _as_name(view.device)
        )
        if path is not None:
            yield _image(plot.title, path, folder)
            yield ""
    for drawing in view.drawings:
        if has_exhibits or drawing.data is None:  # a file that the page shows
            yield _image(drawing.title, copied(drawing, folder), folder)
            yield ""
    for note in view.notes:
        yield escaped(note)
        yield ""


def _compact(table: str) -> str:
    """Leave out the spaces and dashes that align columns, more than half of a table."""
    return re.sub(r"-{2,}", "--", re.sub(r" {2,}", " ", table))


def _image(title: str, path: Path, folder: Path) -> str:
    return f"![{escaped(title)}]({quote(str(path.relative_to(folder)))})"


def copied(drawing: Drawing, folder: Path) -> Path:
    """Copy the PNG file of a figure to the folder of the document, and return the copy."""
    path = folder / path_of(drawing)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(drawing.png, path)
    return path


def path_of(drawing: Drawing) -> Path:
    """Return the path of the copy of a figure, relative to the folder of the document."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", drawing.label)[:120]
    name = "-".join(filter(None, [drawing.png.stem, label, drawing.record.run[:8]]))
    device = _as_name(drawing.record.device)
    return Path(PLOTS, _as_name(drawing.study.name), device, f"{name}.png")


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".") or ("_" if text else "")
