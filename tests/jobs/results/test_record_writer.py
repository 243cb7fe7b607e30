"""Writing records: after any failure, the records written before it stay readable."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.results.record_writer import RecordWriter
from jobs.whole_files import write_json
from tests.jobs.harness import records
from tests.jobs.results_folder import ok, record, run
from tests.jobs.small_disk import small_disk


def test_writers_of_one_name_write_to_files_of_their_own(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path / "records", "same") for _ in range(3)]
    for number, writer in enumerate([*writers, *writers]):
        assert writer.write(record(run(number), ok(1.0)))
    assert len(list((tmp_path / "records").iterdir())) == 3
    assert len(records(tmp_path)) == 6


def test_a_torn_line_is_not_glued_to_the_next(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", "a")
    assert writer.write(record(run(1), ok(1.0)))
    with writer.path.open("ab") as file:  # a partial line that was not undone
        file.write(record(run(2), ok(1.0)).model_dump_json().encode()[:100])
    assert writer.write(record(run(3), ok(1.0)))
    found, bad = read_records(tmp_path)
    assert [r.run for r in found] == [run(1).id, run(3).id]
    assert [one.line for one in bad] == [2]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a real file system of 64 KiB, of which one file leaves about 4 KiB free."""
    with small_disk(tmp_path / "disk", 64) as folder:
        (folder / "ballast").write_bytes(b"x" * (56 << 10))
        yield folder


def big(index: int) -> Record:
    return record(run(index), ok(*[1 / 3] * 150))  # about 3 kB


def test_a_full_disk_costs_no_record_that_was_there(
    full_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = RecordWriter(full_disk / "records", "a")
    written = 0
    while writer.write(big(written), tries=1):
        written += 1
        assert written < 100
    printed = capfd.readouterr().err
    assert "No space left on device" in printed
    line = f'{{"schema_version":1,"run":"{run(written).id}"'
    assert f"append this line to {writer.path}: {line}" in printed  # the record is not lost
    assert len(records(full_disk)) == written  # and no partial line
    (full_disk / "ballast").unlink()  # frees space
    assert writer.write(big(written), tries=1)
    assert [r.run for r in records(full_disk)] == [run(i).id for i in range(written + 1)]


def test_room_that_comes_while_it_tries_again_is_used(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordWriter(full_disk / "records", "a")
    while writer.write(big(0), tries=1):
        pass
    waits: list[float] = []

    def make_room(seconds: float) -> None:
        waits.append(seconds)
        (full_disk / "ballast").unlink()

    monkeypatch.setattr(time, "sleep", make_room)
    assert writer.write(big(1), tries=2)
    assert waits == [2]
    assert records(full_disk)[-1].run == run(1).id


def test_a_full_disk_under_the_log_does_not_kill_the_writer(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's stderr may be a file in the same results folder, on the same full disk."""
    writer = RecordWriter(full_disk / "records", "a")
    with (full_disk / "worker.log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        written = 0
        while writer.write(big(written), tries=1) and written < 100:
            written += 1
        assert not writer.write(big(0), tries=1)
        (full_disk / "ballast").unlink()
        assert writer.write(big(written), tries=1)
    assert len(records(full_disk)) == written + 1


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": [1, 2]})
    assert json.loads(path.read_text()) == {"b": [1, 2]}
    assert os.listdir(path.parent) == ["state.json"]
    with pytest.raises(TypeError):
        write_json(path, {"c": object()})
    assert json.loads(path.read_text()) == {"b": [1, 2]}
