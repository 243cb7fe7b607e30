"""Numbers the records that a document shows."""

from __future__ import annotations

from jobs.results.record import Record
from jobs.writeup.studies import Study


class Registry:
    """The records that a document shows, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.entries: list[tuple[Study, Record]] = []
        self._numbers: dict[int, int] = {}  # by identity of the record

    def number(self, study: Study, record: Record) -> int:
        """Return the number of a record. A record that is not known gets the next number."""
        known = self._numbers.get(id(record))
        if known is None:
            known = self._numbers[id(record)] = len(self.entries)
            self.entries.append((study, record))
        return known
