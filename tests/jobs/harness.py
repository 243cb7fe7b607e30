"""Sweep files, submissions and records for tests that run real submissions."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

import aggregate
import jobs.__main__ as commands
from jobs import submit
from jobs.launch.submission import Options, prepare
from jobs.results.manifest import Executor, Manifest, write_manifest
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.sweep.load import load_sweep

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # for what takes a second on a machine that does nothing else
TESTS_OWN = "OMP_NUM_THREADS"  # tests/conftest.py sets it, for the tests' own process
LEAKS = {  # variables of a surrounding torchrun or allocation
    "RANK": "7",
    "LOCAL_RANK": "7",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "another",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "17",
    "SLURM_CPU_BIND": "none",
}


def write_sweep(folder: Path, cases: Iterable[dict[str, Any]], **keys: Any) -> Path:
    """A sweep of the misbehaving benchmark.

    Args:
        cases: the parameters of one run each, and keys of its case: `timeout_s`, `benchmark`.
        keys: of the sweep.
    """
    blocks: list[dict[str, Any]] = []
    for case in cases:
        fixed = dict(case)
        own: dict[str, Any] = {
            key: fixed.pop(key) for key in ("timeout_s", "benchmark") if key in fixed
        }
        blocks.append({"fixed": fixed, **own})
    sweep = {
        "name": "misbehave",
        "benchmark": "tests.benchmarks.misbehave",
        "resources": {"gpus_per_node": 0},
        "runs_per_job": 100,
        "timeout_s": 60,
        "cases": blocks,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep | keys, sort_keys=False))
    return path


def start(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python -m ARGUMENTS` from the project's root, output captured."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != TESTS_OWN} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=restore_signals,
    )


def restore_signals() -> None:
    """Stop ignoring SIGINT and SIGHUP in a new process. Tests that run in the background of a
    shell, or under nohup, ignore them, and their children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same, to its end; its output is in `stdout`."""
    process = start(*arguments, environment=environment)
    try:
        output, _ = process.communicate(timeout=240)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def call(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like `run`, but in this process. Saves half a second where a test needs no separate process.
    (`jobs status` takes a local submission to run as long as the process that submitted it.)
    `stdout` holds all output, `stderr` that part of it."""
    module, *rest = map(str, arguments)
    app = {"jobs.submit": submit.app, "jobs": commands.app, "aggregate": aggregate.app}[module]
    given: dict[str, str | None] = {"COLUMNS": "80", TESTS_OWN: None, **(environment or {})}
    result = CliRunner().invoke(app, rest, env=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.output, result.stderr)


def records(out: Path) -> list[Record]:
    found, bad = read_records(out)
    assert not bad
    return found


def only_record(out: Path, **params: Any) -> Record:
    """The one record with these parameters."""
    found = [r for r in records(out) if params.items() <= r.params.items()]
    assert len(found) == 1, f"{len(found)} records of {params}"
    return found[0]


def facts(record: Record) -> dict[str, Any]:
    assert record.measurements is not None, record.failure
    return record.measurements.facts


def artifacts_of(out: Path, record: Record) -> dict[str, str]:
    """The content of each file among a run's artifacts."""
    assert record.artifacts is not None, record.failure
    return {path.name: path.read_text() for path in (out / record.artifacts).iterdir()}


def write_submission(sweep: Path, out: Path, executor: Executor = Executor.local) -> Manifest:
    """Write the manifest of a submission and start nothing."""
    prepared = prepare(load_sweep(sweep, [], None, None), Options(executor, out), str(sweep))
    write_manifest(prepared.manifest)
    return prepared.manifest


def statuses(out: Path) -> dict[str, str]:
    """The state of each run in `jobs status`, by what the run does and its tag."""
    tasks = json.loads(call("jobs", "status", out, "--json").stdout)["tasks"]
    return {f"{t['params']['what']}{t['params']['tag']}": t["state"] for t in tasks}


class Fifo:
    """A FIFO into which a run with `what: wait` writes when it has started waiting."""

    def __init__(self, path: Path):
        self.path = path
        os.mkfifo(path)
        self._handle = os.open(path, os.O_RDWR)  # as a writer too: else its end shows as input

    def pids(self) -> tuple[int, int]:
        """Wait for the next run; returns its process and a child of that."""
        line = b""
        deadline = time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._handle], [], [], left)[0], "no run came"
            line += os.read(self._handle, 100)
        run, child = line.split()
        return int(run), int(child)

    def release(self) -> None:
        """Let the next run pass."""
        Path(f"{self.path}.go").touch()


def waiting_sweep(folder: Path) -> tuple[Path, Fifo]:
    """A run, one that waits, another run."""
    fifo = Fifo(folder / "fifo")
    cases: list[dict[str, Any]] = [
        {"what": "ok"},
        {"what": "wait", "path": str(fifo.path)},
        {"what": "ok", "tag": 1},
    ]
    return write_sweep(folder, cases), fifo


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Poll for what sends no event, such as the end of a process that is not our child."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.02)
