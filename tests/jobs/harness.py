"""Helpers for tests that run real submissions: write sweeps, run commands, read records."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from jobs.cli.application import COMMANDS, app
from jobs.launch.plan_submission import Options, prepare
from jobs.processes import start_ticks
from jobs.results.manifest import Executor, Manifest, write_manifest
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.sweep.load import load_sweep

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # timeout of waits that take about a second on an idle machine, in seconds
TESTS_OWN = "OMP_NUM_THREADS"  # set by tests/conftest.py for the test process only
LEAKS = {  # variables of a surrounding run or Slurm allocation, which jobs must not inherit
    "RUN_ARTIFACTS": "/proc/of another run",
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
    """Write a sweep of the benchmark `misbehave` to `folder`/sweep.yaml and return its path.

    Args:
        cases: one dictionary per run: its parameters, and optionally `timeout_s`, `benchmark` and
            `resources`.
        keys: keys of the sweep that replace the defaults.
    """
    blocks: list[dict[str, Any]] = []
    for case in cases:
        fixed = dict(case)
        own: dict[str, Any] = {
            key: fixed.pop(key) for key in ("timeout_s", "benchmark", "resources") if key in fixed
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
    """Start `python -m ARGUMENTS` in the project's root folder with its output captured."""
    return start_python("-m", *arguments, environment=environment)


def start_python(
    *arguments: str | Path,
    environment: dict[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.STDOUT,
    folder: Path = ROOT,
) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` in the project's root folder or in another one."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != TESTS_OWN} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
    )


def run(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` to its end. `stdout` of the result also contains stderr."""
    return run_python("-m", *arguments, environment=environment)


def run_python(
    *arguments: str | Path, environment: dict[str, str] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end, see `run`."""
    process = start_python(*arguments, environment=environment, folder=folder)
    try:
        output, _ = process.communicate(timeout=240)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def shell(line: str, exit_code: int = 0) -> str:
    """Run a line in bash, check its exit code, and return the output of both streams."""
    done = subprocess.run(
        ["bash", "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == exit_code, f"{line}\n{done.stdout}"
    return done.stdout


def run_as_nobody(command: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m jobs COMMAND OUT` as another user, which only root can. See `run`.

    That user may not be able to read Python or this project. Two harmless commands first import all
    modules.
    """
    code = (
        "import os; from typer.testing import CliRunner; from jobs.cli.application import app; "
        f"CliRunner().invoke(app, ['status', {str(out)!r}]); "
        f"CliRunner().invoke(app, [{command!r}, 'no-such-folder']); "
        "os.setuid(65534); app()"
    )
    return run_python("-c", code, command, out)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def call(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like `run`, but call the command in this process, which saves half a second.

    Not suitable for a submission that a test expects to have ended: `jobs status` shows a local
    submission as running while the process that submitted it is alive.

    Returns:
        The completed process. `stdout` has the output of both streams, `stderr` only of stderr.
    """
    module, *rest = map(str, arguments)
    default = {"jobs.submit": ["submit"], "aggregate": ["tables"]}.get(module, [])
    words = rest if rest[:1] and rest[0] in COMMANDS else [*default, *rest]
    given: dict[str, str | None] = {"COLUMNS": "80", TESTS_OWN: None, **(environment or {})}
    result = CliRunner().invoke(app, words, env=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.output, result.stderr)


def records(out: Path) -> list[Record]:
    found, bad = read_records(out)
    assert not bad
    return found


def only_record(out: Path, **params: Any) -> Record:
    """Return the only record with these parameters. Fails if there is none or more than one."""
    found = [r for r in records(out) if params.items() <= r.params.items()]
    assert len(found) == 1, f"expected one record with {params}, got {len(found)}"
    return found[0]


def facts(record: Record) -> dict[str, Any]:
    assert record.measurements is not None, record.failure
    return record.measurements.facts


def artifacts_of(out: Path, record: Record) -> dict[str, str]:
    """Return the name and the content of each file in a run's artifacts folder."""
    assert record.artifacts is not None, record.failure
    return {path.name: path.read_text() for path in (out / record.artifacts).iterdir()}


def write_submission(sweep: Path, out: Path, executor: Executor = Executor.local) -> Manifest:
    """Write the manifest of a submission without starting its jobs."""
    prepared = prepare(load_sweep(sweep, [], None, None), Options(executor, out), str(sweep))
    write_manifest(prepared.manifest)
    return prepared.manifest


def statuses(out: Path) -> dict[str, str]:
    """Return the state of each run in `jobs status`. A key is the run's action and tag: "wait0"."""
    tasks = json.loads(call("jobs", "status", out, "--json").stdout)["tasks"]
    return {f"{t['params']['what']}{t['params']['tag']}": t["state"] for t in tasks}


class Fifo:
    """A FIFO to which a run with `what: wait` writes when it has started to wait."""

    def __init__(self, path: Path):
        self.path = path
        os.mkfifo(path)
        self._handle = os.open(path, os.O_RDWR)  # also open for writing: no end of file is seen

    def pids(self) -> tuple[int, int]:
        """Wait for the next run and return the pids of its process and of a child process."""
        line = b""
        deadline = time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._handle], [], [], left)[0], (
                "no run wrote to the FIFO"
            )
            line += os.read(self._handle, 100)
        run, child = line.split()
        return int(run), int(child)

    def release(self) -> None:
        """Let later runs end instead of waiting, and also the present one if it only pauses."""
        Path(f"{self.path}.go").touch()


def waiting_sweep(folder: Path, what: str = "wait") -> tuple[Path, Fifo]:
    """Write a sweep of three runs, of which the second waits. "pause": until it is released."""
    fifo = Fifo(folder / "fifo")
    cases: list[dict[str, Any]] = [
        {"what": "ok"},
        {"what": what, "path": str(fifo.path)},
        {"what": "ok", "tag": 1},
    ]
    return write_sweep(folder, cases), fifo


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def alive(pid: int) -> bool:
    return start_ticks(pid) is not None


def grow_old(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds. For events without notification, as the end of a non-child."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.02)
