"""The worker's record for each way in which a run can end. The runs really end in these ways."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.processes import start_ticks
from jobs.results.record import Record
from jobs.worker import isolation
from jobs.worker.environment import job_environment
from jobs.worker.fork_server import _ask_for_stacks, descendants
from jobs.worker.isolation import Deadline, ForkServer, ServerDied, wait_for
from jobs.worker.outcome import outcome_of
from jobs.worker.worker import Worker
from systems.benchmark import artifacts_folder
from tests.jobs.harness import (
    LEAKS,
    PATIENCE_S,
    ROOT,
    TESTS_OWN,
    alive,
    artifacts_of,
    await_true,
    call,
    facts,
    only_record,
    records,
    run,
    start_python,
    write_submission,
    write_sweep,
)

TRIVIAL = 6  # consecutive runs that do nothing
TOO_LONG = "Timeout: took longer than 1 s; "
TORCH_S = 0.5  # CPU time in seconds; any import of torch takes longer
# How each action ends: status, how its failure begins (type and message), what else it tells
ENDINGS: dict[str, tuple[str, str, list[str]]] = {
    "raises": ("error", "ValueError: the message [/red] of the exception\n", ["in raises"]),
    "raise_unprintable": ("error", "Unprintable: ", []),
    "raise_undecodable": ("error", "OSError: no such file: \\udcff\n", []),
    "raise_without_streams": ("error", "ValueError: said to nobody\n", []),
    "sys_exit": ("error", "SystemExit: 3\n", []),
    "os_exit": ("error", "exit code 0: ", ["exit code 0 before"]),
    "sigkill": ("killed", "SIGKILL: ", []),
    "segfault": ("killed", "SIGSEGV: ", ["Segmentation fault", "in segfault"]),
    "abort": ("killed", "SIGABRT: ", ["terminate called"]),
    "hang_in_python": ("timeout", TOO_LONG, ["timeout_s", "in hang_in_python"]),
    "hang_deaf": ("timeout", TOO_LONG, ["timeout_s", "in hang_in_a_lock"]),
    "hang_with_children": ("timeout", TOO_LONG, []),
    "hang_at_exit": ("ok", "", []),  # a run that has measured does not wait for its threads
    "memory_error": ("oom", "", []),
    "torch_memory_error": ("oom", "", []),
    "nan": ("error", "", ["facts.loss[1] must be a finite number, got nan"]),
    "deep": ("error", "", ["nested more than"]),
    "tensor": ("error", "", ["got a torch.Tensor"]),
    "undecodable_fact": ("error", "", ["surrogates"]),
    "undecodable_name": ("error", "", ["surrogates"]),
    "misspelt": ("error", "", ["did you mean 'samples_ms'?"]),
    "many_facts": ("ok", "", []),
    "wrong": ("wrong", "", []),
    "unsupported": ("unsupported", "", []),
    "leave_children": ("ok", "", []),
    "leave_no_floor": ("ok", "", []),
    "be_chatty": ("error", "exit code 9: ", []),
}


class Endings:
    """Records of one job: a run that does nothing, every ending once, and TRIVIAL runs that do
    nothing. One of its benchmarks has no PRELOAD, so torch is imported for all runs."""

    def __init__(self, folder: Path):
        self.out = folder / "out"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        cases: list[dict[str, Any]] = [{"what": "ok"}]
        for what in ENDINGS:
            case = {"what": what, "artifact": "trace", "path": str(folder / what)}
            cases.append(case | ({"timeout_s": 1} if ENDINGS[what][0] == "timeout" else {}))
        cases.append({"what": "silent", "benchmark": "tests.benchmarks.silent"})
        cases += [{"what": "ok", "tag": 100 + i} for i in range(TRIVIAL)]
        sweep = write_sweep(folder, cases)
        environment = LEAKS | {"TMPDIR": str(self.temporary)}
        self.done = run("jobs.submit", sweep, "--local", "--out", self.out, environment=environment)
        self.cases = cases
        self.records = records(self.out)
        self.trivial = [r for r in self.records if r.params["tag"] >= 100]

    def of(self, what: str) -> Record:
        return next(record for record in self.records if record.params["what"] == what)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    return Endings(tmp_path_factory.mktemp("endings"))


def told(record: Record) -> str:
    """Return type, message and traceback of a failure."""
    failure = record.failure
    return f"{failure.type}: {failure.message}\n{failure.traceback or ''}" if failure else ""


@pytest.mark.parametrize("what", ENDINGS)
def test_how_a_run_ended(endings: Endings, what: str) -> None:
    status, begins, words = ENDINGS[what]
    record = endings.of(what)
    assert record.status == status, told(record)
    assert told(record).startswith(begins)
    assert [word for word in words if word not in told(record)] == []
    memory = record.failure.memory if record.failure else None
    assert memory == ("host" if status == "oom" else None)
    phase = record.failure.phase if record.failure else None
    assert phase == ("backward" if what == "memory_error" else None)
    took = record.finished_at - record.started_at
    assert (1.0 if status == "timeout" else 0.0) <= took < 30.0  # and not the sweep's 60 s


def test_every_run_leaves_one_record_in_turn_and_the_command_fails(endings: Endings) -> None:
    ran = [(record.params["what"], record.params["tag"]) for record in endings.records]
    assert ran == [(case["what"], case.get("tag", 0)) for case in endings.cases]
    assert endings.done.returncode == 1
    assert {record.attempt for record in endings.records} == {1}
    message = "the message [/red] of the exception"
    assert message in (endings.out / str(endings.of("raises").log)).read_text()
    assert message in endings.done.stdout


def test_each_run_that_leaves_files_has_a_folder_of_its_own(endings: Endings) -> None:
    """test_stop.py tests those of a run whose worker died, test_debug.py those of debug runs."""
    leaving = [record for record in endings.records if record.artifacts]
    assert [record.params["what"] for record in leaving] == list(ENDINGS)
    for record in leaving:
        assert record.artifacts == f"artifacts/{record.run}-0-1"
        assert artifacts_of(endings.out, record) == {"trace": "a trace"}
    assert len(list((endings.out / "artifacts").iterdir())) == len(leaving)
    logs = call("jobs", "logs", leaving[0].run, "--in", endings.out).stdout
    assert f"# artifacts in {endings.out}/{leaving[0].artifacts}\n" in logs


def test_many_facts_arrive_whole(endings: Endings) -> None:
    assert len(endings.of("many_facts").measurements.samples_ms["call"]) == 200_000


def test_much_output_is_kept_in_the_log_and_not_in_the_record(endings: Endings) -> None:
    record = endings.of("be_chatty")
    assert (endings.out / str(record.log)).stat().st_size > 20 * 10**6
    assert len(record.failure.traceback) <= 2000


def test_no_process_outlives_its_run(endings: Endings) -> None:
    for what in ("leave_children", "hang_with_children"):
        pids = [int(pid) for pid in (endings.out.parent / what).read_text().split()]
        assert len(pids) == 2 and not any(map(alive, pids))


def test_each_run_starts_clean(endings: Endings) -> None:
    seen = [facts(record) for record in endings.records if record.params["what"] == "ok"]
    assert len({fact["pid"] for fact in seen}) == len(seen)
    assert len({fact["worker"] for fact in seen}) == 1
    assert len({fact["server"] for fact in seen}) == 1  # no ending affected the fork server
    for fact in seen:
        assert fact["blocked"] == []
        # Python ignores the first two, and a background shell the third.
        ignored = set(fact["ignored"]) - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGQUIT}
        assert ignored == {signal.SIGUSR2}  # Slurm's warning, meant for the worker
        own = [name for name in fact["files"] if "/stack0.txt" not in name and name]
        assert [Path(name).name for name in own[:1]] == ["null"]
        assert len(own) == 3 and own[1] == own[2] and own[1].endswith(".log")


def test_nothing_reaches_the_runs_from_outside_or_stays_after_them(endings: Endings) -> None:
    for record in endings.trivial:
        assert facts(record)["environment"] == {"CUDA_VISIBLE_DEVICES": ""}
    assert list(endings.temporary.iterdir()) == []


@pytest.mark.parametrize(("given", "threads"), [({}, [None, "1"]), ({TESTS_OWN: "3"}, ["3", "3"])])
def test_a_run_computes_with_the_cpus_that_it_asks_for(
    tmp_path: Path, given: dict[str, str], threads: list[str | None]
) -> None:
    asking = {"what": "ok", "tag": 1, "resources": {"cpus_per_task": 1}}
    sweep = write_sweep(tmp_path, [{"what": "ok"}, asking])
    run("jobs.submit", sweep, "--local", "--out", tmp_path / "out", environment=given)
    found = sorted(records(tmp_path / "out"), key=lambda record: int(record.params["tag"]))
    assert [facts(record)["environment"].get(TESTS_OWN) for record in found] == threads
    assert [record.environment["threads"] for record in found] == threads


def test_isolation_costs_much_less_than_an_import_of_torch(endings: Endings) -> None:
    begun = [facts(record)["at"][0] for record in endings.trivial]
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert statistics.median(gaps) < 1.5
    for record in endings.trivial:
        assert record.seconds.starting > 0
        assert facts(record)["torch"] and facts(record)["worked"] < TORCH_S


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture
def memory_cgroup() -> Any:
    """A memory cgroup with a limit of 512 MiB, inside the cgroup of this process."""
    mine = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [path for _, controllers, path in mine if "memory" in controllers.split(",")]
    root = "/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup"
    path = v1[0] if v1 else next(path for _, controllers, path in mine if controllers == "")
    folder = Path(root) / path.lstrip("/") / f"test-{os.getpid()}-{time.time_ns():x}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit.write_text(str(2**29))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    await_true(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup's processes ended")
    folder.rmdir()


def test_the_kernels_kill_for_want_of_memory_is_oom_and_spares_the_worker(
    memory_cgroup: Path, tmp_path: Path
) -> None:
    cases: list[dict[str, Any]] = [{"what": "fill_memory"}, {"what": "ok"}, {"what": "sigkill"}]
    manifest = write_submission(write_sweep(tmp_path, cases), tmp_path / "out")
    command = f'echo $$ > "{memory_cgroup}/cgroup.procs"; exec "$@"'
    worker = [sys.executable, "-m", "jobs.worker", str(manifest.path), "0"]
    subprocess.run(["sh", "-c", command, "sh", *worker], cwd=ROOT, check=True)
    filled = only_record(manifest.folder, what="fill_memory")
    assert filled.status == "oom" and filled.failure.memory == "host"
    assert "memory cgroup" in filled.failure.message
    assert only_record(manifest.folder, what="ok").status == "ok"
    assert only_record(manifest.folder, what="sigkill").status == "killed"  # not oom


# ---- the pieces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "is at version 1 here"),
        ({"params": {"what": "ok", "gone": 1}}, "gone"),
        ({"benchmark": "tests.benchmarks.gone"}, "tests.benchmarks.gone"),
    ],
)
def test_a_run_whose_benchmark_has_changed_is_an_error(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    manifest = write_submission(write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out")
    manifest.runs.update({name: replace(run, **changes) for name, run in manifest.runs.items()})
    Worker(manifest, 0, in_process=True).run()
    record = only_record(manifest.folder)
    assert record.status == "error" and words in record.failure.message


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
    ],
)
def test_every_wording_of_gpu_memory_running_out(text: str) -> None:
    outcome = outcome_of(RuntimeError(text))
    assert outcome.status == "oom" and outcome.failure.memory == "gpu"


def test_without_the_launcher_files_go_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUN_ARTIFACTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert artifacts_folder().resolve() == tmp_path / "artifacts"
    assert (tmp_path / "artifacts").is_dir()


def test_a_full_disk_for_the_output_of_a_worker_and_its_run_changes_no_result(
    tmp_path: Path,
) -> None:
    """The log of the run cannot be opened, and neither note nor traceback can be printed."""
    manifest = write_submission(write_sweep(tmp_path, [{"what": "raises"}]), tmp_path / "out")
    ((run_id, repeat),) = manifest.jobs[0].tasks
    (manifest.job_folder(0) / f"{run_id}-{repeat}-1.log").mkdir(parents=True)
    command = ("-u", "-m", "jobs.worker", manifest.path, "0")
    with open("/dev/full", "w") as full:
        worker = start_python(*command, stdout=full.fileno(), stderr=full.fileno())
    assert worker.wait(PATIENCE_S) == 0
    assert only_record(manifest.folder).failure.type == "ValueError"


def test_no_process_imports_torch_for_benchmarks_that_preload_something_else(
    tmp_path: Path,
) -> None:
    cases: list[dict[str, Any]] = [{"what": "ok"}, {"size": 1, "benchmark": "tests.benchmarks.toy"}]
    sweep, out = write_sweep(tmp_path, cases), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 0
    assert facts(only_record(out, size=1))["preloaded"] is True
    for record in records(out):
        assert facts(record)["torch"] is False
        assert record.environment["loaded"] == {}


def test_an_import_that_fails_does_not_end_the_server_and_one_that_exits_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text("import sys; sys.exit(5)\n")
    (tmp_path / "exiting.py").write_text("import os; os._exit(5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(job_environment(), modules=["failing", "no_such_module"])
    child = server.start(time.sleep, 0)
    assert child.wait(PATIENCE_S) and child.exit_code == 0
    server.close()
    with pytest.raises(ServerDied, match="exit code 5"):
        ForkServer(job_environment(), modules=["exiting"])


def test_the_name_of_a_process_may_be_any_bytes() -> None:
    """Linux cuts names after 15 bytes, so the last character of one may be incomplete."""
    name = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') \\xd0')"
    command = [sys.executable, "-c", f"{name}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert process.pid in descendants(os.getpid())
        assert start_ticks(process.pid) is not None
        _ask_for_stacks()  # must not end the fork server
        process.stdin.close()


def test_time_in_which_a_job_is_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3601.0, 3601.0, 3602.0])
    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    deadline = Deadline(10.0)
    assert (deadline.left(), deadline.left()) == (9.0, 9.0)
    deadline.shorten(3.0)
    assert deadline.left() == 2.0


def test_a_signal_given_to_another_thread_is_handled_while_waiting() -> None:
    """The worker handles it in time, whichever thread the kernel gives it to."""
    here, there = Pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: there.send("handled"))

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    other = threading.Timer(0.2, interrupt)
    other.start()
    started = time.monotonic()
    try:
        assert wait_for([here], 60.0) == [here]
        assert time.monotonic() - started < 30  # the handler ran before the timeout
    finally:
        other.join()
        signal.signal(signal.SIGUSR1, before)
