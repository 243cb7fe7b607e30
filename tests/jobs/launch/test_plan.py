"""Planning of a submission and of `retry`: which runs are skipped, how others are packed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import InputError
from jobs.launch.packing import STARTUP_MIN, local_slots, pack
from jobs.launch.plan_submission import Options, prepare
from jobs.provenance import cpu_device
from jobs.results.manifest import Executor
from jobs.run import Run, Shape
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.benchmarks import misbehave
from tests.jobs.harness import call, records, write_sweep
from tests.jobs.results_folder import TOY, Outcome, ResultsFolder, failed, load, ok, write

# ---- resume --------------------------------------------------------------------------------------


def test_resume_in_a_folder(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4, 5, 6]}\nrepeats: 2\n")
    killed, crashed = failed("killed"), failed("killed", "SIGSEGV")
    outcomes = [ok(1.0), failed("oom"), killed, None, failed("unsupported"), crashed]

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        return ok(1.0) if repeat else outcomes[params["size"] - 1]

    def todo(**flags: bool) -> list[tuple[int, int]]:
        """Return size and repeat of each task to execute."""
        prepared = prepare(loaded, Options(Executor.local, folder.path, **flags), "sweep.yaml")
        manifest = prepared.manifest
        planned = [task for job in manifest.jobs for task in job.tasks]
        assert len({*planned, *prepared.done}) == 12 == len(planned) + len(prepared.done)
        repeats = [repeat for _, repeat in planned]
        assert repeats == sorted(repeats)  # each run once before any is repeated
        return sorted((manifest.runs[run].params["size"], repeat) for run, repeat in planned)

    for _ in range(2):
        folder.submit(loaded, outcome, cpu_device())
        assert todo() == [(3, 0), (4, 0), (6, 0)]
    folder.submit(loaded, outcome, cpu_device())
    assert todo() == [(3, 0), (4, 0)]  # a run that always crashes is not repeated for ever
    assert todo(retry_failed=True) == [(2, 0), (3, 0), (4, 0), (6, 0)]
    assert len(todo(force=True)) == 12
    folder.submit(loaded, ok(1.0), device="cpu: another")
    assert todo() == [(3, 0), (4, 0)]
    # What failed here is told, although it is ok on the other device.
    failures = prepare(loaded, Options(Executor.local, folder.path), "sweep.yaml").failed_before
    assert sorted(record.params["size"] for record in failures) == [6]
    # Slurm chooses the device, so the plan has all runs, and tells that jobs may skip some.
    notes = prepare(loaded, Options(Executor.slurm, folder.path), "sweep.yaml").notes
    assert any(note.startswith("12 of those") and "cpu: another" in note for note in notes)


# ---- processes -----------------------------------------------------------------------------------


def test_processes_that_do_not_fit_world_size_are_refused_before_the_start(tmp_path: Path) -> None:
    text = """\
