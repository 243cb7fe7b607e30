"""GPU-hours of attempts, on records whose times are worked by hand, and the command `hours`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.processes import ProcessHandle
from jobs.report.hours import Hours, hours
from jobs.results.manifest import write_handles
from jobs.results.run_states import observe
from tests.benchmarks import toy
from tests.jobs.harness import call
from tests.jobs.results_folder import GRID, TOY, Outcome, ResultsFolder, failed, load, ok

HOUR = 3600
GPU = "resources: {gpus_per_node: 1}\n"
TWO_GPUS = TOY + "grid: {size: [1, 2]}\nresources: {nodes: 2, gpus_per_node: 1}\n"
BLOCK = (
    f"{TOY}grid: {{size: [1], mode: [fast, exact]}}\n{GPU}"
    "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 1, aa: false}\n"
)


def hours_of(folder: ResultsFolder) -> Hours:
    (row,) = hours(observe(folder.path))
    return row


def wasted_attempts(folder: ResultsFolder) -> float:
    """Return the number of attempts with one GPU, each of half a second, that were wasted."""
    return hours_of(folder).gpu["wasted"] * HOUR / 0.5


def attempt(outcome: dict[str, Any], start: float, took: float, **stages: float) -> dict[str, Any]:
    """Return an outcome with its times and those of waiting and of stages, in hours."""
    return outcome | {
        "started_at": start * HOUR,
        "finished_at": (start + took) * HOUR,
        "seconds": {stage: each * HOUR for stage, each in stages.items()},
    }


def test_stages_and_waste_add_up(folder: ResultsFolder) -> None:
    error = attempt(failed("error"), 1, 2, waiting=0.5, starting=1, measuring=1)
    long = attempt(ok(1.0), 4, 8, waiting=0.25, starting=1, compiling=2, measuring=4)
    short = attempt(ok(1.0), 12, 1, waiting=0.25, starting=0.25, measuring=0.5)
    folder.submit(TWO_GPUS, [error, None])
    folder.submit(TWO_GPUS, [long, short])
    row = hours_of(folder)
    assert (row.sweep, len(row.runs), row.attempts) == ("toy", 2, 3)
    assert row.queued == pytest.approx(0.75)  # of two jobs, not of each record
    assert row.wall == pytest.approx(11)
    wanted = {"starting": 2.5, "compiling": 4, "measuring": 9, "other": 2.5, "wasted": 4}
    assert row.gpu == pytest.approx(wanted)
    assert sum(row.gpu.values()) == pytest.approx(2 * row.wall)


def test_a_job_that_was_started_again_waited_until_its_first_start(folder: ResultsFolder) -> None:
    folder.submit(TWO_GPUS, [attempt(ok(1.0), 8, 1, waiting=each) for each in (0.5, 7.5)])
    assert hours_of(folder).queued == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("outcomes", "wasted"),
    [
        ([ok(1.0), failed("killed")], [1]),  # the ok attempt stays the result
        ([failed("oom"), failed("oom")], [0]),
        ([failed("error"), failed("oom")], [0]),
        ([failed("wrong")], [0]),
        ([failed("unsupported")], []),
    ],
)
def test_which_attempts_are_wasted(
    folder: ResultsFolder, outcomes: list[dict[str, Any]], wasted: list[int]
) -> None:
    for n, outcome in enumerate(outcomes):
        folder.submit(TOY + "fixed: {size: 1}\n" + GPU, attempt(outcome, n, 2.0**n))
    assert hours_of(folder).gpu["wasted"] == pytest.approx(sum(2.0**n for n in wasted))


def test_results_of_another_device_are_not_wasted(folder: ResultsFolder) -> None:
    for device in ("H100", "H200"):
        folder.submit(TWO_GPUS, ok(1.0), device)
    assert hours_of(folder).gpu["wasted"] == 0


def test_outdated_versions_are_wasted(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        monkeypatch.setattr(toy, "VERSION", version)
        folder.submit(TOY + "fixed: {size: 1}\n" + GPU, ok(1.0))
    assert wasted_attempts(folder) == pytest.approx(1)


def first(count: int) -> Callable[..., Outcome]:
    """Return outcomes of which the first `count` are ok, and the others missing."""
    left = iter([ok(1.0)] * count)
    return lambda *_: next(left, None)


@pytest.mark.parametrize(
    ("counts", "live", "wasted"),
    [
        ([2], False, 0),
        ([1, 2], False, 1),  # the first execution was interrupted
        ([2, 2], False, 2),  # the round was executed again, e.g. because of a throttled GPU
        ([1], False, 2),  # also its trial, as no round after it counts
        ([1], True, 0),  # a job is executing the round
        ([1, 1], True, 1),
    ],
)
def test_rounds(folder: ResultsFolder, counts: list[int], live: bool, wasted: int) -> None:
    """After a trial of one attempt, a round of two attempts was executed, each time in part."""
    folder.submit_rounds(BLOCK, first(1), trial=True)
    for count in counts:
        manifest = folder.submit_rounds(BLOCK, first(count))
    if live:
        manifest.handles[0] = ProcessHandle.of_this_process()  # stands for a live job
        write_handles(manifest)
    assert wasted_attempts(folder) == pytest.approx(wasted)


# ---- the command ---------------------------------------------------------------------------------


def test_a_table_has_the_total_of_several_folders(tmp_path: Path) -> None:
    outcomes = [attempt(ok(1.0), 0, 2, measuring=1.5), attempt(failed("error"), 2, 1)]
    for name in ("one", "two"):
        ResultsFolder(tmp_path / name).submit(TOY + "grid: {size: [1, 2]}\n" + GPU, outcomes)
    header, _, *rows = call("jobs", "hours", tmp_path / "one", tmp_path / "two").stdout.splitlines()
    assert "| wall (h) | starting (GPU-h) |" in " ".join(header.split()), header
    assert [[c.strip() for c in line.split("|")[5:-1]] for line in rows] == [
        ["0.000", "3.000", "0.000", "0.000", "1.500", "0.500", "1.000", "3.000"],
        ["0.000", "3.000", "0.000", "0.000", "1.500", "0.500", "1.000", "3.000"],
        ["0.000", "6.000", "0.000", "0.000", "3.000", "1.000", "2.000", "6.000"],
    ]


def test_by_default_it_is_about_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = call("jobs", "hours")
    assert nothing.returncode == 2 and "pass a folder as an argument" in nothing.stderr
    for name in ("a", "h200/b"):
        folder = ResultsFolder(tmp_path / "logs" / name)
        folder.submit(load(tmp_path, TOY + GRID), ok(1.0))
    (tmp_path / "logs" / "cut" / "submissions").mkdir(parents=True)
    done = call("jobs", "hours", "--json")
    rows = json.loads(done.stdout.removeprefix(done.stderr))["rows"]
    wall = pytest.approx(4 * 0.5 / HOUR)
    assert [(r["folder"], r["attempts"], r["wall_hours"], r["total_gpu_hours"]) for r in rows] == [
        ("logs/a", 4, wall, None),
        ("logs/h200/b", 4, wall, None),
    ]
    assert "logs/cut: skipped" in done.stderr
