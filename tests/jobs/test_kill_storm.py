"""Kills random processes of real local sweeps with SIGKILL, and submits them again until they end.

Whatever is killed, the records stay readable, and the same command completes the sweep. The
environment variable STORM_SEED sets the seed, which is otherwise that of the test's parameter. It
determines the roles of the processes that are killed, and how many processes start or end before
each kill, but not what the processes do meanwhile.

Two kinds of things may be left, and only by a kill of both a worker and its fork server, so that
nobody is left who knows them: a scratch folder, and a child in a session of its own.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from jobs.results.record_reader import read_records
from jobs.worker.fork_server import send_signal
from tests.jobs.harness import PATIENCE_S, await_true, parent_of, run, start

SWEEP = {
    "name": "storm",
    "benchmark": "tests.benchmarks.storm",
    "resources": {"gpus_per_node": 0},
    "timeout_s": 120,
    "tables": [{"name": "times", "rows": ["index"]}],
}
END_S = 2 * PATIENCE_S  # timeout of a queue that executes all runs, in seconds
QUEUE, WORKER, SERVER, RUN, RANK, CHILD = "queue", "worker", "server", "run", "rank", "child"
ROLES = {  # by words of the command line; the first that matches counts
    "fork_server import serve": SERVER,  # also a run, or torchrun's agent, whose parent is a server
    "-m jobs.worker.run_process": RANK,
    "-m jobs.worker ": WORKER,
    "-m jobs.submit": QUEUE,
    "sleep 1000": CHILD,
}
WEIGHTS = {QUEUE: 1, WORKER: 1, SERVER: 1, RUN: 4, RANK: 8, CHILD: 1}


@dataclass
class Storm:
    """A sweep under fire. Its file, results and temporary files are in an empty folder."""

    folder: Path
    dice: random.Random
    sweep: dict[str, object]
    kills: int
    killed: list[str] = field(default_factory=list)  # role of each process that was killed
    orphaned: int = 0  # number of fork servers that were killed together with their workers
    records: set[str] = field(default_factory=set)  # all complete lines of the record files

    def __post_init__(self) -> None:
        self.out, self.temporary = self.folder / "out", self.folder / "tmp"
        self.temporary.mkdir()
        self.path = self.folder / "storm.yaml"
        self.path.write_text(yaml.safe_dump(SWEEP | self.sweep))
        self.mark = f"STORM={self.folder}"
        self.dead: set[int] = set()  # pids of workers and servers that were killed
        self.parents: dict[int, int] = {}  # worker of each fork server

    def submit(self) -> subprocess.Popen[str]:
        name, value = self.mark.split("=")
        environment = {name: value, "TMPDIR": str(self.temporary)}
        options = ("--local", "--parallel", "2", "--out", self.out)
        return start("jobs.submit", self.path, *options, environment=environment)

    def processes(self) -> dict[int, str]:
        """Return the role of each process of this storm that is alive."""
        lines: dict[int, str] = {}
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                if f"\0{self.mark}\0".encode() in b"\0" + (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    parents[int(entry.name)] = parent_of(int(entry.name))
                    lines[int(entry.name)] = command  # "" if it is a zombie
        found: dict[int, str] = {}
        for pid, command in lines.items():
            role = next((role for words, role in ROLES.items() if words in command), None)
            parent = parents[pid]
            if role == SERVER and "fork_server import serve" in lines.get(parent, ""):
                role = RUN
            elif role == SERVER:
                self.parents.setdefault(pid, parent)
            if role is not None:
                found[pid] = role
        return found

    def await_changes(self, queue: subprocess.Popen[str], count: int) -> None:
        """Wait until processes have started or ended a number of times, or the queue has ended."""
        seen = self.processes().keys()

        def changed() -> bool:
            return queue.poll() is not None or self.processes().keys() != seen

        for _ in range(count):
            await_true(changed, "a process starts or ends")
            seen = self.processes().keys()

    def kill_one(self) -> None:
        """Kill a process of a random role."""
        found = self.processes()
        if not found:
            return
        roles = set(found.values())
        if roles <= {QUEUE, WORKER, SERVER} and self.dice.random() < 0.97:
            return  # else most kills would hit processes that start
        order = sorted(roles)
        role = self.dice.choices(order, [WEIGHTS[role] for role in order])[0]
        pid = self.dice.choice(sorted(pid for pid in found if found[pid] == role))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed.append(role)
        if role in (WORKER, SERVER):
            self.dead.add(pid)

    def rage(self) -> None:
        """Submit the sweep and kill processes, until the sweep is done. Without kills, it ends."""
        calm = 0  # number of submissions without kills
        while calm < 4:
            calm += len(self.killed) >= self.kills
            queue = self.submit()
            while queue.poll() is None and len(self.killed) < self.kills:
                self.await_changes(queue, self.dice.randrange(1, 4))
                self.kill_one()
            output, _ = queue.communicate(timeout=END_S)
            if self.dice.random() < 0.5:  # else the next submission meets what is still ending
                self.settle()
            self.check_records()
            if queue.returncode == 0:
                return
            assert queue.returncode in (1, -signal.SIGKILL), output
        raise AssertionError(f"the sweep does not end:\n{output}")

    def settle(self) -> None:
        """Wait until all processes have ended, except children that nobody knows any more."""
        await_true(lambda: set(self.processes().values()) <= {CHILD}, f"end of {self.processes()}")
        self.orphaned = sum(
            pid in self.dead and parent in self.dead for pid, parent in self.parents.items()
        )
        await_true(lambda: len(self.processes()) <= 2 * self.orphaned, "end of the children")

    def check_records(self) -> None:
        """Check that no line of a record file is lost. Workers may still be writing others."""
        lines: set[str] = set()
        for path in self.out.glob("records/*.jsonl"):
            lines.update(path.read_text().split("\n")[:-1])
        assert lines >= self.records
        self.records = lines

    def check(self) -> None:
        """Check everything that must hold after the storm."""
        self.settle()
        self.check_records()
        found, bad = read_records(self.out)
        assert not bad and len(found) == len(self.records)
        done = run("jobs", "status", self.out, "--json")
        tasks = json.loads(done.stdout)["tasks"]
        assert done.returncode == 0 and {task["state"] for task in tasks} == {"ok"}
        ok = Counter((r.run, r.repeat) for r in found if r.status == "ok")
        assert ok == {(task["run"], task["repeat"]): 1 for task in tasks}
        table = csv.reader(run("aggregate", self.out, "--format", "csv").stdout.splitlines())
        cells = {row[0]: float(row[-1]) for row in table if row and row[0].isdigit()}
        expected = {task["params"]["index"] for task in tasks}
        assert cells == {str(index): float(index) for index in expected}
        assert len(list(self.temporary.iterdir())) <= self.orphaned
        self.end()  # children of which nobody knows

    def end(self) -> None:
        """Kill all processes of this storm."""
        while pids := self.processes():
            for pid in pids:
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.05)


def storm(folder: Path, seed: int, kills: int, sweep: dict[str, object]) -> None:
    """Kill this number of processes, of as many sweeps as needed, and check each sweep."""
    seed = int(os.environ.get("STORM_SEED", seed))
    dice = random.Random(seed)
    number, roles = 0, Counter[str]()
    while roles.total() < kills:
        (part := folder / str(number)).mkdir()
        one = Storm(part, dice, sweep, kills - roles.total())
        try:
            one.rage()
            one.check()
        except BaseException:
            print(f"STORM_SEED={seed}, sweep {number}, killed: {one.killed}")
            one.end()
            raise
        roles += Counter(one.killed)
        number += 1
    print(f"STORM_SEED={seed}: {number} sweeps, killed: {dict(roles)}")


def sweep(single: int, ranks: int, gloo: bool = False) -> dict[str, object]:
    """Return the keys of a sweep of runs of one process, twice each, and of runs of two ranks."""
    cases: list[dict[str, object]] = [{"grid": {"index": list(range(1, single + 1))}}]
    if ranks:
        grid = {"index": list(range(single + 1, single + ranks + 1))}
        fixed = {"gloo": gloo}
        cases.insert(0, {"grid": grid, "fixed": fixed, "launch": {"nproc_per_node": 2}})
    return {"cases": cases, "repeats": 2, "runs_per_job": 8}


@pytest.mark.timeout(1200)
def test_random_kills(tmp_path: Path) -> None:
    storm(tmp_path, 1, 6, sweep(6, 0))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_many_random_kills(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed, 50, sweep(24, 0))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gloo", [False, True])
def test_many_random_kills_of_ranks(tmp_path: Path, gloo: bool) -> None:
    storm(tmp_path, 100 + gloo, 30, sweep(2, 6, gloo))
