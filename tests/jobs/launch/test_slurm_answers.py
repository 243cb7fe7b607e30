"""Whose job is it, and is it alive? Real clusters whose answers are late, wrong or missing.

Programs on PATH stand for Slurm's commands only where no Slurm can be made to answer so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.harness import run_python, umask
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import HELD, Scenario, Scenarios, states

pytestmark = pytest.mark.slurm


@pytest.fixture
def held(scenarios: Scenarios) -> Iterator[Scenario]:
    """A scenario of two runs in an array that is held."""
    scenario = scenarios.submit("held", grid={"tag": [0, 1]}, slurm=HELD)
    yield scenario
    scenario.cluster.client("scancel", f"--name={scenario.name}")


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2",
        "exit 0",
        '$real "$@" | head -c -20',
        "sleep 60",
    ],
    ids=["error without exit code", "nothing", "a part", "no end"],
)
def test_silence_of_squeue_is_no_answer(
    held: Scenario, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are neither lost nor submitted again, unless the user wants it."""
    if script.startswith("sleep"):
        monkeypatch.setattr("jobs.slurm_client.CLIENT_S", 1.0)
    silent = held.programs(squeue=script)
    status = held.status(**silent)
    assert states(status) == ["unknown", "unknown"]
    assert all("Slurm" in task["detail"] for task in status["tasks"])
    again = held.submit(**silent)
    assert again.returncode == 2 and "--repeat-unknown" in again.stdout
    assert len(held.queue()) == 2
    cancelled = held.call("jobs", "cancel", "out", **silent)
    assert cancelled.returncode == 2 and "2 jobs not cancelled" in cancelled.stdout
    monkeypatch.undo()
    assert len(held.queue()) == 2 and states(held.status()) == ["queued", "queued"]


