"""Renders the document as one HTML file that needs no network.

Tables, figures and the data of records are compressed in the page.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from importlib.resources import files
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from jobs.formatting import counted
from jobs.report.figures import Drawing
from jobs.results.record import Record
from jobs.writeup.document import Document, ShownTable
from jobs.writeup.markdown import TERMS
from jobs.writeup.record_details import details
from jobs.writeup.traced import MARK


def html_report(document: Document) -> str:
    """Return the document as HTML."""
    page = _Page(document)
    jinja = Environment(
        loader=PackageLoader("jobs.writeup", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    here = files("jobs.writeup") / "page"
    body = jinja.get_template("page.html.j2").render(
        document=document,
        page=page,
        terms=TERMS,
        counted=counted,
        style=Markup((here / "page.css").read_text()),
    )
    # The records behind the page are known after it is rendered.
    data = {
        "tables": page.tables,
        "figures": page.figures,
        "records": [details(study, record) for study, record in document.registry.entries],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    script = (here / "page.js").read_text()
    return body.replace(
        "<!-- scripts -->",
        f'<script type="application/octet-stream" id="packed">{packed}</script>\n'
        f'<script type="module">{script}</script>',
    )


class _Page:
    """Makes the parts of the page that its template asks for, and collects the figures."""

    def __init__(self, document: Document):
        self.figures: list[str] = []  # their addresses
        self.tables: list[str] = []  # their HTML
        self._document = document
        # HTML in a text of a record is shown as text.
        self._markdown = MarkdownIt("commonmark", {"html": False}).enable("table")

    def answer(self, text: str) -> Markup:
        """Return an answer as HTML. Each measured number is a button that shows its records."""
        html = str(self._markdown.render(text))

        def button(found: re.Match[str]) -> str:
            records, number = found.groups()
            return _button(records, number) if records else number

        return Markup(MARK.sub(button, html))

    def table(self, shown: ShownTable) -> int:
        """Return the number of a table, whose HTML the page's script inserts."""
        table = shown.table
        heads = "".join(f'<th scope="col">{escape(header)}</th>' for header in table.columns)
        rows = []
        for i in range(len(table.keys)):
            cells = []
            for header, texts in table.columns.items():
                records = table.records.get(header)
                cell = self._cell(shown, texts[i], records[i] if records else [])
                cells.append(f"<td>{cell}</td>")
            rows.append(f"<tr>{''.join(cells)}</tr>")
        self.tables.append(f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>")
        return len(self.tables) - 1

    def figure(self, drawn: Drawing) -> int:
        """Return the number of a figure, whose content the page's script inserts."""
        media_type = "image/png" if drawn.name.endswith(".png") else "image/svg+xml"
        self.figures.append(f"data:{media_type},{quote(drawn.content)}")
        return len(self.figures) - 1

    def _cell(self, shown: ShownTable, text: str, records: list[Record]) -> Markup:
        if not records or not text:
            return escape(text)
        registry = self._document.registry
        numbers = sorted({registry.number(shown.study, record) for record in records})
        return Markup(_button(",".join(map(str, numbers)), str(escape(text))))


def _button(records: str, html: str) -> str:
    return f'<button class="n" data-r="{records}">{html}</button>'
