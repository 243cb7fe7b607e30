"""Sweeps that tests submit to a real Slurm cluster. Most commands are called in this process; each
of them runs in a process of its own in at least one test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.results.record import Record
from jobs.results.record_reader import read_records
from tests.jobs.harness import ROOT, call
from tests.jobs.launch.slurm_cluster import SlurmCluster

BENCHMARK = "tests.benchmarks.slurm_scenarios"
SOON_S = 240.0  # for what waits for nothing but its turn


@dataclass
class Scenario:
    """A sweep and the folder it is submitted into."""

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
        """End the waiting of the runs whose parameter `until` is this."""
        (self.folder / until).touch()

    def until_parameter(self, until: str) -> str:
        """The path of the file that a run waits for; two values name no file."""
        return until if until in ("", "requeued") else str(self.folder / until)

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`jobs.submit` of this sweep."""
        return self.call("jobs.submit", self.write_sweep(), "--out", "out", *arguments)

    def submit_alone(self, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own, as a user would call it."""
        command = ["jobs.submit", self.write_sweep(), "--out", "out"]
        return self.run_alone(*prefix, sys.executable, "-m", *command, **environment)

    def write_sweep(self) -> str:
        path = self.folder / f"{self.name}.yaml"
        path.write_text(json.dumps(self.sweep))  # JSON is YAML
        return str(path)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m ARGUMENTS` in the scenario's folder, from which a job finds the project only
        by PYTHONPATH."""
        with contextlib.chdir(self.folder):
            return call(*arguments, environment=self.cluster.environment)

    def run_alone(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a process of its own in that folder."""
        project = {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | self.cluster.environment | project | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        return json.loads(self.call("jobs", "status", "out", "--json").stdout)  # type: ignore[no-any-return]

    def records(self) -> list[Record]:
        records, bad = read_records(self.out)
        assert not bad
        return records

    def queue(self) -> list[str]:
        """Job id and state of what Slurm has not finished."""
        return self.cluster.client(
            "squeue", "-h", "-r", f"--name={self.name}", "-o", "%i %T"
        ).stdout.splitlines()

    def finish(self, timeout_s: float = SOON_S) -> list[Record]:
        """Wait until the queue holds none of its jobs; all its records then."""
        self.cluster.wait_for(lambda: not self.queue(), timeout_s, f"{self.name} to end")
        return self.records()

    def worker_states(self) -> list[dict[str, Any]]:
        """The state file of each of its workers."""
        paths = self.out.glob("submissions/*/jobs/*/state.json")
        return [json.loads(path.read_text()) for path in paths]

    def wait_until_executing(self) -> dict[str, Any]:
        """Wait until some run executes; returns its worker's state, which may be late."""

        def running() -> list[dict[str, Any]]:
            ended = {record.run for record in self.records()}
            states = [state for state in self.worker_states() if state["running"]]
            return [state for state in states if state["running"]["run"] not in ended]

        return self.cluster.wait_for(running, SOON_S, f"{self.name} to execute")[0]


class Scenarios:
    """Several scenarios by name, each in a folder of its own."""

    def __init__(self, cluster: SlurmCluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self._by_name: dict[str, Scenario] = {}

    def __getitem__(self, name: str) -> Scenario:
        return self._by_name[name]

    def new(self, name: str, **sweep: Any) -> Scenario:
        folder = self.folder / name
        folder.mkdir()
        sweep = {"name": name, "benchmark": BENCHMARK, "timeout_s": 200, **sweep}
        scenario = Scenario(self.cluster, folder, sweep)
        for axis in ("fixed", "zip"):  # a name stands for a file in the scenario's own folder
            given = sweep.get(axis, {}).get("until")
            if isinstance(given, list):
                sweep[axis]["until"] = [scenario.until_parameter(name) for name in given]
            elif given:
                sweep[axis]["until"] = scenario.until_parameter(given)
        self._by_name[name] = scenario
        return scenario

    def submit(self, name: str, **sweep: Any) -> Scenario:
        scenario = self.new(name, **sweep)
        done = scenario.submit()
        assert done.returncode == 0, done.stdout
        return scenario
