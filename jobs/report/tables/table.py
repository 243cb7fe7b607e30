"""A table of text cells, which `jobs.report.tables.render` formats as Markdown, CSV or LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.frame.results import Key
from jobs.frame.rows import NO_VALUE
from jobs.results.record import Record


@dataclass
class ReportTable:
    """Table of text cells with a heading and notes."""

    heading: str
    dimensions: list[str]  # names of the columns that identify a row: parameters, device, ...
    keys: list[Key]  # for each row, the values of the dimensions
    notes: list[str]
    warnings: list[str] = field(default_factory=list)  # printed to stderr, not part of the table
    columns: dict[str, list[str]] = field(default_factory=dict)  # cells by header
    # For each row, the records that a cell shows, by header. Columns of parameters have none.
    records: dict[str, list[list[Record]]] = field(default_factory=dict)

    @property
    def measured_devices(self) -> set[str]:
        """The kinds of device of the successful records that the table shows."""
        shown = [record for cells in self.records.values() for cell in cells for record in cell]
        return {record.device for record in shown if record.status == "ok"}

    @property
    def has_values(self) -> bool:
        """Whether a cell shows a number, text or status of a run."""
        own = [cells for header, cells in self.columns.items() if header in self.records]
        return not own or any(cell not in ("", NO_VALUE) for cells in own for cell in cells)

    def add_column(
        self, header: str, cells: list[str], records: list[list[Record]] | None = None
    ) -> None:
        """Add a column. If the header already exists, make it unique with trailing spaces."""
        while header in self.columns:
            header += " "
        self.columns[header] = cells
        if records is not None:
            self.records[header] = records
