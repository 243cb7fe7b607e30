"""The worker: inside the allocation, runs the runs of one job one after another.

    python -m jobs.worker DIR/submissions/ID INDEX        (the launcher does this)

It is the only writer of records. It never imports torch and never runs a benchmark itself, so that
whatever a run does, the worker can say how it ended and start the next one clean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from jobs import provenance
from jobs.expand import Run
from jobs.isolation import (
    EXIT_S,
    Child,
    ForkServer,
    ask_for_stacks,
    blocked_signals,
    oom_kills,
    read_stacks,
    without_leaks,
)
from jobs.manifest import Manifest, read_manifest
from jobs.record import (
    RERUN,
    Failure,
    Measurements,
    Record,
    RecordTail,
    RecordWriter,
    Seconds,
    write_json,
)
from jobs.run_process import Request, execute, run_alone
from jobs.torchrun import Followers, follow, lead

DEATHS = 2  # workers that one run may take down before it is left alone
LIMIT_MARGIN_S = 120.0  # a stop this close to the time limit is the time limit's doing


class Stopped(SystemExit):
    """The worker was told to stop; what was running is recorded."""


class Worker:
    """Runs one job of a submission.

    Args:
        manifest: the submission.
        index: the job in it.
        in_process: call the benchmark here, without isolation or timeout (`--debug`).
        node_rank: of this node among the job's; only node 0's worker writes records.
    """

    def __init__(
        self, manifest: Manifest, index: int, in_process: bool = False, node_rank: int = 0
    ):
        self.manifest = manifest
        self.job = manifest.jobs[index]
        self.in_process = in_process
        self.node_rank = node_rank
        self.folder = manifest.job_folder(index)
        self.started = time.time()
        self.visible = provenance.visible_gpus()
        under_slurm = manifest.executor == "slurm"
        if (
            under_slurm and "CUDA_VISIBLE_DEVICES" in os.environ
        ):  # Slurm says what the job was given
            self.visible = [t for t in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if t]
        self.gpus = self.visible[: self.job.shape.gpus_per_node]
        self.device = provenance.device_kind(self.gpus)
        self.slurm = {
            name: os.environ[f"SLURM_{name.upper()}"]
            for name in (
                "job_id",
                "array_job_id",
                "array_task_id",
                "cluster_name",
                "job_partition",
                "job_nodelist",
                "restart_count",
            )
            if under_slurm and f"SLURM_{name.upper()}" in os.environ
        }
        self.environment = {
            "host": socket.gethostname(),
            "processor": provenance.processor(),
            "driver": provenance.driver_version(),
            "packages": provenance.packages(),
            "git": manifest.provenance.get("git"),
            "executor": manifest.executor,
        }
        self.tail = RecordTail(manifest.folder, {run for run, _ in self.job.tasks})
        self.seen: list[Record] = []
        self.executed = 0
        self.current: dict[str, Any] | None = None
        self.child: Child | None = None
        self.failures: list[Record] = []
        self._server: ForkServer | None = None
        self._writer: RecordWriter | None = None

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Every run of the job that is not done, one after another."""
        scrubbed = without_leaks(dict(os.environ), slurm=self.manifest.executor != "slurm")
        for name in set(os.environ) - set(scrubbed):
            del os.environ[name]
        shape = self.job.shape
        reason = self._why_not()
        followers: Followers | None = None
        if reason is None and shape.nodes > 1:
            attempt = self.slurm.get("restart_count", "0")
            meeting = self.folder / f"meet-{self.slurm.get('job_id', '0')}-{attempt}.json"
            if self.node_rank > 0:
                follow(meeting, self.node_rank, self._preload(), self.folder)
                return
            followers = Followers(shape.nodes - 1, meeting)
        elif self.node_rank > 0:
            return
        deaths = self._deaths()
        try:
            for run_id, repeat in self.job.tasks:
                run = self.manifest.runs[run_id]
                if self._is_done(run_id, repeat):
                    continue
                if reason is not None:
                    self._record(
                        run,
                        repeat,
                        {"status": "unsupported", "failure": _failure("Unsupported", reason)},
                    )
                elif deaths[f"{run_id}/{repeat}"] >= DEATHS:
                    message = f"its worker died {DEATHS} times while this ran"
                    self._record(
                        run,
                        repeat,
                        {"status": "killed", "failure": _failure("WorkerDied", message)},
                    )
                else:
                    self._execute(run, repeat, followers, deaths)
                if self.in_process and self.failures:
                    return
        finally:
            if followers is not None:
                followers.close()
        self._state(None, deaths)

    def _why_not(self) -> str | None:
        """Why this machine cannot give the job's shape, or None."""
        shape = self.job.shape
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if self.slurm else 1
        if shape.nodes > nodes:
            where = "Slurm gave" if self.slurm else "without Slurm there is"
            return f"needs {shape.nodes} nodes; {where} {nodes}"
        if shape.gpus_per_node > len(self.visible):
            return f"needs {shape.gpus_per_node} GPUs; {socket.gethostname()} offers {len(self.visible)}"
        return None

    def _is_done(self, run_id: str, repeat: int) -> bool:
        """Whether this submission, or (unless forced) any other, has measured it meanwhile."""
        self.seen += self.tail.new()
        for record in self.seen:
            if (record.run, record.repeat) != (run_id, repeat):
                continue
            if record.submission == self.manifest.id and record.status not in RERUN - {"killed"}:
                return True
            if record.status == "ok" and record.device == self.device and not self.manifest.force:
                return True
        return False

    def _deaths(self) -> Counter[str]:
        """How many workers of this job ended, without a word, during each run."""
        path = self.folder / "state.json"
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError):
            return Counter()
        deaths = Counter(state.get("deaths", {}))
        running = state.get("running")
        if running is not None:
            self.seen += self.tail.new()
            mine = (running["run"], running["repeat"])
            told = any(
                (r.run, r.repeat) == mine and r.finished_at >= running["started_at"]
                for r in self.seen
            )
            deaths[f"{mine[0]}/{mine[1]}"] += not told
        return deaths

    def _state(self, running: dict[str, Any] | None, deaths: Counter[str]) -> None:
        """Say what is running now: `status` shows it, and the next worker of this job learns of it
        if this one dies."""
        state = {
            "running": running,
            "deaths": dict(deaths),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "at": time.time(),
        }
        try:
            write_json(self.folder / "state.json", state)
        except OSError as error:  # a full disk must not end the job
            print(f"cannot write state.json: {error.strerror}", file=sys.stderr)

    # ---- one run ---------------------------------------------------------------------------------

    def _execute(
        self, run: Run, repeat: int, followers: Followers | None, deaths: Counter[str]
    ) -> None:
        started_at = time.time()
        attempt = 1 + max(
            (r.attempt for r in self.seen if (r.run, r.repeat) == (run.id, repeat)), default=0
        )
        log = self.folder / f"{run.id}-{repeat}-{attempt}.log"
        scratch = Path(tempfile.mkdtemp(prefix="run-"))
        request = Request(
            benchmark=run.benchmark,
            params=run.params,
            scratch=str(scratch),
            gpus=self.gpus,
            token=uuid.uuid4().hex,
            log=None if self.in_process else str(log),
            nproc_per_node=run.shape.nproc_per_node,
            nodes=run.shape.nodes,
        )
        running = {"run": run.id, "repeat": repeat, "attempt": attempt, "started_at": started_at}
        self.current = running | {"request": request, "before": provenance.gpu_states(self.gpus)}
        self._state(running, deaths)
        try:
            if run.shape.nproc_per_node is not None:
                outcome = self._run_ranks(request, followers, run.timeout_s)
            elif self.in_process:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
                outcome = execute(run.benchmark, run.params, self.gpus)
            else:
                outcome = self._run_alone(request, run.timeout_s)
            with blocked_signals():  # a stop comes before the record or after it
                self.child = None
                self._record(run, repeat, outcome)
                self.current = None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.executed += 1

    def _run_alone(self, request: Request, timeout_s: float) -> dict[str, Any]:
        kills = oom_kills()
        child = self._start(run_alone, request)
        scratch = Path(request.scratch)
        path = scratch / "outcome0.json"
        timed_out = not child.wait(timeout_s)
        if timed_out and path.exists():
            timed_out = not child.wait(EXIT_S)  # it has measured; only its exit hangs
        stacks = (
            ask_for_stacks(child, request.token, scratch) if timed_out else read_stacks(scratch)
        )
        child.kill(request.token)
        if path.exists():
            return json.loads(path.read_text())  # type: ignore[no-any-return]
        if timed_out:
            return _timeout(timeout_s, stacks)
        return _died(child.exit_code, stacks, oom_kills() > kills)

    def _run_ranks(
        self, request: Request, followers: Followers | None, timeout_s: float
    ) -> dict[str, Any]:
        kills = oom_kills()

        def remember(child: Child) -> None:
            self.child = child

        result = lead(self._fork_server(), request, followers, timeout_s, remember)
        outcomes = [outcome for node in result["nodes"] for outcome in node["outcomes"]]
        world_size = run_world_size(request)
        if len(outcomes) == world_size and all(o["status"] == "ok" for o in outcomes):
            return merge_ranks(outcomes)
        failed = [o for o in outcomes if o["status"] != "ok"]
        # A rank that a signal ended could write nothing; what the others say is the consequence.
        wrote = {o["rank"] for o in outcomes}
        silent = [
            failure
            for node in result["nodes"]
            for failure in (node["agent"] or {}).get("failures", [])
            if failure["rank"] not in wrote
        ]
        if silent and not result["timed_out"]:
            first = min(
                silent, key=lambda failure: (failure["exit_code"] == -signal.SIGTERM, failure["at"])
            )
            outcome = _died(first["exit_code"], result["stacks"], oom_kills() > kills)
            outcome["failure"]["rank"] = first["rank"]
            return outcome
        if failed:
            first = min(failed, key=lambda outcome: outcome["ended_at"])
            return first | {"failure": first["failure"] | {"rank": first["rank"]}}
        if result["timed_out"]:
            return _timeout(timeout_s, result["stacks"])
        errors = [
            node["agent"]["error"] for node in result["nodes"] if (node["agent"] or {}).get("error")
        ]
        message = errors[0] if errors else f"{len(outcomes)} of {world_size} ranks left an outcome"
        return {"status": "error", "failure": _failure("TorchrunError", message)}

    def _start(self, target: Any, request: Request) -> Child:
        self.child = self._fork_server().start(target, request)
        return self.child

    def _fork_server(self) -> ForkServer:
        if self._server is None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            self._server = ForkServer(self._preload())
        return self._server

    def _preload(self) -> list[str]:
        names = dict.fromkeys(self.manifest.runs[run].benchmark for run, _ in self.job.tasks)
        modules = [n if "." in n else f"systems.benchmarks.{n}" for n in names]
        return ["torch", "jobs.run_process", "jobs.torchrun", *modules]

    # ---- records ---------------------------------------------------------------------------------

    def _record(self, run: Run, repeat: int, outcome: dict[str, Any]) -> None:
        now = time.time()
        current = self.current or {"attempt": 1, "started_at": now, "before": [], "request": None}
        status, failure = outcome["status"], outcome.get("failure")
        measurements = None
        if status == "ok":
            try:
                measurements = Measurements.model_validate(outcome["measurements"])
            except ValueError as error:
                message = f"{run.benchmark}.run returned what is no measurement: {error}"
                status, failure = "error", _failure("ValidationError", message)
        called, ended = outcome.get("called_at"), outcome.get("ended_at")
        compiling = measurements.compiling_seconds if measurements else 0.0
        request = current["request"]
        log = Path(request.log) if request and request.log else None
        after = provenance.gpu_states(self.gpus)
        record = Record(
            run=run.id,
            repeat=repeat,
            attempt=current["attempt"],
            status=status,
            sweep=self.manifest.sweep.name,
            submission=self.manifest.id,
            job=self.job.index,
            benchmark=run.benchmark,
            version=run.version,
            params=run.params,
            device=self.device,
            started_at=current["started_at"],
            finished_at=now,
            seconds=Seconds(
                waiting=self.started - self.manifest.created_at,
                starting=called - current["started_at"] if called else None,
                compiling=compiling if called else None,
                measuring=ended - called - compiling if called and ended else None,
            ),
            measurements=measurements,
            failure=Failure.model_validate(failure) if failure else None,
            environment=self.environment | {"loaded": outcome.get("versions", {})},
            gpus=[
                {
                    "name": b["name"],
                    "uuid": b["uuid"],
                    "before": _state_only(b),
                    "after": _state_only(a),
                }
                for b, a in zip(current["before"], after, strict=False)
            ],
            slurm=self.slurm,
            log=str(log.relative_to(self.manifest.folder)) if log and log.exists() else None,
        )
        if self._writer is None:
            name = f"{self.manifest.id}-{self.job.index}"
            self._writer = RecordWriter(self.manifest.folder / "records", name)
        self._writer.write(record)
        took = now - current["started_at"]
        reason = (
            f": {record.failure.type}: {record.failure.message.splitlines()[0][:200]}"
            if record.failure and record.failure.message
            else ""
        )
        print(f"{record.status:11} {took:7.1f} s  {run.id}  {run.label()}{reason}", flush=True)
        if status not in ("ok", "unsupported"):
            self.failures.append(record)

    # ---- being told to stop ----------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End what is running and record it: at the time limit, on preemption, when cancelled.

        Args:
            reason: limit, preempted or cancelled. The first run of an allocation that meets the
                limit can never end within it: that is its timeout. Others get another chance.
        """
        with blocked_signals():
            current, self.current = self.current, None
            if current is None:
                return
            if self.child is not None:
                self.child.kill(current["request"].token)
            run = self.manifest.runs[current["run"]]
            status, message = reason, f"stopped: {reason}"
            if reason == "limit":
                status, message = "preempted", "the job's time limit came; the rest is requeued"
                if self.executed == 0:
                    status = "timeout"
                    message = f"needs more than the job's limit of {self.job.timeout_min} min"
            self.current = current
            self._record(
                run,
                current["repeat"],
                {"status": status, "failure": _failure(reason.capitalize(), message)},
            )
            self.current = None
            shutil.rmtree(current["request"].scratch, ignore_errors=True)

    def near_limit(self) -> bool:
        """Whether the job's time is about up."""
        return time.time() - self.started > self.job.timeout_min * 60 - LIMIT_MARGIN_S

    def handle_term(self) -> None:
        """On SIGTERM (scancel, preemption, Ctrl-C of the local queue): record and leave."""

        def on_term(signum: int, frame: FrameType | None) -> None:
            self.stop("preempted" if self._slurm_preempts() else "cancelled")
            raise Stopped(128 + signum)

        signal.signal(signal.SIGTERM, on_term)

    def _slurm_preempts(self) -> bool:
        import subprocess

        if "job_id" not in self.slurm:
            return False
        command = ["squeue", "-h", "-t", "all", "-j", self.slurm["job_id"], "-o", "%T"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return "PREEMPTED" in done.stdout or "REQUEUE" in done.stdout


def run_world_size(request: Request) -> int:
    return request.nodes * (request.nproc_per_node or 1)


def merge_ranks(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """One outcome of all ranks': times and memory as lists by rank, the rest as rank 0 has it."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome["rank"])
    merged = dict(outcomes[0]["measurements"])
    for name in ("samples_ms", "peak_memory_bytes"):
        phases = outcomes[0]["measurements"].get(name, {})
        merged[name] = {p: [o["measurements"][name][p] for o in outcomes] for p in phases}
    return outcomes[0] | {
        "measurements": merged,
        "called_at": max(outcome["called_at"] for outcome in outcomes),
        "ended_at": max(outcome["ended_at"] for outcome in outcomes),
    }


def _failure(kind: str, message: str, traceback: str | None = None) -> dict[str, Any]:
    return {"type": kind, "message": message} | ({"traceback": traceback} if traceback else {})


def _timeout(timeout_s: float, stacks: str) -> dict[str, Any]:
    return {
        "status": "timeout",
        "failure": _failure("Timeout", f"took more than {timeout_s:g} s", stacks),
    }


def _died(exit_code: int | None, stacks: str, out_of_memory: bool) -> dict[str, Any]:
    """The outcome of a process that ended without writing one."""
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        if out_of_memory and name == "SIGKILL":
            message = "the kernel killed it: its memory cgroup is full"
            return {
                "status": "oom",
                "failure": _failure(name, message, stacks) | {"memory": "host"},
            }
        return {"status": "killed", "failure": _failure(name, f"ended by {name}", stacks)}
    message = f"left with exit code {exit_code} before it returned"
    return {"status": "error", "failure": _failure(f"exit code {exit_code}", message, stacks)}


def _state_only(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k not in ("name", "uuid")}


def main(arguments: list[str]) -> int:
    submission, index = Path(arguments[0]), int(arguments[1])
    worker = Worker(read_manifest(submission), index)
    worker.handle_term()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
