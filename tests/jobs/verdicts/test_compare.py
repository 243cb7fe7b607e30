"""`aggregate.py compare`: bad input, speed and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from jobs.errors import CommandError
from jobs.report.compare_text import markdown_comparison
from jobs.verdicts.compare import compare_folders
from jobs.verdicts.folder_cells import read_side
from scripts.bench_launcher import command, write_results
from tests.jobs.compared_folders import Pair, blocks, noisy
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, TOY, load, ok


def test_unrelated_folders_are_an_error_without_a_table(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.before.submit(pair.loaded, lambda *_: ok(1.0))
    pair.after.submit(load(tmp_path, TOY + "grid: {size: [2]}\n"), lambda *_: ok(1.0))
    done = call("aggregate", "compare", pair.before.path, pair.after.path)
    assert done.returncode == 2 and done.stdout == done.stderr
    assert "have no run in common: their benchmarks, versions or parameters differ" in done.stderr


def test_other_kinds_of_device_are_not_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(lambda *_: ok(1.0), lambda *_: ok(9.0), (CPU, "cpu: another"))
    with pytest.raises(
        CommandError, match=r"same kind of device: got cpu: Test.* and cpu: another"
    ):
        pair.compared()


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(lambda *_: ok(1.0), lambda *_: None)
    for order in ((pair.before, pair.after), (pair.after, pair.before)):
        done = call("aggregate", "compare", *(folder.path for folder in order))
        assert (done.returncode, "after has no records" in done.stderr) == (2, True), done.stdout
    alone = call("aggregate", "compare", pair.after.path)
    assert (alone.returncode, "has no records" in alone.stderr) == (2, True)


def test_a_folder_without_blocks_says_how_to_get_them(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.before.submit(pair.loaded, lambda *_: ok(1.0))
    done = call("aggregate", "compare", pair.before.path)
    assert done.returncode == 2
    assert all(words in done.stderr for words in ("no paired rounds", "key `blocks`", "--against"))


def test_a_folder_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = blocks(tmp_path, noisy(lambda run: 1.0))
    done = call("aggregate", "compare", folder.path, folder.path)
    assert (done.returncode, "must be different folders" in done.stderr) == (2, True)


@pytest.mark.parametrize("margin", ["0", "-0.1", "1", "nan", "inf"])
def test_margins_that_are_not_valid(tmp_path: Path, margin: str) -> None:
    done = call("aggregate", "compare", tmp_path, "--margin", margin)
    assert done.returncode == 2
    assert "--margin must be greater than 0 and less than 1, got" in done.stderr


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("sise == 1", "'sise' is not a parameter; did you mean 'size'?"),
        ("size == 7", "no run satisfies the condition 'size == 7'"),
        ("mode == quick", "mode"),
        ("size ==", "is not a comparison"),
        ("repeat == 1", "'repeat' is not a parameter"),
    ],
)
def test_conditions_that_are_not_valid(tmp_path: Path, condition: str, words: str) -> None:
    folder = blocks(tmp_path, noisy(lambda run: 1.0))
    done = call("aggregate", "compare", folder.path, "--where", condition)
    assert done.returncode == 2 and "--where: " in done.stderr and words in done.stderr


def write_two(tmp_path: Path, count: int) -> tuple[Path, Path]:
    folders = tmp_path / "before", tmp_path / "after"
    for seed, folder in enumerate(folders):
        write_results(folder, count, seed)
    return folders


def with_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many calls it makes: a measure of work without noise."""
    count = 0

    def each_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(each_event)
    try:
        return function(), count
    finally:
        sys.setprofile(before)


def work(folders: tuple[Path, Path], runs: int) -> tuple[int, int]:
    """The number of calls that reading two folders and comparing them make."""
    sides, reading = with_calls(lambda: [read_side(each) for each in folders])
    text, comparing = with_calls(lambda: markdown_comparison(compare_folders(*sides), False))
    assert f"{3 * runs} unsure" in text
    return reading, comparing


@pytest.mark.slow
def test_work_of_a_comparison_is_proportional_to_its_runs(tmp_path: Path) -> None:
    """Comparing makes 1,600 calls a run with three cells, and reading the two folders 400."""
    few = work(write_two(tmp_path / "few", 100), 100)
    many = work(write_two(tmp_path / "many", 1000), 1000)
    assert many[0] < 12 * few[0] and many[1] < 12 * few[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # to write 200,000 records takes 1 to 3 minutes on an idle machine
def test_two_folders_with_100_000_records_each(tmp_path: Path) -> None:
    folders = map(str, write_two(tmp_path, 100_000))
    seconds, memory = command(sys.executable, "aggregate.py", "compare", *folders, exit_code=3)
    assert seconds < 100  # the target is 30 s on an idle core
    assert memory < 2.5e9
