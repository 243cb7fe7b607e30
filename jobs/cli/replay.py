"""The command `replay`: repeat one run in the foreground."""

from __future__ import annotations

import shlex
import subprocess
import sys

import yaml

from jobs.cli.arguments import In, RunId
from jobs.cli.observed import found_run
from jobs.cli.output import fail
from jobs.results.latest import REPLAY
from jobs.sweep.benchmarks import load_benchmark

EXAMPLES = "3fa2"


def replay(run: RunId, folder: In = None) -> None:
    """Repeat one run on this machine in the foreground.

    Writes a sweep file with only this run to ./logs/replay, prints the command that executes it
    (submit ... --debug), and executes the command. The record of the run is also written to
    ./logs/replay.
    """
    seen, task = found_run(run, folder)
    if task.run.checkout:
        other = f"got run {task.run.id} with the checkout {task.run.checkout}"
        fail(f"replay must be given a run with the present code, {other}")
    shape = task.run.shape
    if shape.nodes > 1:
        fail(f"replay executes a run on this machine, got run {task.run.id} with {shape}")
    defaults = load_benchmark(task.run.benchmark).json_defaults
    sweep: dict[str, object] = {
        "name": "replay",
        "benchmark": task.run.benchmark,
        "fixed": {k: v for k, v in task.run.params.items() if defaults.get(k, ...) != v},
        "timeout_s": task.run.timeout_s,
        "resources": {"gpus_per_node": shape.gpus_per_node, "nodes": shape.nodes},
    }
    if shape.nproc_per_node is not None:
        sweep["launch"] = {"nproc_per_node": shape.nproc_per_node}
    path = REPLAY / f"{task.run.id}.yaml"  # the results folder may be read-only
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(sweep), encoding="utf-8")
    except OSError as error:  # e.g. ./logs is a file
        fail(f"cannot write {path}: {error.strerror}")
    command = ["-m", "jobs", "submit", str(path), "--debug", "--force", "--out", str(REPLAY)]
    print(shlex.join(["python", *command]), flush=True)
    if not all(one.is_own for one in seen.manifests if task.run.id in one.runs):
        # The parameters could name any code.
        fail(f"the run is also of another user; check {path}, then execute the command yourself")
    raise SystemExit(subprocess.run([sys.executable, *command]).returncode)
