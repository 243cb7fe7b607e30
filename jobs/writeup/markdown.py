"""Renders the document as one Markdown file, with its figures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jobs.formatting import counted
from jobs.report.figures import file_stem
from jobs.report.tables.markdown import markdown_table
from jobs.writeup.document import Document, PartResult, ProblemResult, View
from jobs.writeup.problem import Problem
from jobs.writeup.terms import TERMS
from jobs.writeup.traced import escaped, without_marks

PLOTS = "plots"  # folder of the figures
TITLE = "Systems for language models: the problems and their measured answers"


def markdown_report(document: Document, folder: Path) -> str:
    """Return the document as Markdown, and write its figures as files.

    Args:
        folder: folder of the document. The figures are written into its subfolder `PLOTS`.

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


def left_out_text(document: Document) -> str:
    """Return a sentence with the number of problems without results."""
    count = counted(document.left_out, "problem")
    return f"Left out: {count} of which these folders have no results."


def _summary(document: Document) -> Iterator[str]:
    counts = ", ".join(f"{count} {state}" for state, count in document.counts().items() if count)
    yield f"Parts: {counts}."
    yield ""
    yield (
        "This file has short tables and plots of one kind of GPU. The page index.html, made with "
        "it by `make report`, has all tables and figures, and the records of each number."
    )
    if document.left_out:
        yield ""
        yield left_out_text(document)
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
    for number, part in enumerate(result.parts, 1):
        yield from _part(part, Path(PLOTS, f"{problem.id}-{number}"), folder)


def _part(part: PartResult, plots: Path, folder: Path) -> Iterator[str]:
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
        yield from _view(view, text, has_exhibits=i == 0)
        for figure in view.drawn if i == 0 else ():
            yield f"**{escaped(figure.title)}**"
            yield ""
            # With the device, so that no link shows another one when results are added.
            path = plots / file_stem(view.device) / figure.name
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(figure.content)
            yield f"![{escaped(figure.title)}]({path})"
            yield ""
        for note in view.notes if i == 0 else ():  # on exhibits
            yield escaped(note)
            yield ""
        if i:
            yield "</details>"
            yield ""


def _view(view: View, text: str, has_exhibits: bool) -> Iterator[str]:
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


def _compact(table: str) -> str:
    """Leave out the spaces and dashes that align columns, more than half of a table."""
    return re.sub(r"-{2,}", "--", re.sub(r" {2,}", " ", table))
