"""Planning of a submission: which runs are skipped, and how the others are packed into jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.block import Block
from jobs.launch.expected_time import ExpectedTime
from jobs.launch.packing import STARTUP_MIN, local_slots, pack, worst_case_gpu_hours
from jobs.launch.plan_submission import Options, prepare
from jobs.launch.resume import Task, split_done, tasks_of
from jobs.provenance import cpu_device
from jobs.results.manifest import Executor, Job
from jobs.results.record import Record
from jobs.results.record_writer import RecordWriter
from jobs.run import Run, Shape
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, TOY, ResultsFolder, failed, load, ok, record, write

RUN = Run("0123456789abcdef", "toy", 1, {"size": 1}, Shape(), 60.0)


def attempts(*statuses: str, device: str = CPU) -> list[Record]:
    return [
        record(RUN, ok(1.0) if status == "ok" else failed(status), 0, device, 1000.0 + i)
        for i, status in enumerate(statuses)
    ]


def is_done(records: list[Record], **flags: bool) -> bool:
    todo, done = split_done([(RUN, 0)], records, lambda r, run: r.device == CPU, **flags)
    assert len(todo) + len(done) == 1
    return bool(done)


# ---- resume --------------------------------------------------------------------------------------


def test_records_of_other_devices_runs_and_repeats_do_not_count() -> None:
    assert not is_done(attempts("ok", device="NVIDIA H200"))
    assert not is_done(attempts("error", device="NVIDIA H200"))
    assert not is_done(attempts("ok"), force=True)
    records = attempts("oom", "killed")
    assert not is_done(records) and not is_done(records[::-1])  # ordered by time, not by position
    # Later failures on another device do not affect the result on this one.
    here = attempts("ok")
    assert is_done([*here, *attempts("killed", "killed", device="NVIDIA H200")])
    other = Run("fedcba9876543210", "toy", 1, {"size": 2}, Shape(), 60.0)
    tasks: list[Task] = [(RUN, 0), (RUN, 1), (other, 0)]
    todo, done = split_done(tasks, here, lambda r, run: True)
    assert (todo, done) == ([(RUN, 1), (other, 0)], [(RUN, 0)])


def test_resume_in_a_folder(tmp_path: Path) -> None:
    """`prepare` plans only the unfinished runs of a folder for a second submission."""
    from jobs import provenance

    here = provenance.cpu_device()
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4, 5]}\nrepeats: 2\n")
    folder = ResultsFolder(tmp_path / "out")

    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        if params["size"] == 1 or repeat == 1:
            return ok(1.0)
        return {2: failed("oom"), 3: failed("killed"), 4: None, 5: failed("unsupported")}[
            params["size"]
        ]

    folder.submit(loaded, outcome, device=here)

    def todo(**flags: bool) -> list[tuple[int, int]]:
        prepared = prepare(loaded, Options(Executor.local, tmp_path / "out", **flags), "sweep.yaml")
        jobs = prepared.manifest.jobs
        planned = [(run, repeat) for job in jobs for run, repeat in job.tasks]
        left_out = {(run.id, repeat) for run, repeat in prepared.done}
        assert len(planned) + len(left_out) == 10
        assert not left_out & set(planned)
        return sorted((prepared.manifest.runs[run].params["size"], n) for run, n in planned)

    assert todo() == [(3, 0), (4, 0)]
    assert todo(retry_failed=True) == [(2, 0), (3, 0), (4, 0)]
    assert len(todo(force=True)) == 10


def test_another_kind_of_device_measures_all_again(tmp_path: Path) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2]}\n")
    ResultsFolder(tmp_path / "out").submit(loaded, lambda params, repeat: ok(1.0), "cpu: another")
    prepared = prepare(loaded, Options(Executor.local, tmp_path / "out"), "sweep.yaml")
    assert [len(job.tasks) for job in prepared.manifest.jobs] == [2]


def test_results_of_older_code_are_measured_again(tmp_path: Path) -> None:
    from jobs import provenance

    hashes = {1: None, 2: "0" * 16}  # the third run has the hash of the present code
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4]}\n")

    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any]:
        size = params["size"]
        own = {"source_hash": hashes[size]} if size in hashes else {}
        return (failed("oom") if size == 4 else ok(1.0)) | own

    folder = ResultsFolder(tmp_path / "out")
    folder.submit(loaded, outcome, device=provenance.cpu_device())

    def planned(**flags: bool) -> tuple[set[int], list[str], bool]:
        prepared = prepare(loaded, Options(Executor.local, folder.path, **flags), "sweep.yaml")
        runs = [
            prepared.manifest.runs[run] for job in prepared.manifest.jobs for run, _ in job.tasks
        ]
        return {run.params["size"] for run in runs}, prepared.notes, prepared.manifest.keep_stale

    which = "2 results of older code (1 without a source hash)"
    again = f"{which} measured again; --keep-stale keeps them"
    assert planned() == ({1, 2}, [again], False)
    assert planned(keep_stale=True) == (set(), [f"{which} kept"], True)
    assert planned(force=True) == ({1, 2, 3, 4}, [], False)
    hashes[1] = folder.sources.source_hash(expand(loaded).runs[0])
    folder.submit(loaded, outcome, device=provenance.cpu_device())
    assert planned()[0] == {2}


# ---- packing -------------------------------------------------------------------------------------


def test_repeats_go_round_so_that_drift_is_spread(tmp_path: Path) -> None:
    expansion = expand(load(tmp_path, TOY + "grid: {size: [1, 2]}\n"))
    assert [(run.params["size"], n) for run, n in tasks_of(expansion.runs, 3)] == [
        (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2),
    ]  # fmt: skip


def test_a_job_asks_for_the_time_that_its_runs_may_take() -> None:
    runs = [Run(str(i), "toy", 1, {}, Shape(), 90.0) for i in range(3)]
    (job,) = pack([(run, 0) for run in runs], 5)
    assert job.timeout_min == 5 + STARTUP_MIN  # 4.5 min of runs, rounded up
    block = Block("b", "0", ("0", "1"), 2, aa=False, trial=True)
    (job,) = pack([(run, n) for n in range(2) for run in runs[:2]], 5, blocks=[block])
    assert job.timeout_min == 9 + STARTUP_MIN  # two rounds and the trial
    given = Run("x", "toy", 1, {}, Shape(timeout_min=3), 90.0)
    assert pack([(given, 0)], 5)[0].timeout_min == 3


@pytest.mark.parametrize(
    ("gpus_per_node", "gpus", "parallel", "sizes"),
    [
        (0, 8, None, [20]),  # a job without GPUs runs alone
        (0, 0, 2, [3, 3, 3, 3, 3, 3, 2]),  # ceil(20 / (4 * 2 slots))
        (1, 1, None, [20]),
        (1, 2, None, [3, 3, 3, 3, 3, 3, 2]),
        (2, 3, None, [20]),
        (1, 8, 1, [20]),
        (4, 2, None, [20]),  # this machine cannot execute the job
        (1, 64, None, [1] * 20),
    ],
)
def test_the_local_queue_packs_runs_so_that_its_slots_stay_busy(
    gpus_per_node: int, gpus: int, parallel: int | None, sizes: list[int]
) -> None:
    shape = Shape(gpus_per_node=gpus_per_node)
    tasks: list[Task] = [(Run(str(i), "toy", 1, {}, shape, 60.0), 0) for i in range(20)]
    slots = local_slots(gpus, parallel)
    assert [len(job.tasks) for job in pack(tasks, None, slots)] == sizes
    fixed = [len(job.tasks) for job in pack(tasks, 8, slots)]
    assert fixed == [8, 8, 4]  # the user's number counts
    assert [len(job.tasks) for job in pack(tasks, None)] == [1] * 20  # Slurm and debug
    alone = Shape(gpus_per_node=gpus_per_node, exclusive=True)
    assert slots(alone) == 1


def test_worst_case_gpu_hours() -> None:
    jobs = [Job(0, Shape(nodes=2, gpus_per_node=4), 90, []), Job(1, Shape(), 600, [])]
    assert worst_case_gpu_hours(jobs) == 12.0  # 1.5 h x 2 nodes x 4 GPUs; the second has no GPUs


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.builds(Shape, nodes=st.integers(1, 2), gpus_per_node=st.integers(0, 2))),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_packing_keeps_every_task_once_with_its_likes(
    shapes: list[Shape], runs_per_job: int, repeats: int
) -> None:
    runs = {str(i): Run(str(i), "toy", 1, {}, shape, 60.0) for i, shape in enumerate(shapes)}
    tasks = tasks_of(list(runs.values()), repeats)
    jobs = pack(tasks, runs_per_job)
    assert [job.index for job in jobs] == list(range(len(jobs)))
    packed = [task for job in jobs for task in job.tasks]
    assert sorted(packed) == sorted((run.id, repeat) for run, repeat in tasks)
    for job in jobs:
        assert 1 <= len(job.tasks) <= runs_per_job
        assert {runs[run].shape for run, _ in job.tasks} == {job.shape}
    by_shape = [[t for job in jobs if job.shape == shape for t in job.tasks] for shape in shapes]
    order = [(run.id, repeat) for run, repeat in tasks]
    for members in by_shape:
        assert members == sorted(members, key=order.index)  # in the order of the tasks
    for shape in set(shapes):  # no more jobs than necessary
        count = sum(job.shape == shape for job in jobs)
        assert count == -(-shapes.count(shape) * repeats // runs_per_job)


def test_dry_run_lists_only_the_runs_that_it_would_execute(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    text = TOY + "grid: {size: [1, 2, 3]}\n"
    folder.submit(load(tmp_path, TOY + "grid: {size: [1, 2]}\n"), lambda *_: ok(1.0), cpu_device())
    sweep = write(tmp_path, text)
    done = call("jobs.submit", sweep, "--local", "--dry-run", "--out", folder.path)
    assert "1 (2 done, 0 queued or running)" in done.stdout
    assert [line[-6:] for line in done.stdout.splitlines() if "toy size=" in line] == ["size=3"]


def test_a_limit_shorter_than_a_timeout_is_noted(tmp_path: Path) -> None:
    sweep = write(tmp_path, TOY + "fixed: {size: 1}\ntimeout_s: 300\nresources: {timeout_min: 1}\n")
    done = call("jobs.submit", sweep, "--dry-run")
    assert "note: resources.timeout_min is 1 min, but timeout_s allows a run 300 s" in done.stderr
    assert "note: " not in call("jobs.submit", sweep, "timeout_s=60", "--dry-run").stderr
    assert "timeout_min" not in call("jobs.submit", sweep, "--local", "--dry-run").stderr


def test_dry_run_tells_the_time_of_a_round(tmp_path: Path) -> None:
    """The rounds of a block take 3 + 2 * 1.5 minutes on 2 GPUs. The mean of earlier runs counts."""
    text = TOY + "grid: {size: [1, 2], mode: [fast, exact]}\nresources: {gpus_per_node: 2}\n"
    blocks = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 4}\n"
    sweep, out = write(tmp_path, text + blocks), tmp_path / "out"

    def shown(row: str = "paired", *options: str) -> str:
        plan = call("jobs.submit", sweep, "--local", "--out", out, "--dry-run", *options).stdout
        return next(line for line in plan.splitlines() if line.startswith(row)).strip()

    assert shown().endswith("2 blocks of 4 rounds, 6 processes a round")
    assert shown("runs").endswith("4, 24 processes (rounds and A/A)")
    loaded = load_sweep(sweep)
    manifest = ResultsFolder(out).submit(loaded, lambda params, repeat: None)
    minutes = {"fast": (2.0, 1.0), "exact": (4.0, 2.0)}
    writer = RecordWriter(out / "records", "earlier")
    for run in manifest.runs.values():
        for repeat, took in enumerate(minutes[run.params["mode"]]):
            made = record(run, ok(1.0), repeat, finished_at=1e6)
            assert writer.write(made.model_copy(update={"started_at": 1e6 - 60 * took}))
    # 2 blocks of 6 minutes, on 2 GPUs.
    assert shown().endswith("6 processes a round, about 12 min, 0.40 GPU-hours a round")
    few = ("blocks.rounds=1", "--filter", "size == 1")
    assert shown("expected", *few).split()[1:3] == ["6.0", "min"]


@pytest.mark.parametrize(
    ("minutes", "text"), [(0.02, "1 s"), (0.5, "30 s"), (1.25, "1.2 min"), (14.4, "14 min")]
)
def test_short_times_are_in_seconds(minutes: float, text: str) -> None:
    assert ExpectedTime(minutes, gpu_hours=0, known=1, folders=[]).time_text == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("sweeps/flash.yaml", "GPU or more, but 0 are visible here; a variant for CPUs is swe"),
        ("sweeps/all_reduce.yaml", None),  # some of its runs need no GPU
    ],
)
def test_a_machine_without_gpus_is_told_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sweep: str, words: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)  # the sweeps are installed with the project
    told = call("jobs.submit", sweep, "--local", "--dry-run").stderr
    assert (words in told) if words else ("are visible here" not in told), told
    assert "visible here" not in call("jobs.submit", sweep, "--dry-run").stderr
