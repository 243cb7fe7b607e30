"""GPU-hours of attempts, on records whose times are worked by hand, and the command `hours`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.report.hours import Hours, hours, lost_attempts
from jobs.results.counting import place_of
from jobs.results.record import Record, Seconds
from jobs.results.run_states import Observation, TaskState
from jobs.run import Run, Shape
from jobs.status import JobState, Status
from tests.jobs.harness import call
from tests.jobs.results_folder import GRID, TOY, ResultsFolder, failed, in_round, load, ok, record

HOUR = 3600
HoursOf = Callable[..., Hours]


def sweep_run(index: int, version: int = 1) -> Run:
    shape = Shape(nodes=2, gpus_per_node=1)
    return Run(f"{index:016x}", "toy", version, {"size": index}, shape, 60.0)


RUN = sweep_run(1)


@pytest.fixture
def hours_of(folder: ResultsFolder) -> HoursOf:
    """Return a function that gives the hours of a folder with one job, from its records."""
    submitted = folder.submit(TOY + "fixed: {size: 1}\n", None)

    def made(records: list[Record], *runs: Run, live: bool = False, hidden: str = "") -> Hours:
        by_id = {run.id: run for run in runs}
        tasks = dict.fromkeys((r.run, r.repeat) for r in records)
        shown = [TaskState(by_id[r], n, Status.ok) for r, n in tasks if r != hidden]
        manifest = replace(submitted, id="before", runs=by_id)
        states = {"before": {0: JobState(Status.running if live else Status.missing, "")}}
        (row,) = hours(Observation(folder.path, [manifest], records, [], shown, [], states))
        return row

    return made


def attempt(
    run: Run,
    outcome: dict[str, Any],
    start: float,
    took: float,
    seconds: tuple[float | None, ...] = (None, None, None, None),
    **changes: Any,
) -> Record:
    """Return a record. Times are in hours; `seconds` has those of waiting and of the stages."""
    names = ("waiting", "starting", "compiling", "measuring")
    stages = {n: s and s * HOUR for n, s in zip(names, seconds, strict=True)}
    made = record(run, outcome, finished_at=(start + took) * HOUR)
    times = {"started_at": start * HOUR, "seconds": Seconds.model_validate(stages)}
    return made.model_copy(update=times | changes)


def test_stages_and_waste_add_up(hours_of: HoursOf) -> None:
    second = sweep_run(2)
    records = [
        attempt(RUN, failed("error"), 1, 2, (0.5, 1, None, 1)),
        attempt(RUN, ok(1.0), 4, 8, (0.5, 1, 2, 4), attempt=2),
        attempt(second, ok(1.0), 12, 1, (0.5, 0.25, None, 0.5)),
    ]
    row = hours_of(records, RUN, second)
    assert (row.sweep, len(row.runs), row.attempts) == ("toy", 2, 3)
    assert row.queued == pytest.approx(0.5)  # of the job, not of each record
    assert row.wall == pytest.approx(11)
    # Each attempt uses 2 nodes with a GPU each.
    wanted = {"starting": 2.5, "compiling": 4, "measuring": 9, "other": 2.5, "wasted": 4}
    assert row.gpu == pytest.approx(wanted)
    assert sum(row.gpu.values()) == pytest.approx(2 * row.wall)


def test_a_job_that_was_started_again_waited_until_its_first_start(hours_of: HoursOf) -> None:
    records = [
        attempt(RUN, failed("preempted"), 1, 1, (0.5, None, None, None)),
        attempt(RUN, ok(1.0), 8, 1, (7.5, None, None, None), attempt=2),
        attempt(RUN, ok(1.0), 9, 1, (0.25, None, None, None), repeat=1, job=1),
    ]
    assert hours_of(records, RUN).queued == pytest.approx(0.75)


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
    hours_of: HoursOf, outcomes: list[dict[str, Any]], wasted: list[int]
) -> None:
    records = [attempt(RUN, o, n, 2.0**n, attempt=n + 1) for n, o in enumerate(outcomes)]
    row = hours_of(records, RUN)
    assert row.gpu["wasted"] == pytest.approx(sum(2 * 2.0**n for n in wasted))


def test_results_of_another_device_are_not_wasted(hours_of: HoursOf) -> None:
    records = [attempt(RUN, ok(1.0), n, 1, device=name) for n, name in enumerate(("H100", "H200"))]
    assert hours_of(records, RUN).gpu["wasted"] == 0


def test_outdated_versions_are_wasted(hours_of: HoursOf) -> None:
    new = sweep_run(2, version=2)
    records = [attempt(RUN, ok(1.0), 0, 1), attempt(new, ok(1.0), 1, 1)]
    assert hours_of(records, RUN, new, hidden=RUN.id).gpu["wasted"] == 2


def round_of(execution: str, count: int, start: float) -> list[Record]:
    """Return the first `count` attempts of a round with two attempts. Each takes an hour."""
    places = [in_round(position, 2, execution) for position in range(count)]
    return [
        attempt(RUN, ok(1.0), start + n, 1, repeat=n, block=place) for n, place in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("counts", "live", "wasted"),
    [
        ((2,), False, 0),
        ((1, 2), False, 2),  # the first execution was interrupted
        ((2, 2), False, 4),  # the round was executed again, e.g. because of a throttled GPU
        ((1,), False, 2),
        ((1,), True, 0),  # a job is executing the round
        ((1, 1), True, 2),
    ],
)
def test_rounds(hours_of: HoursOf, counts: tuple[int, ...], live: bool, wasted: float) -> None:
    records = [
        one
        for number, count in enumerate(counts)
        for one in round_of(f"e{number}", count, 10 * number)
    ]
    assert hours_of(records, RUN, live=live).gpu["wasted"] == pytest.approx(wasted)
    place = place_of(records[0]).model_copy(update={"trial": True, "execution": "t"})
    records.insert(0, records[0].model_copy(update={"block": place}))
    wasted += 2 * (wasted == 2 * sum(counts))  # a trial is wasted if no round after it counts
    assert hours_of(records, RUN, live=live).gpu["wasted"] == pytest.approx(wasted)


def test_attempts_without_a_record_are_counted() -> None:
    records = [attempt(RUN, ok(1.0), 0, 1, attempt=3), attempt(RUN, ok(1.0), 1, 1, repeat=1)]
    assert lost_attempts(records) == 2  # attempts 1 and 2 of the first repeat


# ---- the command ---------------------------------------------------------------------------------


def test_a_table_has_the_total_of_several_folders(tmp_path: Path) -> None:
    """Each of the 144 attempts in a folder took half a second on one GPU. Half of them failed."""
    keys = "resources: {gpus_per_node: 1}\nrepeats: 72\n"
    text = TOY + "grid: {size: [1, 2]}\n" + keys
    for name in ("one", "two"):
        ResultsFolder(tmp_path / name).submit(text, [ok(1.0), failed("error")])
    folders = tmp_path / "one", tmp_path / "two"
    markdown = call("jobs", "hours", *folders).stdout.splitlines()
    assert "| wall (h) | starting (GPU-h) |" in " ".join(markdown[0].split()), markdown[0]
    assert [[c.strip() for c in line.split("|")[5:-1]] for line in markdown[2:]] == [
        ["0.000", "0.020", "0.000", "0.000", "0.000", "0.010", "0.010", "0.020"],
        ["0.000", "0.020", "0.000", "0.000", "0.000", "0.010", "0.010", "0.020"],
        ["0.000", "0.040", "0.000", "0.000", "0.000", "0.020", "0.020", "0.040"],
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