name: ranks
benchmark: all_reduce
fixed: {backend: nccl, size_mb: 1, world_size: 2}
resources: {gpus_per_node: $world_size}
launch: {nproc_per_node: $world_size}
"""

    def notes(*overrides: str, **options: Any) -> list[str]:
        given = Options(Executor.slurm, tmp_path / "out", **options)
        return prepare(load(tmp_path, text, *overrides), given, "sweep.yaml").notes

    assert notes("world_size=4") == []
    (told,) = notes("resources.gpus_per_node=4")
    assert "4 GPUs but 2 processes" in told
    (told,) = notes("resources.gpus_per_node=0")
    assert "0 GPUs but 2 processes" in told and "resources.gpus_per_node" in told
    assert notes("resources.gpus_per_node=0", "backend=gloo") == []
    for override in ("launch.nproc_per_node=4", "resources.nodes=2"):
        with pytest.raises(InputError, match="nproc_per_node must be world_size / resources"):
            notes(override)
        (run,) = expand(load(tmp_path, text, override)).runs
        notes(override, only=frozenset({(run.id, 0)}))  # retry repeats what was submitted


def test_what_failed_before_is_no_success_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = write_sweep(tmp_path, [{"what": "ok"}, {"what": "raises", "tag": 1}])
    out = tmp_path / "out"
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 1 and "1 ok" in done.stdout and "1 error" in done.stdout
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 1 and len(records(out)) == 2
    assert "skipping 1 run that failed before (1 error); --retry-failed" in again.stdout
    plan = call("jobs.submit", sweep, "--local", "--out", out, "--dry-run")
    assert "0 (1 done, 1 failed before: 1 error; --retry-failed" in plan.stdout
    assert "retrying 1 run of" in call("jobs", "retry", out, "--dry-run").stdout
    monkeypatch.setattr(misbehave, "VERSION", 2, raising=False)
    told = call("jobs", "retry", out, "--dry-run").stdout
    assert "retrying 0 runs of" in told and "1 run is not in the sweep any more" in told


@pytest.mark.slow
def test_retry_repeats_the_failed_runs_of_all_submissions(folder: ResultsFolder) -> None:
    """Runs that are ok are left out, even if their result comes from another device.

    A submission whose condition is not valid any more does not keep others from being repeated.
    """
    here = cpu_device()
    outcomes = ((1, failed("error"), here), (2, failed("oom"), here), (3, ok(1.0), "another"))
    for size, outcome, device in outcomes:
        folder.submit(TOY + f"fixed: {{size: {size}}}\n", outcome, device)
    sweep = load(folder.path.parent, TOY + "fixed: {size: 4}\n", filter="mode == fast")
    path = folder.submit(sweep, failed("error")).path / "manifest.json"
    path.write_text(path.read_text().replace("mode == fast", "mode == gone"))
    done = call("jobs", "retry", folder.path)
    assert done.returncode == 2 and "mode: got 'gone'" in done.stdout, done.stdout
    for state in ("oom", "error"):
        assert f"retrying 1 run of {folder.path} (1 {state}), from submission" in done.stdout
    assert [record.params["size"] for record in records(folder.path)[4:]] == [2, 1]
    assert "retrying" not in call("jobs", "retry", folder.path).stdout


# ---- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus_per_node", "gpus", "parallel", "sizes"),
    [
        (0, 8, None, [20]),  # a job without GPUs runs alone
        (0, 0, 2, [3, 3, 3, 3, 3, 3, 2]),  # ceil(20 / (4 * 2 slots))
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
    runs = {str(i): Run(str(i), "toy", 1, {}, shape, 60.0) for i in range(20)}
    tasks = [(run, 0) for run in runs]
    slots = partial(local_slots, gpus=gpus, parallel=parallel)
    assert [len(job.tasks) for job in pack(tasks, runs, None, slots)] == sizes
    assert slots(Shape(gpus_per_node=gpus_per_node, exclusive=True)) == (gpus_per_node <= gpus)
    two_nodes = {run: replace(of, shape=Shape(nodes=2)) for run, of in runs.items()}
    assert len(pack(tasks, two_nodes, 1, slots)) == 1  # it cannot execute these, either


@settings(max_examples=100)
@given(
    st.lists(st.builds(Shape, nodes=st.integers(1, 2), gpus_per_node=st.integers(0, 2))),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_packing_keeps_every_task_once_with_its_likes(
    shapes: list[Shape], runs_per_job: int, repeats: int
) -> None:
    runs = {
        str(i): Run(str(i), "toy", 1, {}, shape, 60.0 * (1 + i % 3))
        for i, shape in enumerate(shapes)
    }
    tasks = [(run, n) for n in range(repeats) for run in runs]
    jobs = pack(tasks, runs, runs_per_job)
    assert [job.index for job in jobs] == list(range(len(jobs)))
    packed = [task for job in jobs for task in job.tasks]
    assert sorted(packed) == sorted(tasks)
    for job in jobs:
        assert 1 <= len(job.tasks) <= runs_per_job
        assert {runs[run].shape for run, _ in job.tasks} == {job.shape}
    by_shape = [[t for job in jobs if job.shape == shape for t in job.tasks] for shape in shapes]
    for members in by_shape:
        assert members == sorted(members, key=tasks.index)  # in the order of the tasks
    for shape in set(shapes):  # no more jobs than necessary, with one time limit
        alike = [job for job in jobs if job.shape == shape]
        assert len(alike) == -(-shapes.count(shape) * repeats // runs_per_job)
        longest = max(sum(runs[run].timeout_s for run, _ in job.tasks) for job in alike)
        assert {job.timeout_min for job in alike} == {longest / 60 + STARTUP_MIN}


BLOCKS = (
    "grid: {{size: [1], mode: [fast, exact]}}\n"
    "blocks: {{interleave: [mode], baseline: {{mode: fast}}, rounds: {}}}\n"
)
ON_GPU = "resources: {gpus_per_node: 1}\n"
TWO_ROUNDS = "timeout_s: 90\n" + BLOCKS.format("2, aa: false")
TEN_ROUNDS = "timeout_s: 300\n" + ON_GPU + BLOCKS.format("auto")
SHORT = "fixed: {size: 1}\ntimeout_s: 300\nresources: {timeout_min: 1}\n"


@pytest.mark.parametrize(
    ("text", "options", "told", "untold"),
    [
        # Two rounds, the trial, and two minutes to start. The sweep needs no GPU.
        (TWO_ROUNDS, [], "  1 job of 1 node, at most 11 min each\n", "GPU-hours"),
        (TWO_ROUNDS, ["resources.timeout_min=3"], ", at most 3 min each\n", ""),
        # Up to 10 rounds may be measured, but the time limit of a job is that of the trial and 3.
        (TEN_ROUNDS, [], "at most   0.9 GPU-hours, not counting requeues\n", ""),
        (TEN_ROUNDS, ["--local"], "", "not counting requeues"),  # only Slurm bounds them
        (SHORT, [], "note: resources.timeout_min is 1 min", ""),
        (SHORT, ["--local"], "", "timeout_min"),
        ("fixed: {size: 1}\n" + ON_GPU, [], "", "visible here"),
        ("fixed: {size: 1}\n" + ON_GPU, ["--local"], "0 are visible here", ""),
    ],
)
def test_what_the_plan_tells(
    tmp_path: Path, text: str, options: list[str], told: str, untold: str
) -> None:
    command = ("jobs.submit", write(tmp_path, TOY + text), "--dry-run", *options)
    plan = call(*command, environment={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert told in plan and not (untold and untold in plan), plan


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

    def earlier(params: dict[str, Any], repeat: int) -> Outcome:
        if repeat > 1:
            return None
        minutes = {"fast": (2, 1), "exact": (4, 2)}[params["mode"]][repeat]
        return ok(1.0) | {"started_at": 0.0, "finished_at": 60.0 * minutes}

    ResultsFolder(out).submit(load_sweep(sweep), earlier)
    # 2 blocks of 6 minutes, on 2 GPUs.
    assert shown().endswith("6 processes a round, about 12 min, 0.40 GPU-hours a round")
    few = ("blocks.rounds=1", "--filter", "size == 1")
    assert " 6.0 min" in shown("expected", *few)
    # A trial of 4.5 minutes, and 3 to 4 rounds of 6
    auto = shown("expected", "--rounds", "auto", "blocks.max_rounds=4", "--filter", "size == 1")
    assert "22 min to 28 min, 0.75 to 0.95 GPU-hours" in auto
