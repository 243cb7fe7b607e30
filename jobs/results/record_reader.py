"""Reads the records of a results folder, which are JSON lines in the files of DIR/records/.

Lines that are damaged are reported and skipped, and so are lines that a later version of the
project wrote.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.results.record import RECORDS, SCHEMA_VERSION, Record
from jobs.results.unreadable import BadLine, UnreadableResults, first_problem, names_in

_RUN_ID = re.compile(rb'"run":"([^"]*)"')


class _Versioned(BaseModel):
    schema_version: int


def parse_lines(
    data: bytes, path: Path, shared: dict[str, Any] | None = None
) -> Iterator[Record | BadLine]:
    """Yield one object per line of a file: a `Record`, or a `BadLine` if the line is not readable.

    `shared` is a cache of values of which records share one copy, the same for all files.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = Record.model_validate_json(line, context=shared)
        except ValidationError as error:
            yield BadLine(path, number, _later_version(line) or first_problem(error))
            continue
        if record.schema_version > SCHEMA_VERSION:
            yield BadLine(path, number, str(_later_version(line)))
            continue
        # pydantic's set of the given fields would take a fifth of the memory of a record.
        for part in (record, record.measurements, record.seconds):
            if part is not None:
                part.model_fields_set.clear()
        yield record


def _later_version(line: bytes) -> str | None:
    """Return an error message if a later version of the project wrote this line, else None."""
    try:
        version = _Versioned.model_validate_json(line).schema_version
    except ValidationError:
        return None
    later = (
        f"schema version must be at most {SCHEMA_VERSION} in this version of the project, got "
        f"{version}; update the project"
    )
    return later if version > SCHEMA_VERSION else None


def iter_records(folder: Path) -> Iterator[Record | BadLine]:
    """Yield the records of a results folder, and a `BadLine` for each line that cannot be read.

    Raises:
        UnreadableResults: if the folder of the records exists, but cannot be read.
    """
    shared: dict[str, Any] = {}
    for path in _record_files(folder / RECORDS):
        try:
            data = path.read_bytes()
        except OSError as error:
            yield BadLine(path, 0, str(error.strerror))
            continue
        yield from parse_lines(data, path, shared)


def _record_files(records: Path) -> list[Path]:
    return [records / name for name in names_in(records) if name.endswith(".jsonl")]


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would take a third of the time to read records.

    It frees only reference cycles, and records form none.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_records(
    folder: Path, shorten: Callable[[Record], None] | None = None
) -> tuple[list[Record], list[BadLine]]:
    """Return all records of a results folder, oldest first, and the lines that cannot be read.

    `shorten` removes from a record what the caller does not need, before the next one is read.

    Raises:
        UnreadableResults: if the folder of the records exists, but cannot be read.
    """
    records: list[Record] = []
    bad: list[BadLine] = []
    with garbage_collection_paused():
        for item in iter_records(folder):
            if isinstance(item, Record):
                if shorten is not None:
                    shorten(item)
                records.append(item)
            else:
                bad.append(item)
    records.sort(key=lambda record: record.finished_at)
    return records, bad


class RecordTail:
    """Reads new records of a results folder, of all runs or of `runs`, while others write them."""

    def __init__(self, folder: Path, runs: set[str] | None = None):
        self._folder = folder / RECORDS
        # Compared as bytes, because a damaged line may contain bytes that are not UTF-8.
        self._runs = None if runs is None else {run.encode() for run in runs}
        self._read: dict[Path, int] = {}
        self._shared: dict[str, Any] = {}

    def new(self) -> list[Record]:
        """Return the records that were written since the previous call, or all.

        What is still being written, or cannot be read now, is left to a later call.
        """
        records: list[Record] = []
        try:
            paths = _record_files(self._folder)
        except UnreadableResults:  # a network file system may fail for a moment; jobs must go on
            return records
        for path in paths:
            start = self._read.get(path, 0)
            try:
                if path.stat().st_size <= start:
                    continue
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
            except OSError:
                continue
            whole = data[: data.rfind(b"\n") + 1]  # the rest is still being written
            self._read[path] = start + len(whole)
            wanted = whole if self._runs is None else b"\n".join(self._mine(whole))
            lines = parse_lines(wanted, path, self._shared)
            records += [item for item in lines if isinstance(item, Record)]
        return records

    def _mine(self, data: bytes) -> Iterator[bytes]:
        assert self._runs is not None
        for line in data.split(b"\n"):
            found = _RUN_ID.search(line[:200])
            if found and found[1] in self._runs:
                yield line
