"""Records on disk: whatever dies, what was written before stays readable."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.record import (
    SCHEMA_VERSION,
    BadLine,
    Failure,
    Measurements,
    Record,
    RecordTail,
    RecordWriter,
    parse_lines,
    read_records,
    write_json,
)
from jobs.run import Run, Shape
from tests.results_folder import failed, ok, record

WHERE = Path("records/x.jsonl")


def run(index: int) -> Run:
    return Run(f"{index:016x}", "toy", 1, {"size": index, "label": 'é "x"\n'}, Shape(), 60.0)


def line(index: int) -> bytes:
    outcome = failed("error", traceback="a\nb «ü»") if index % 3 == 2 else ok(0.25, 1e-3, 1 / 3)
    return record(run(index), outcome).model_dump_json(exclude_none=True).encode() + b"\n"


LINES = [line(i) for i in range(4)]
FILE = b"".join(LINES)


def split(data: bytes) -> tuple[list[Record], list[BadLine]]:
    items = list(parse_lines(data, WHERE))
    return (
        [item for item in items if isinstance(item, Record)],
        [item for item in items if isinstance(item, BadLine)],
    )


# ---- reading -------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was() -> None:
    for i, written in enumerate(LINES):
        ((back,), bad) = split(written)
        assert not bad
        assert back == Record.model_validate_json(written)
        assert back.model_dump_json(exclude_none=True).encode() + b"\n" == written
        assert back.params == run(i).params


def test_any_truncation_loses_at_most_the_last_line() -> None:
    """Every cut of a file, byte by byte."""
    whole, _ = split(FILE)
    ends = [sum(map(len, LINES[: i + 1])) for i in range(len(LINES))]
    for cut in range(len(FILE) + 1):
        records, bad = split(FILE[:cut])
        complete = sum(end - 1 <= cut for end in ends)  # the line feed itself may be missing
        assert records == whole[:complete], cut
        torn = cut - max([0, *(end for end in ends if end <= cut)]) > 0 and cut + 1 not in ends
        assert len(bad) == torn, cut
        if torn:
            assert bad[0].line == complete + 1


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=1, max_size=60), st.integers(0, 4))
def test_garbage_between_lines_is_reported_and_costs_only_itself(garbage: bytes, at: int) -> None:
    data = b"".join(LINES[:at]) + garbage + b"\n" + b"".join(LINES[at:])
    records, bad = split(data)
    assert records == split(FILE)[0]
    assert len(bad) == sum(bool(piece.strip()) for piece in garbage.split(b"\n"))
    for one in bad:
        assert str(WHERE) in str(one)
        assert "skipped" in str(one)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(FILE) - 1), st.binary(min_size=1, max_size=8))
def test_damage_within_a_line_costs_only_that_line(at: int, damage: bytes) -> None:
    data = FILE[:at] + damage + FILE[at + len(damage) :]
    touched = set(range(at, at + len(damage)))
    start, records = 0, split(data)[0]
    for written, whole in zip(LINES, split(FILE)[0], strict=True):
        if not touched & set(range(max(start - 1, 0), start + len(written))):
            assert whole in records
        start += len(written)


@pytest.mark.parametrize(
    "text", [b"null", b"5", b"[]", b"{}", b"\0" * 100, b"[" * 100_000, b'"x"', b"\xff", b"NaN"]
)
def test_what_is_no_record_is_a_bad_line(text: bytes) -> None:
    ((bad,), good) = split(text)[::-1]
    assert good == []
    assert bad.line == 1
    assert bad.reason


def test_a_later_schema_is_skipped_with_that_reason() -> None:
    later = json.loads(LINES[0]) | {"schema_version": SCHEMA_VERSION + 1}
    reason = f"schema version {SCHEMA_VERSION + 1}; this reads up to {SCHEMA_VERSION}"
    for changed in (
        later,
        later | {"status": "excellent"},  # though nothing else of it would be valid here
        {"schema_version": SCHEMA_VERSION + 1},
    ):
        _, (bad,) = split(json.dumps(changed).encode())
        assert bad.reason == reason


def test_unknown_keys_of_the_same_schema_are_taken() -> None:
    more = json.loads(LINES[0]) | {"colour": "red"}
    (records, bad) = split(json.dumps(more).encode())
    assert (len(records), bad) == (1, [])


# ---- what a record may say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "valid"),
    [
        (ok(1.0), True),
        (failed("error"), True),
        ({"status": "killed"}, True),
        ({"status": "ok"}, False),
        (ok(1.0) | failed("ok"), False),
        (ok(1.0) | {"status": "error"}, False),
        (ok(1.0) | {"status": "fine"}, False),
    ],
)
def test_measurements_if_and_only_if_ok(outcome: dict[str, Any], valid: bool) -> None:
    if valid:
        assert (record(run(0), outcome).measurements is not None) == (outcome["status"] == "ok")
    else:
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
    """Else the line would be written, and nobody could read it."""
    with pytest.raises(ValidationError):
        Measurements.model_validate(facts)


def test_facts_of_any_kind_survive_the_way_through_the_file(tmp_path: Path) -> None:
    facts = {"name": "caf\udce9", "nested": [{"k\udce9": [1, 2.5, None, True]}], "nan": math.nan}
    outcome = ok(1.0, facts=facts)
    writer = RecordWriter(tmp_path / "records", "a")
    assert writer.write(record(run(0), outcome))
    ((back,), bad) = read_records(tmp_path)
    assert bad == []
    assert back.measurements is not None
    assert back.measurements.facts == {
        "name": "caf?", "nested": [{"k?": [1, 2.5, None, True]}], "nan": None,
    }  # fmt: skip


def test_a_failure_may_quote_what_is_no_text(tmp_path: Path) -> None:
    """As a file name that is not UTF-8 does, in an exception's message."""
    failure = Failure(type="OSError", message="no file 'caf\udce9'", traceback="\udcff")
    assert (failure.message, failure.traceback) == ("no file 'caf?'", "?")


