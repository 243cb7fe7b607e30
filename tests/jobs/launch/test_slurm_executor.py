"""Job arrays and sbatch scripts, tested without a Slurm cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.launch.slurm_executor import Array, arrays, sbatch_texts
from jobs.results.manifest import Executor, Job, Manifest
from jobs.run import Shape
from jobs.sweep.schema import Sweep
from tests.jobs.harness import ROOT, call


def manifest(folder: Path, jobs: list[Job], **slurm: object) -> Manifest:
    sweep = Sweep.model_validate({"name": "many", "benchmark": "attention", "slurm": slurm})
    return Manifest(folder, "id", 0.0, Executor.slurm, sweep, "", "", {}, jobs, [], {})


def some(count: int, shape: Shape = Shape(), timeout_min: int = 5, first: int = 0) -> list[Job]:
    tasks = [("run", 0)]
    return [Job(index, shape, timeout_min, tasks) for index in range(first, first + count)]


def drawn(result: list[Array]) -> list[tuple[int, int, int | None]]:
    return [(len(array.jobs), array.parallelism, array.after) for array in result]


def test_one_array_of_one_shape(tmp_path: Path) -> None:
    assert drawn(arrays(manifest(tmp_path, some(20), array_parallelism=4), 1001)) == [(20, 4, None)]


def test_parts_of_a_split_array_share_its_parallelism(tmp_path: Path) -> None:
    result = drawn(arrays(manifest(tmp_path, some(20), array_parallelism=4), 8))
    assert result == [(8, 2, None), (8, 1, None), (4, 1, None)]


def test_more_parts_than_may_run_at_once_wait_for_each_other(tmp_path: Path) -> None:
    result = drawn(arrays(manifest(tmp_path, some(20), array_parallelism=2), 5))
    assert result == [(5, 1, None), (5, 1, None), (5, 1, 0), (5, 1, 1)]


def test_another_limit_shares_and_another_shape_does_not(tmp_path: Path) -> None:
    gpu = Shape(gpus_per_node=1)
    jobs = some(9) + some(1, timeout_min=3, first=9) + some(3, gpu, first=10)
    result = drawn(arrays(manifest(tmp_path, jobs, array_parallelism=1), 1001))
    assert result == [(9, 1, None), (1, 1, 0), (3, 1, None)]


def test_sbatch_text(tmp_path: Path) -> None:
    shape = Shape(nodes=2, gpus_per_node=4, cpus_per_task=6, mem_gb=1.5)
    wanted = manifest(
        tmp_path,
        some(3, shape, timeout_min=1),
        account="it's mine",
        setup=["module load cuda"],
        srun_args=["--cpu-bind=none"],
        additional_parameters={"reservation": "bench", "requeue": False},
    )
    (text,) = sbatch_texts(wanted)
    lines = text.splitlines()
    for line in (
        "--array=0-2%3",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--cpus-per-task=6",
        "--mem=1536MB",
        "--time=1",
        "--signal=USR2@15",
        "--reservation=bench",
        """--account='it'"'"'s mine'""",
    ):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --requeue" not in lines
    assert "--kill-on-bad-exit=1 --cpus-per-task=6 --cpu-bind=none" in text


@pytest.mark.parametrize(
    ("line", "code"), [("true", 0), ("# nothing", 0), ("export A=1\n[ $A = 1 ]", 0), ("cd /no", 1)]
)
def test_setup_line(tmp_path: Path, line: str, code: int) -> None:
    (text,) = sbatch_texts(manifest(tmp_path, some(1), setup=[line]))
    script = text.replace("\nsrun", "\ntrue")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    assert ("setup failed: " + line in done.stderr) == bool(code)


QUICKSTART = ROOT / "sweeps" / "quickstart.yaml"


def test_dry_run_shows_the_cluster_file(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("slurm: {partition: h100, account: lab, qos: long, constraint: nvlink}\n")
    out = tmp_path / "out"
    options = ["--dry-run", "--sbatch", "--cluster-file", cluster, "--out", out]
    done = call("jobs.submit", QUICKSTART, *options)
    assert done.returncode == 0, done.stderr
    for option in ("partition=h100", "account=lab", "qos=long", "constraint=nvlink"):
        assert f"#SBATCH --{option}\n" in done.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ('partition: "a\\n#SBATCH --exclusive"', "slurm.partition must be one line"),
        ('account: "a\\0"', "slurm.account must be one line"),
        ('exclude: "a\\e[31m"', "slurm.exclude must be one line"),
        ('srun_args: [--label, "a\\rb"]', "slurm.srun_args.1 must be one line"),
        ('additional_parameters: {comment: "a\\nb"}', "slurm.additional_parameters.comment must"),
        ('additional_parameters: {"comment\\nb": 1}', "must be an option of sbatch"),
        ("additional_parameters: {--comment: a}", "must be an option of sbatch"),
        ('setup: ["a\\0"]', "slurm.setup.0 must not contain a NUL character"),
    ],
)
def test_a_value_must_not_add_a_line_to_the_script(tmp_path: Path, slurm: str, words: str) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"slurm: {{{slurm}}}\n")
    done = call("jobs.submit", QUICKSTART, "--dry-run", "--sbatch", "--cluster-file", cluster)
    assert done.returncode == 2
    assert done.stdout.startswith(f"{cluster}:1:")
    assert words in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_without_slurm_submit_says_so(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path)}
    done = call("jobs.submit", QUICKSTART, "--out", tmp_path / "out", environment=nowhere)
    assert done.returncode == 2
    assert "no sbatch on PATH" in done.stderr and "--local" in done.stderr
    assert not (tmp_path / "out").exists()
