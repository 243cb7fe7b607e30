"""The local queue: when jobs run, on which GPUs, and what the queue prints."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from jobs.provenance import visible_gpus
from jobs.results.manifest import Executor
from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    call,
    records,
    run,
    run_python,
    start,
    start_python,
    write_submission,
    write_sweep,
)

FAKE_NVML = """
class NVMLError(Exception): pass
NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return int(uuid[-1])
def nvmlDeviceGetName(handle): return "Fake GPU"
def nvmlDeviceGetUUID(handle): return f"GPU-fake-{handle}"
"""

# A queue whose workers only print their job, their GPUs, and the times at which they were started
# and ended.
QUEUE = """
import sys, time
from pathlib import Path
from jobs.launch.local_queue import LocalQueue
from jobs.results.heartbeat import runs_here
from jobs.results.manifest import read_manifest

STUB = '''
import json, os, sys, time
time.sleep(0.25)
begun, job = sys.argv[1:]
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps([job, gpus, float(begun), time.monotonic()]))
'''

class Queue(LocalQueue):
    def _command(self, job):
        return [sys.executable, "-S", "-c", STUB, str(time.monotonic()), str(job.index)]

parallel = int(sys.argv[2]) if len(sys.argv) > 2 else None
manifest = read_manifest(Path(sys.argv[1]))
with runs_here(manifest):
    Queue(manifest, parallel).run()
"""


@pytest.fixture
def fake_gpus(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which NVML has four fake GPUs, which no other test claims."""
    (tmp_path / "pynvml.py").write_text(FAKE_NVML.replace("GPU-fake", os.urandom(8).hex()))
    folders = (str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(folders)}


Ran = tuple[list[str], float, float]  # GPUs given, begun, ended