def test_samples_of_several_ranks_come_back_by_rank() -> None:
    outcome = {"status": "ok", "measurements": {"samples_ms": {"call": [[1.0, 2.0], [3.0]]}}}
    text = record(run(0), outcome).model_dump_json()
    measurements = Record.model_validate_json(text).measurements
    assert measurements is not None
    assert [list(rank) for rank in measurements.samples_ms["call"]] == [[1.0, 2.0], [3.0]]


# ---- writing -------------------------------------------------------------------------------------


def test_two_writers_of_a_folder_never_share_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writers = [RecordWriter(folder, "same") for _ in range(8)]
    assert len({writer.path for writer in writers}) == 8

    def work(number: int) -> None:
        for i in range(25):
            writers[number].write(record(run(number * 100 + i), ok(1.0)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records, bad = read_records(tmp_path)
    assert bad == []
    assert len({r.run for r in records}) == 200


def test_processes_write_side_by_side(tmp_path: Path) -> None:
    def work(number: int) -> None:
        writer = RecordWriter(tmp_path / "records", "same")
        for i in range(20):
            assert writer.write(record(run(number * 100 + i), ok(1.0)))

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=work, args=(n,)) for n in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    records, bad = read_records(tmp_path)
    assert len(list((tmp_path / "records").iterdir())) == 3
    assert (len(records), bad) == (60, [])


def test_a_torn_line_is_not_glued_to_the_next(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", "a")
    assert writer.write(record(run(1), ok(1.0)))
    with writer.path.open("ab") as file:  # a half line that nobody could undo
        file.write(LINES[2][:100])
    assert writer.write(record(run(3), ok(1.0)))
    records, bad = read_records(tmp_path)
    assert [r.run for r in records] == [run(1).id, run(3).id]
    assert [one.line for one in bad] == [2]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a real file system of 64 kB, which one file fills but for some 4 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root, and the right to mount")
    try:
        (folder / "ballast").write_bytes(b"x" * (56 << 10))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def big(index: int) -> Record:
    return record(run(index), ok(*[1 / 3] * 150))  # some 3 kB


def test_a_full_disk_costs_no_record_that_was_there(
    full_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = RecordWriter(full_disk / "records", "a")
    written = 0
    while writer.write(big(written), tries=1):
        written += 1
        assert written < 100
    assert "No space left on device" in capfd.readouterr().err
    records, bad = read_records(full_disk)
    assert (len(records), bad) == (written, [])  # no half line either
    assert writer.path.read_bytes().endswith(b"\n")
    (full_disk / "ballast").unlink()  # there is room again
    assert writer.write(big(written), tries=1)
    records, bad = read_records(full_disk)
    assert [r.run for r in records] == [run(i).id for i in range(written + 1)]
    assert bad == []


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
    records, bad = read_records(full_disk)
    assert records[-1].run == run(1).id
    assert bad == []


def test_a_limit_on_file_size_leaves_no_half_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quota, as RLIMIT_FSIZE: the write itself comes back short. Needs no root."""
    writer = RecordWriter(tmp_path / "records", "a")
    assert writer.write(big(0))
    size = writer.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        assert not writer.write(big(1), tries=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr().err
    assert f'unwritten record: {{"schema_version":1,"run":"{run(1).id}"' in printed  # not lost
    assert writer.path.stat().st_size == size
    assert writer.write(big(2), tries=1)
    records, bad = read_records(tmp_path)
    assert [r.run for r in records] == [run(0).id, run(2).id]
    assert bad == []


def test_a_disk_full_from_the_start_does_not_kill_the_writer(full_disk: Path) -> None:
    (full_disk / "more").touch()
    with (full_disk / "more").open("ab", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 4096)
            except OSError:
                break
    writer = RecordWriter(full_disk / "deeper" / "records", "a")
    assert not writer.write(big(0), tries=1)
    (full_disk / "ballast").unlink()
    assert writer.write(big(0), tries=1)
    assert len(read_records(full_disk / "deeper")[0]) == 1


def test_a_full_disk_under_the_log_does_not_kill_the_writer(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's stderr is a file of the same results folder."""
    writer = RecordWriter(full_disk / "records", "a")
    with (full_disk / "worker.log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        written = 0
        while writer.write(big(written), tries=1) and written < 100:
            written += 1
        assert not writer.write(big(0), tries=1)
        (full_disk / "ballast").unlink()
        assert writer.write(big(written), tries=1)
    assert len(read_records(full_disk)[0]) == written + 1


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": [1, 2]})
    assert json.loads(path.read_text()) == {"b": [1, 2]}
    assert os.listdir(path.parent) == ["state.json"]
    with pytest.raises(TypeError):
        write_json(path, {"c": object()})
    assert json.loads(path.read_text()) == {"b": [1, 2]}


# ---- following a file that grows -----------------------------------------------------------------


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, len(FILE)), max_size=8))
def test_a_tail_sees_whole_lines_only_and_each_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    (folder / "records").mkdir()
    path = folder / "records" / "x.jsonl"
    tail = RecordTail(folder)
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
    assert tail.new() == []  # not even the folder is there
    for name in ("a", "b"):
        writer = RecordWriter(tmp_path / "records", name)
        for i in range(4):
            writer.write(record(run(i), ok(1.0)))
    assert sorted(r.run for r in tail.new()) == [run(1).id] * 2 + [run(3).id] * 2
    writer.write(record(run(3), failed("error")))
    assert [(r.run, r.status) for r in tail.new()] == [(run(3).id, "error")]


def test_a_tail_passes_over_torn_and_foreign_lines(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path)
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "x.jsonl"
    path.write_bytes(LINES[0] + LINES[1][:50] + b"\n" + LINES[3] + LINES[2][:-1])
    assert [r.run for r in tail.new()] == [run(0).id, run(3).id]
    with path.open("ab") as file:
        file.write(b"\n")
    assert [r.run for r in tail.new()] == [run(2).id]
