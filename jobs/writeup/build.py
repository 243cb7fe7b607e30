"""Builds the report: index.html, report.md and its plots, from results folders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jobs.writeup.document import Document, make_document
from jobs.writeup.markdown import PLOTS, markdown_report
from jobs.writeup.page import html_report
from jobs.writeup.problem import read_problems
from jobs.writeup.studies import read_studies, results_folders, shown_path

PAGE, MARKDOWN = "index.html", "report.md"


def build_report(given: Iterable[Path], out: Path) -> Document:
    """Write the report of results folders into a folder. An older report there is replaced.

    Args:
        given: results folders, and folders that contain results folders.
        out: folder to write, created if needed. Other files in it are kept.

    Raises:
        FileNotFoundError: if a folder does not exist or has no results.
        UnreadableResults: if the submissions or records of a folder cannot be read.
        CommandError: if a package that the page needs is not installed.
        OSError: if a file cannot be written.
    """
    folders = results_folders(given)
    studies, notes = read_studies(folders)
    document = make_document(read_problems(), studies, list(map(shown_path, folders)), notes)
    out.mkdir(parents=True, exist_ok=True)
    # The report is made in a folder beside its files, so that a failure leaves the older one.
    with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as name:
        made = Path(name)
        text = markdown_report(document, made)
        page = html_report(document)
        (made / PAGE).write_text(page, encoding="utf-8")
        (made / MARKDOWN).write_text(text, encoding="utf-8")
        for file in (PAGE, MARKDOWN):
            (made / file).replace(out / file)
        shutil.rmtree(out / PLOTS, ignore_errors=True)
        if (made / PLOTS).exists():
            (made / PLOTS).replace(out / PLOTS)
    return document