def cases_of(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one run per entry of `resources`."""
    return [{"what": "ok", "tag": i, "resources": one} for i, one in enumerate(resources)]


def queue(
    folder: Path, sizes: list[int], *arguments: str, exclusive: int = -1, **environment: str
) -> list[Ran]:
    """Run one job per entry of `sizes`, its number of GPUs, and return how each job ran.

    Jobs with `exclusive` GPUs ask to run alone.
    """
    folder.mkdir()
    jobs = cases_of([{"gpus_per_node": n, "exclusive": n == exclusive} for n in sizes])
    sweep = write_sweep(folder, jobs, runs_per_job=1)
    # Planned as for Slurm: this process does not see the fake GPUs.
    manifest = write_submission(sweep, folder / "out", Executor.slurm)
    done = run_python("-c", QUEUE, manifest.path, *arguments, environment=environment)
    assert done.returncode == 0, done.stdout
    ran: list[Ran] = []
    for log in sorted(manifest.path.glob("jobs/*/worker.log")):
        job, gpus, begun, ended = json.loads(log.read_text())
        given = gpus.split(",") if gpus else []
        assert len(set(given)) == manifest.jobs[int(job)].shape.gpus_per_node
        ran.append((given, begun, ended))
    assert sorted(len(given) for given, *_ in ran) == sorted(sizes)
    return ran


def together(ran: list[Ran]) -> list[tuple[Ran, Ran]]:
    """Return the pairs of jobs that ran at the same time."""
    return [(a, b) for a, b in combinations(ran, 2) if a[1] < b[2] and b[1] < a[2]]


def most_at_once(ran: list[Ran]) -> int:
    return max(sum(a[1] <= b[1] < a[2] for a in ran) for b in ran)


def test_every_gpu_is_used_where_the_caller_set_no_limit(
    tmp_path: Path, fake_gpus: dict[str, str]
) -> None:
    ran = queue(tmp_path / "all", [1] * 8, **fake_gpus)
    assert {gpu for gpus, *_ in ran for gpu in gpus} == {"0", "1", "2", "3"}
    assert most_at_once(ran) > 1
    assert most_at_once(queue(tmp_path / "two", [1] * 6, "2", **fake_gpus)) == 2


def test_queues_share_no_gpu_and_stay_within_what_the_caller_set(
    tmp_path: Path, fake_gpus: dict[str, str]
) -> None:
    """One names GPUs by their index, the other one by their UUID."""
    names = ("0,1,2", "GPU-fake-1,GPU-fake-2,GPU-fake-3")
    with ThreadPoolExecutor() as threads:
        both = [
            threads.submit(
                queue, tmp_path / given[0], [1, 2, 1], CUDA_VISIBLE_DEVICES=given, **fake_gpus
            )
            for given in names
        ]
        results = [one.result() for one in both]
    for ran, given in zip(results, names, strict=True):
        assert {gpu for gpus, *_ in ran for gpu in gpus} <= set(given.split(","))
    for one, other in together([ran for result in results for ran in result]):
        assert not {gpu[-1] for gpu in one[0]} & {gpu[-1] for gpu in other[0]}


HOLDER = """
import signal
from jobs.launch.gpu_claims import claim
if (held := claim(["GPU-fake-2"], 1)) is not None:
    print("claimed", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("mode", ["--local", "--debug"])
def test_a_run_waits_until_the_process_that_uses_its_gpu_is_killed(
    tmp_path: Path, fake_gpus: dict[str, str], mode: str
) -> None:
    sweep, out = write_sweep(tmp_path, cases_of([{"gpus_per_node": 1}])), tmp_path / "out"
    environment = {"CUDA_VISIBLE_DEVICES": "2", **fake_gpus}
    holder = start_python("-c", HOLDER, environment=environment)
    assert holder.stdout.readline() == "claimed\n"
    waiting = start("jobs.submit", sweep, mode, "--out", out, environment=environment)
    try:
        assert any("waiting for GPUs" in line for line in waiting.stdout)
        assert not records(out)
        holder.kill()
        waiting.communicate(timeout=PATIENCE_S)
    finally:
        holder.kill()
        waiting.kill()
    assert len(records(out)) == 1


@pytest.mark.slow
def test_jobs_that_run_alone(tmp_path: Path, fake_gpus: dict[str, str]) -> None:
    """Those without GPUs, unless the user asks for several at once, and exclusive ones."""
    mixed = queue(tmp_path / "mixed", [0, 1, 0, 1, 1], **fake_gpus)
    assert all(a[0] and b[0] for a, b in together(mixed)) and together(mixed)
    several = queue(tmp_path / "several", [0] * 6, "3")
    assert 1 < most_at_once(several) <= 3
    assert all(gpus == [] for gpus, *_ in several)
    ran = queue(tmp_path / "q", [1, 2, 1, 1, 2, 1, 1], "4", exclusive=2, **fake_gpus)
    assert together(ran) and all(len(a[0]) == len(b[0]) == 1 for a, b in together(ran))


@pytest.mark.slow
def test_what_this_machine_cannot_give_is_said_by_a_worker_for_each_shape(tmp_path: Path) -> None:
    cases = cases_of([{"gpus_per_node": 1}] * 20 + [{"nodes": 2}])
    path, out = write_sweep(tmp_path, cases, runs_per_job=1), tmp_path / "out"
    nothing = {"CUDA_VISIBLE_DEVICES": ""}  # no GPUs, also if this machine has some
    done = call("jobs.submit", path, "--local", "--out", out, environment=nothing)
    assert done.returncode == 0 and "21 unsupported" in done.stdout
    # One line for each of the two reasons
    assert done.stdout.count("needs 1 GPU") == done.stdout.count("needs 2 nodes") == 1
    assert len(list(out.glob("submissions/*/jobs/*/worker.log"))) == 2
    assert Counter(r.failure and "needs 2 nodes" in r.failure.message for r in records(out)) == {
        False: 20,
        True: 1,
    }
    again = call("jobs.submit", path, "--local", "--out", out, environment=nothing)
    assert "skipping 21 runs with a result" in again.stdout and len(records(out)) == 21
    assert "unsupported before: 21" in again.stderr and "--force" in again.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(visible_gpus()), reason="needs a machine without a GPU")
def test_the_gpus_given_reach_the_runs_which_do_not_fall_back_to_the_cpu(
    tmp_path: Path, fake_gpus: dict[str, str]
) -> None:
    cases = cases_of([{"gpus_per_node": 1}] * 2)
    sweep, out = write_sweep(tmp_path, cases, runs_per_job=1), tmp_path / "out"
    environment = fake_gpus | {"CUDA_VISIBLE_DEVICES": "3,1"}
    run("jobs.submit", sweep, "--local", "--out", out, environment=environment)
    messages = [record.failure.message for record in records(out) if record.failure]
    assert {record.device for record in records(out)} == {"Fake GPU"}
    given = {re.search(r"CUDA_VISIBLE_DEVICES=(\S+)\)", message)[1] for message in messages}
    assert given == {"1", "3"} and all("torch sees 0" in message for message in messages)


@pytest.mark.slow
def test_a_worker_that_always_dies_is_not_restarted_forever(tmp_path: Path) -> None:
    manifest = write_submission(write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out")
    dying = QUEUE.replace("time.sleep(0.25)", "sys.exit(os.write(1, b'x') + 2)")
    done = run_python("-c", dying, manifest.path)
    assert done.returncode == 0, done.stdout
    assert (manifest.job_folder(0) / "worker.log").read_text() == "xxx"
    assert "not starting it again after 3 deaths" in done.stdout
    assert "exit code 3; submit again\n" in call("jobs", "status", tmp_path / "out").stdout
