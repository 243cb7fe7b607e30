"""Renders the document as one Markdown file, with its figures as files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from jobs.report.figures import file_stem
from jobs.report.tables.markdown import compact_table
from jobs.writeup.document import DeviceView, Document, PartResult, ProblemResult
from jobs.writeup.traced import escaped, without_marks

PLOTS = "plots"  # folder of the figures
TERMS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "terms.yaml").read_text())


def markdown_report(document: Document, folder: Path) -> str:
    """Return the document as Markdown, and write its figures as files.

    Args:
        folder: folder of the document. The figures are written into its subfolder `PLOTS`.

    Raises:
        OSError: if a file cannot be written.
    """
    blocks = [f"# {document.title}", *_summary(document)]
    for result in document.problems:
        blocks += _problem(result, folder)
    return "\n\n".join(filter(None, blocks)) + "\n"


def _summary(document: Document) -> Iterator[str]:
    """Yield blocks of Markdown, between which the document has blank lines."""
    counts = ", ".join(f"{count} {state}" for state, count in document.counts().items() if count)
    yield f"Parts: {counts}."
    yield (
        "This file has short tables and plots of one kind of GPU. The page index.html, made with "
        "it by `make report`, has all tables and figures, and the records of each number."
    )
    yield document.left_out_text
    yield "\n".join(f"- {state}: {state.meaning}" for state in document.counts())
    headings = ["problem", "editions", "status", *(f"on {escaped(d)}" for d in document.devices)]
    rows = [headings, ["---"] * len(headings)]
    for result in document.problems:
        problem = result.problem
        names = problem.names_text or "beyond the assignment"
        states = [result.states_of_parts, *(result.states_on(d) for d in document.devices)]
        link = f"[{escaped(problem.title)}](#{problem.id})"
        rows.append([link, names.replace("_", chr(92) + "_"), *states])
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)
    yield "<details><summary>Terms</summary>"
    yield "\n".join(f"- {escaped(term)}: {escaped(meaning)}" for term, meaning in TERMS.items())
    yield "</details>"


def _problem(result: ProblemResult, folder: Path) -> Iterator[str]:
    problem = result.problem
    anchors = "".join(f'<a id="{anchor}"></a>' for anchor in problem.anchors)
    yield f"## {anchors}{escaped(problem.title)}"
    status = f"Status: {result.states_of_parts}."
    yield f"{escaped(problem.names_text)}. {status}" if problem.names else status
    for number, part in enumerate(result.parts, 1):
        yield from _part(part, Path(PLOTS, f"{problem.id}-{number}"), folder)


def _part(part: PartResult, plots: Path, folder: Path) -> Iterator[str]:
    question = escaped(part.part.question)
    letter = f"({escaped(part.part.part)}) " if part.part.part else ""
    yield f"**{letter}{question}**" if question else f"### {escaped(part.part.part)}"
    if part.command:
        yield f"`{part.command}`"
    yield escaped(part.not_measured)
    first, *others = part.views
    if first.heading:
        yield f"On {escaped(first.heading)}:"
    yield from _answer(part, first)
    yield from _exhibits(first, plots, folder)
    for view in others:
        yield f"<details><summary>On {escaped(view.heading)}</summary>"
        yield from _answer(part, view)
        yield "</details>"


def _answer(part: PartResult, view: DeviceView) -> Iterator[str]:
    if view.text and not part.not_measured:
        yield without_marks(view.text)
        for note in view.basis:
            yield f"*{escaped(note)}*"


def _exhibits(view: DeviceView, plots: Path, folder: Path) -> Iterator[str]:
    for shown in view.tables:
        if not shown.folded:  # those are in the page
            yield f"**{escaped(shown.table.heading)}**"
            yield compact_table(shown.table.columns)
            yield escaped(". ".join(shown.table.notes))
    for figure in view.drawn:
        yield f"**{escaped(figure.title)}**"
        # With the device, so that no link shows another one when results are added.
        path = plots / file_stem(view.device) / figure.name
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(figure.content)
        yield f"![{escaped(figure.title)}]({path})"
    for note in view.notes:
        yield escaped(note)
