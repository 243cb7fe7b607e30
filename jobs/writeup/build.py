"""Builds the report: index.html, report.md and its figures, from results folders."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from jobs.errors import CommandError
from jobs.formatting import relative
from jobs.results.latest import results_folders
from jobs.results.unreadable import BadLine
from jobs.writeup.assemble import make_document
from jobs.writeup.document import Document
from jobs.writeup.markdown import PLOTS, markdown_report
from jobs.writeup.page import html_report
from jobs.writeup.problem import read_problems
from jobs.writeup.studies import read_studies

PAGE, MARKDOWN = "index.html", "report.md"


def build_report(given: Iterable[Path], out: Path) -> Document:
    """Write the report of results folders into a folder. An older report there is replaced.

    Args:
        given: results folders, and folders that contain results folders.
        out: folder to write, created if needed. Files in it that are not of a report are kept.

    Raises:
        CommandError: if a folder does not exist, if there are no results, or if the submissions or
            records of all folders cannot be read.
        OSError: if a file cannot be written.
    """
    given = list(given)
    bad: list[BadLine] = []
    folders = [folder.resolve() for folder in results_folders(given, bad)]
    if not folders:
        raise CommandError(
            f"no results folder in {', '.join(map(str, given))} (it has a subfolder submissions)"
        )
    studies, notes = read_studies(folders)
    notes += map(str, bad)
    shown = [str(relative(folder)) for folder in folders]
    document = make_document(read_problems(), studies, shown, notes)
    out.mkdir(parents=True, exist_ok=True)
    # The report is made in a folder beside its files, so that a failure leaves the older one.
    with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as name:
        made = Path(name)
        text = markdown_report(document, made)
        page = html_report(document)
        (made / PAGE).write_text(page, encoding="utf-8")
        (made / MARKDOWN).write_text(text, encoding="utf-8")
        older = _linked_images(out / MARKDOWN)
        images = {path.relative_to(made) for path in (made / PLOTS).rglob("*.*")}
        for file in (*sorted(images), Path(PAGE), Path(MARKDOWN)):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (made / file).replace(out / file)
        _remove(out, older - images)
    return document


def _linked_images(report: Path) -> set[Path]:
    """Return the images in the folder `PLOTS` that an older report shows, as relative paths."""
    if not report.is_file():
        return set()
    links = re.findall(rf"]\(({PLOTS}/[^)]*[.](?:png|svg))\)", report.read_text(errors="replace"))
    return {path for path in map(Path, map(unquote, links)) if ".." not in path.parts}


def _remove(folder: Path, files: Iterable[Path]) -> None:
    """Remove some files of a folder, and their subfolders if they are empty then."""
    for file in files:
        (folder / file).unlink(missing_ok=True)
        for above in file.parents[:-1]:  # without the folder itself
            with suppress(OSError):
                (folder / above).rmdir()
