"""Files of records: damage costs only the damaged lines, and a failed write none before it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.results.record import SCHEMA_VERSION, Failure, Measurements, Record
from jobs.results.record_reader import RecordTail, parse_lines, read_records
from jobs.results.record_writer import RecordWriter
from jobs.results.unreadable import BadLine
from jobs.whole_files import write_json
from tests.jobs.harness import records
from tests.jobs.results_folder import failed, ok, record, run
from tests.jobs.small_disk import small_disk

WHERE = Path("records/x.jsonl")


def line(index: int) -> bytes:
    outcome = failed("error", traceback="a\nb «ü»") if index % 3 == 2 else ok(0.25, 1e-3, 1 / 3)
    return record(run(index), outcome).model_dump_json(exclude_none=True).encode() + b"\n"


LINES = [line(i) for i in range(4)]
FILE = b"".join(LINES)


def with_keys(**keys: Any) -> bytes:
    return json.dumps(json.loads(LINES[0]) | keys).encode()


def split(data: bytes) -> tuple[list[Record], list[BadLine]]:
    items = list(parse_lines(data, WHERE))
    return (
        [item for item in items if isinstance(item, Record)],
        [item for item in items if isinstance(item, BadLine)],
    )


# ---- reading -------------------------------------------------------------------------------------


def test_any_truncation_loses_at_most_the_last_line() -> None:
    """The file is truncated at every byte."""
    whole, _ = split(FILE)
    for cut in range(len(FILE) + 1):
        records, bad = split(FILE[:cut])
        # The line feed itself may be missing.
        is_complete = [line + b"\n" in LINES for line in FILE[:cut].split(b"\n") if line]
        assert records == whole[: sum(is_complete)], cut
        torn = [number for number, good in enumerate(is_complete, 1) if not good]
        assert [one.line for one in bad] == torn, cut


@settings(max_examples=100)
@given(st.integers(0, len(FILE) - 1), st.binary(min_size=1, max_size=8))
def test_damage_within_a_line_costs_only_that_line(at: int, damage: bytes) -> None:
    data = FILE[:at] + damage + FILE[at + len(damage) :]
    touched = set(range(at, at + len(damage)))
    start, records = 0, split(data)[0]
    for written, whole in zip(LINES, split(FILE)[0], strict=True):
        if not touched & set(range(max(start - 1, 0), start + len(written))):
            assert whole in records
        start += len(written)


NO_JSON = [b"null", b"5", b"[]", b"{}", b"\0" * 100, b"[" * 100_000, b'"x"', b"\xff", b"NaN"]
NO_STATES = [{"git": "x"}, {"code": {}}, {"code": ["x"]}]  # states of code that tables read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "") for text in NO_JSON),
        *((with_keys(environment=states), "environment: ") for states in NO_STATES),
    ],
)
def test_what_is_no_record_is_a_bad_line(text: bytes, words: str) -> None:
    good, (bad,) = split(text)
    assert good == []
    assert bad.line == 1
    assert bad.reason and bad.reason.startswith(words)


def test_a_later_schema_is_skipped_with_that_reason() -> None:
    later = {"schema_version": SCHEMA_VERSION + 1}
    wrong = with_keys(**later, status="excellent")  # invalid in this version too
    for line in (with_keys(**later), wrong, json.dumps(later).encode()):
        _, (bad,) = split(line)
        assert f"must be at most {SCHEMA_VERSION} in this version of the project" in bad.reason


# ---- what a record may say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        {"status": "ok"},
        ok(1.0) | failed("ok"),
        ok(1.0) | {"status": "error"},
        ok(1.0) | {"status": "fine"},
    ],
)
def test_measurements_if_and_only_if_ok(outcome: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        record(run(0), outcome)


@pytest.mark.parametrize(
    "facts",
    [
        {"samples_ms": {"forward": [1.0, math.nan]}},
        {"samples_ms": {"forward": [math.inf]}},
        {"samples_ms": {"forward": []}},
        {"samples_ms": {"forward": [[1.0], []]}},
        {"samples_ms": {"forward": [[1.0], [math.nan]]}},
        {"samples_ms": {"forward": [-1.0]}},
        {"samples_ms": {"forward": [None]}},
        {"flops": {"forward": math.nan}},
        {"compiling_seconds": math.inf},
    ],
)
def test_what_json_or_a_median_cannot_hold_is_no_measurement(facts: dict[str, Any]) -> None:
    """If such a value were accepted, the record would be written but could not be read."""
    with pytest.raises(ValidationError):
        Measurements.model_validate(facts)


def test_what_is_no_text_or_number_is_replaced(tmp_path: Path) -> None:
    """The message of an exception may quote a file name that is not UTF-8."""
    writer = RecordWriter(tmp_path / "records", "a")
    assert writer.write(record(run(0), ok(1.0, facts={"nan": math.nan})))
    (back,), bad = read_records(tmp_path)
    assert bad == [] and back.measurements is not None
    assert back.measurements.facts == {"nan": None}
    failure = Failure(type="OSError", message="no file 'caf\udce9'", traceback="\udcff")
    assert (failure.message, failure.traceback) == (r"no file 'caf\udce9'", r"\udcff")


# ---- following a file that grows -----------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.integers(0, len(FILE)), max_size=8))
def test_a_tail_sees_whole_lines_only_and_each_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    (folder / "records").mkdir()
    path = folder / "records" / "x.jsonl"
    tail = RecordTail(folder, {run(i).id for i in range(len(LINES))})
    seen: list[Record] = []
    written = 0
    for cut in [*sorted(cuts), len(FILE)]:
        with path.open("ab") as file:
            file.write(FILE[written:cut])
        written = cut
        seen += tail.new()
        assert len(seen) == FILE[:cut].count(b"\n")
    assert seen == split(FILE)[0]
    assert tail.new() == []


def test_a_tail_follows_only_the_runs_it_is_asked_for(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path, {run(1).id, run(3).id})
    assert tail.new() == []  # the folder does not exist yet
    for name in ("a", "b"):
        writer = RecordWriter(tmp_path / "records", name)
        for i in range(4):
            writer.write(record(run(i), ok(1.0)))
    assert sorted(r.run for r in tail.new()) == [run(1).id] * 2 + [run(3).id] * 2
    writer.write(record(run(3), failed("error")))
    assert [(r.run, r.status) for r in tail.new()] == [(run(3).id, "error")]


def test_a_tail_goes_on_after_what_cannot_be_read(tmp_path: Path) -> None:
    """Every worker follows the records. One damaged byte must not stop all of them."""
    tail = RecordTail(tmp_path, {run(0).id})
    folder = tmp_path / "records"
    folder.touch()
    assert tail.new() == []
    folder.unlink()
    folder.mkdir()
    damaged = LINES[0].replace(run(0).id.encode(), b"\xff\xfe")
    assert damaged != LINES[0]
    (folder / "x.jsonl").write_bytes(damaged + LINES[0][:200] + b"\n" + LINES[0])
    assert [r.run for r in tail.new()] == [run(0).id]


# ---- writing -------------------------------------------------------------------------------------


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
    full_disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that comes while the writer waits for its next try is used."""
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
    monkeypatch.setattr(time, "sleep", lambda seconds: (full_disk / "ballast").unlink())
    assert writer.write(big(written), tries=2)
    assert [r.run for r in records(full_disk)] == [run(i).id for i in range(written + 1)]


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