def test_odd_words_lines_of_a_wrapper_and_settings_of_the_user_hide_no_job(held: Scenario) -> None:
    script = '$real "$@" | sed s/PENDING/EXPEDITING/'
    odd = held.programs(squeue=f'echo "NOTE: cached"; {script}; echo "NOTE: done" | tee >&2')
    odd |= {"SQUEUE_PARTITION": "high", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative"}
    odd["SCANCEL_STATE"] = "RUNNING"
    assert all("EXPEDITING" in task["detail"] for task in held.status(**odd)["tasks"])
    assert "skipping 2 runs already queued or running" in held.submit(**odd).stdout
    assert "cancelled 2 jobs" in held.call("jobs", "cancel", "out", **odd).stdout
    assert not held.queue()


@pytest.mark.parametrize(
    "script",
    [
        '$real "$@" > /dev/null; echo "sbatch: error: Socket timed out" >&2; exit 1',
        '$real --parsable "$@"',
        'echo "job 4 of at most 50"; printf "\\xe9\\n"; $real "$@"',
    ],
    ids=["denied", "number only", "other words"],
)
def test_jobs_are_found_whatever_sbatch_says(scenarios: Scenarios, script: str) -> None:
    scenario = scenarios.new("accepted", grid={"tag": [0, 1]}, slurm=HELD)
    done = scenario.submit(**scenario.programs(sbatch=script))
    assert done.returncode == 0 and "submitted 2 runs as 2 jobs" in done.stdout, done.stdout
    assert len(scenario.queue()) == 2
    assert "cancelled 2 jobs" in scenario.call("jobs", "cancel", "out").stdout


def test_jobs_of_a_submitter_that_died_in_sbatch_are_found(scenarios: Scenarios) -> None:
    scenario = scenarios.new("died", grid={"tag": [0, 1]}, slurm=HELD)
    deadly = scenario.programs(sbatch='$real "$@"; kill -9 $PPID')
    assert scenario.submit_alone(**deadly).returncode == -signal.SIGKILL
    down = scenario.programs(scontrol="echo 'Slurmctld(primary) at n is DOWN'")
    unknown = scenario.status(**down)
    assert states(unknown) == ["unknown", "unknown"]
    assert states(scenario.status()) == ["queued", "queued"]
    assert "skipping 2 runs already queued or running" in scenario.submit().stdout
    assert "cancelled 2 jobs" in scenario.call("jobs", "cancel", "out").stdout


# ---- other clusters, other jobs ------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A second cluster, whose jobs have other ids."""
    with SlurmCluster(tmp_path_factory.mktemp("other"), nodes=1, name="other") as cluster:
        yield cluster


def test_jobs_of_another_cluster_are_left_alone(
    held: Scenario, other_cluster: SlurmCluster
) -> None:
    there = other_cluster.environment
    status = held.status(**there)
    assert states(status) == ["unknown", "unknown"]
    why = f"on cluster {held.cluster.name}, which cannot be asked from here"
    assert all(why in task["detail"] for task in status["tasks"])
    again = held.submit(**there)
    assert why in again.stdout and "--repeat-unknown" in again.stdout
    cancelled = held.call("jobs", "cancel", "out", **there)
    assert cancelled.returncode == 2 and why in cancelled.stdout
    assert len(held.queue()) == 2
    twice = held.submit("--repeat-unknown", **there)
    assert "submitted 2 runs" in twice.stdout
    assert len(held.queue(other_cluster)) == 2
    assert "cancelled 2 jobs" in held.call("jobs", "cancel", "out", **there).stdout
    assert not held.queue(other_cluster) and len(held.queue()) == 2


def test_a_cluster_that_can_be_asked_from_here(
    scenarios: Scenarios, other_cluster: SlurmCluster
) -> None:
    """Programs on PATH stand for clusters with a common database, which the option -M needs."""
    wanted = {"additional_parameters": {"hold": True, "clusters": "other"}}
    scenario = scenarios.new("elsewhere", grid={"tag": [0, 1]}, slurm=wanted)
    there = other_cluster.environment["SLURM_CONF"]
    script = f'[ "$1" = -M ] && {{ shift 2; export SLURM_CONF={there}; }}; exec $real "$@"'
    sbatch = f"sed /clusters=other/d | SLURM_CONF={there} $real"
    both = scenario.programs(squeue=script, scancel=script, scontrol=script, sbatch=sbatch)
    assert "submitted 2 runs" in scenario.submit(**both).stdout
    assert states(scenario.status(**both)) == ["queued", "queued"]
    assert not scenario.queue()  # of the cluster of this host
    assert "cancelled 2 jobs" in scenario.call("jobs", "cancel", "out", **both).stdout
    assert not scenario.queue(other_cluster)


def test_a_job_that_got_the_number_of_another_is_not_cancelled(
    other_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A controller that lost its state gives the numbers again."""
    cluster = other_cluster
    cluster.lose_state()
    scenario = Scenarios(cluster, tmp_path).submit("lost", grid={"tag": [0, 1]}, slurm=HELD)
    (known,) = {job.split("_")[0] for job in scenario.queue()}
    cluster.lose_state()
    stranger = ("sbatch", "--array=0-1", "--hold", "--job-name=stranger", "--wrap=true")
    number = 0
    while number < int(known):
        number = int(cluster.client(*stranger).stdout.split()[-1])
    assert number == int(known)
    for task in scenario.status()["tasks"]:
        assert "'stranger'" in task["detail"]
    before = cluster.client("squeue", "-h", "-r", "--name=stranger").stdout
    assert "cancelled 0 jobs" in scenario.call("jobs", "cancel", "out").stdout
    assert cluster.client("squeue", "-h", "-r", "--name=stranger").stdout == before
    assert "submitted 2 runs" in scenario.submit().stdout
    cluster.client("scancel", "--user=root")


# ---- the end of a job ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_cannot_be_requeued_says_so(scenarios: Scenarios) -> None:
    zipped = {"tag": [0, 1], "until": ["requeued", ""]}
    scenario = scenarios.new("refused", zip=zipped, runs_per_job=2)
    refused = '[ "$1" = requeue ] && { echo "no such luck" >&2; exit 1; }; exec $real "$@"'
    done = scenario.submit(**scenario.programs(scontrol=refused))
    assert done.returncode == 0, done.stdout
    scenario.wait_until_executing()
    (job,) = scenario.queue()
    # The warning signal that precedes the end of a job
    assert scenario.cluster.client("scancel", "--signal=USR2", job).returncode == 0
    (record,) = scenario.finish()
    assert record.status == "preempted"
    (task,) = (task for task in scenario.status()["tasks"] if task["params"]["tag"] == 1)
    assert task["state"] == "killed" and "not requeued" in task["detail"]
    assert "no such luck" in task["detail"]


@pytest.mark.slow
def test_a_site_that_passes_no_environment(scenarios: Scenarios) -> None:
    scenario = scenarios.new("no-environment", grid={"tag": [0]})
    done = scenario.submit(**scenario.programs(sbatch='exec $real --export=NONE "$@"'))
    assert done.returncode == 0, done.stdout
    (record,) = scenario.finish()
    assert record.status == "ok", record.failure


# ---- code of others ------------------------------------------------------------------------------

# Tries to make the jobs of a results folder execute another benchmark, as another user.
ATTACK = """
import contextlib, json, os, sys
from pathlib import Path
os.setuid(65534)
submission = Path(sys.argv[1])
def changed(text):
    return text.replace("tests.benchmarks.misbehave", "evil")
for path in [*submission.rglob("*"), submission]:
    with contextlib.suppress(OSError):
        if path.is_file():
            path.write_text(changed(path.read_text()))
        else:
            (path / "link").symlink_to("/etc")  # for a log that the job writes
content = changed((submission / "manifest.json").read_text())
handles = (submission / "handles.json").read_text()
for folder in (submission, submission.parent):
    with contextlib.suppress(OSError):
        folder.rename(folder.with_name("moved"))
with contextlib.suppress(OSError):
    (submission / "jobs" / "0").mkdir(parents=True)
    (submission / "slurm").mkdir()
    (submission / "manifest.json").write_text(content)
    (submission / "handles.json").write_text(handles)
    for one in [submission, *submission.rglob("*")]:
        one.chmod(0o777)
    print("replaced")
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


@pytest.mark.parametrize("owner", [0, 65534], ids=["own folder", "folder of the attacker"])
def test_another_user_cannot_change_what_a_job_executes(
    scenarios: Scenarios, folder_of_all: Path, owner: int
) -> None:
    scenario = Scenarios(scenarios.cluster, folder_of_all).new(
        "attacked", grid={"tag": [0]}, slurm=HELD
    )
    with umask(0):
        for folder in (scenario.out, scenario.out / "submissions"):
            folder.mkdir()
            os.chown(folder, owner, -1)
        assert scenario.submit().returncode == 0
    (path,) = (scenario.out / "submissions").iterdir()
    whole = contents(scenario.out)
    attacked = run_python("-c", ATTACK, path)
    assert ("replaced" in attacked.stdout) == (owner != 0), attacked.stdout
    if owner == 0:
        assert contents(scenario.out) == whole
    else:
        cancelled = scenario.call("jobs", "cancel", "out").stdout
        assert "is of another user" in cancelled
    (job,) = scenario.queue()
    scenario.cluster.client("scontrol", "release", job)
    records = scenario.finish()
    if owner == 0:
        assert [record.status for record in records] == ["ok"]
    else:
        assert not records
        assert "of other users not retried" in scenario.call("jobs", "retry", "out").stdout
        (log,) = (path / "slurm").glob("*.err")
        assert "was changed after its jobs were submitted" in log.read_text()
