"""Sweeps that tests submit to a real Slurm cluster.

Most commands are called in the test's process, which is faster. Each command runs in a separate
process in at least one test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.results.record import Record
from tests.jobs.harness import ROOT, call, records
from tests.jobs.launch.slurm_cluster import SlurmCluster

BENCHMARK = "tests.benchmarks.misbehave"
HELD = {"additional_parameters": {"hold": True}}  # settings of jobs that stay in the queue


@dataclass
class Scenario:
    """A sweep, and the folder from which it is submitted."""

    cluster: SlurmCluster
    folder: Path
    sweep: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.sweep["name"])

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def release(self, until: str) -> None:
        """Let the runs whose parameter `until` names this file continue."""
        (self.folder / until).touch()

    def programs(self, **scripts: str) -> dict[str, str]:
        """Put scripts before programs of Slurm, which they can call as $real. Returns PATH."""
        folder = self.folder / "-".join(["bin", *scripts])
        folder.mkdir(exist_ok=True)
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/bash\nreal={shutil.which(name)}\n{script}\n")
            (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    def submit(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Call `python -m jobs.submit` with this sweep."""
        command = ["jobs.submit", self.write_sweep(), "--out", "out", *arguments]
        return self.call(*command, **environment)

    def submit_alone(self, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Submit the sweep in a separate process, as a user does."""
        command = [*prefix, sys.executable, "-m", "jobs.submit", self.write_sweep(), "--out", "out"]
        project = {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | self.cluster.environment | project | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def write_sweep(self) -> str:
        path = self.folder / f"{self.name}.yaml"
        path.write_text(json.dumps(self.sweep))  # JSON is YAML
        return str(path)

    def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Call `python -m ARGUMENTS` in the scenario's folder.

        From there, a job can import the project only through PYTHONPATH.
        """
        with contextlib.chdir(self.folder):
            return call(*arguments, environment=self.cluster.environment | environment)

    def status(self, **environment: str) -> dict[str, Any]:
        lines = self.call("jobs", "status", "out", "--json", **environment).stdout.splitlines()
        return json.loads(lines[-1])  # type: ignore[no-any-return] # a notice may come first

    def records(self) -> list[Record]:
        return records(self.out)

    def queue(self, cluster: SlurmCluster | None = None) -> list[str]:
        """Return the id of each unfinished Slurm job of this scenario."""
        command = ("squeue", "-h", "-r", f"--name={self.name}", "-o", "%i")
        return (cluster or self.cluster).client(*command).stdout.splitlines()

    def finish(self) -> list[Record]:
        """Wait until the queue has no job of this scenario, and return its records."""
        self.cluster.wait_for(lambda: not self.queue(), f"{self.name} to end")
        return self.records()

    def wait_until_executing(self, after: int = 0) -> None:
        """Wait until a run executes after this number of records.

        Between two runs, a worker that is stopped records none.
        """

        def running() -> list[dict[str, Any]]:
            ended = {(record.run, record.repeat, record.attempt) for record in self.records()}
            paths = self.out.glob("submissions/*/jobs/*/state.json") if len(ended) >= after else ()
            states = [json.loads(path.read_text()) for path in paths]
            return [s for s in states if s["running"] and attempt(s["running"]) not in ended]

        def attempt(running: dict[str, Any]) -> tuple[str, int, int]:
            return running["run"], running["repeat"], running["attempt"]

        self.cluster.wait_for(running, f"{self.name} to execute")


@dataclass
class Scenarios:
    """Makes the scenarios of a test, each with a name and a folder of its own."""

    cluster: SlurmCluster
    folder: Path

    def new(self, name: str, **sweep: Any) -> Scenario:
        folder = self.folder / name
        folder.mkdir()
        sweep = {"name": name, "benchmark": BENCHMARK, "timeout_s": 200, **sweep}
        return Scenario(self.cluster, folder, sweep)

    def submit(self, name: str, **sweep: Any) -> Scenario:
        scenario = self.new(name, **sweep)
        done = scenario.submit()
        assert done.returncode == 0, done.stdout
        return scenario


def states(status: dict[str, Any]) -> list[str]:
    return [task["state"] for task in status["tasks"]]


def worker_pid(scenario: Scenario, node_rank: int) -> int:
    """Return the pid of the worker of one node of the scenario's only job."""
    (job_id,) = scenario.queue()
    wanted = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_NODEID={node_rank}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            is_worker = b"jobs.launch.worker_task" in words and not words[0].endswith(b"srun")
            if is_worker and wanted <= set((process / "environ").read_bytes().split(b"\0")):
                return int(process.name)
    raise AssertionError(f"no worker of job {job_id} on node {node_rank}")
