"""Writes and reads manifests. A manifest lists the runs and the jobs of one submission.

A run is one combination of parameters. A job executes one or more runs. An attempt is one execution
of a run. A submission has these files in the results folder DIR:

    DIR/submissions/<id>/manifest.json     the merged sweep file, the runs and the jobs
    DIR/submissions/<id>/handles.json      for each job, its Slurm id or its local process
    DIR/submissions/<id>/cancelled.json    runs that must not start, see jobs/results/cancelled.py
    DIR/submissions/<id>/jobs/<index>/     logs of the job, and state.json: the run it executes now
    DIR/artifacts/<run>-<repeat>-<attempt>/   files that the benchmark wrote during an attempt
    DIR/snapshots/<id>/<repository>/       copy of the code, for submissions with --snapshot
    DIR/snapshots/<id>/<submission>.json   states of the copied repositories at the submission

The manifest is written before the jobs are submitted. Each submission has a separate folder, so
concurrent submissions do not conflict.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.json_files import write_json
from jobs.processes import ProcessHandle
from jobs.run import Run, Shape
from jobs.sweep.schema import Sweep

SUBMISSIONS = "submissions"
ARTIFACTS = "artifacts"
SNAPSHOTS = "snapshots"  # folder of copies of the code


class Executor(StrEnum):
    """The way in which the jobs of a submission are executed."""

    slurm = "slurm"
    local = "local"  # by a queue on the submitting machine
    debug = "debug"  # in the submitting process, which stops at the first failure


class BrokenManifest(RuntimeError):
    """Raised if the manifest.json or handles.json of a submission cannot be read."""


@dataclass(frozen=True)
class Job:
    """Runs that one Slurm job, or one process of the local queue, executes one after another."""

    index: int
    shape: Shape  # resources and launch settings, equal for all runs of the job
    timeout_min: int  # time limit of the whole job, in minutes
    tasks: list[tuple[str, int]]  # (run id, repeat)


@dataclass(frozen=True)
class SlurmHandle:
    """The Slurm id of a job that was submitted to Slurm."""

    job_id: str  # "123", or "123_4" for an element of a job array


@dataclass(frozen=True)
class Snapshot:
    """Copy of the code from which the jobs of a submission run."""

    folder: str  # relative to the results folder: snapshots/<id>
    cwd: str  # current folder of the jobs; in the copy if its repository was copied
    python_path: list[str]  # value of PYTHONPATH for the jobs, one folder per element


@dataclass(frozen=True)
class Manifest:
    """The runs and jobs of one submission, as stored in its manifest.json and handles.json."""

    folder: Path  # the results folder, DIR
    id: str
    created_at: float  # in seconds since the epoch
    executor: Executor
    sweep: Sweep
    sweep_path: str
    command: str
    runs: dict[str, Run]
    jobs: list[Job]
    done: list[tuple[str, int]]  # (run id, repeat) with earlier results, not submitted again
    provenance: dict[str, Any]
    force: bool = False
    save_untracked: bool = False  # whether diffs contain small untracked files
    snapshot: Snapshot | None = None  # None: the jobs run the code where it is
    handles: dict[int, SlurmHandle | ProcessHandle] = field(default_factory=dict, compare=False)

    @property
    def path(self) -> Path:
        """The folder of the submission: `submissions/<id>` in the results folder."""
        return self.folder / SUBMISSIONS / self.id

    @property
    def slurm_ids(self) -> dict[int, str]:
        """Slurm ids of the jobs that were submitted to Slurm, by job index."""
        return {i: h.job_id for i, h in self.handles.items() if isinstance(h, SlurmHandle)}

    @property
    def process(self) -> ProcessHandle | None:
        """The process that runs a local or debug submission.

        None for a Slurm submission, and before the process has started.
        """
        return next((h for h in self.handles.values() if isinstance(h, ProcessHandle)), None)

    def job_folder(self, index: int) -> Path:
        return self.path / "jobs" / str(index)

    def artifacts(self, run: str, repeat: int, attempt: int) -> Path:
        """Return the folder for files of an attempt, which is one execution of a run.

        The folder exists only if the benchmark creates it.
        """
        return self.folder / ARTIFACTS / f"{run}-{repeat}-{attempt}"


def new_id() -> str:
    """Return a unique submission id, made of the time, the process id and random digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{os.getpid()}-{os.urandom(2).hex()}"


def submitter() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        return str(os.getuid())


def write_manifest(manifest: Manifest) -> None:
    """Create the log folders of the jobs, and write manifest.json."""
    for job in manifest.jobs:  # Slurm kills a job that has no log folder, and gives no reason
        manifest.job_folder(job.index).mkdir(parents=True, exist_ok=True)
    shapes = list(dict.fromkeys([run.shape for run in manifest.runs.values()]))
    write_json(
        manifest.path / "manifest.json",
        {
            "id": manifest.id,
            "created_at": manifest.created_at,
            "executor": manifest.executor,
            "sweep": manifest.sweep.model_dump(mode="json", by_alias=True),
            "sweep_path": manifest.sweep_path,
            "command": manifest.command,
            "shapes": [asdict(shape) for shape in shapes],
            "runs": [
                {
                    "id": run.id,
                    "benchmark": run.benchmark,
                    "version": run.version,
                    "params": run.params,
                    "shape": shapes.index(run.shape),
                    "timeout_s": run.timeout_s,
                    **({"code": run.code} if run.code else {}),
                }
                for run in manifest.runs.values()
            ],
            "jobs": [
                {
                    "index": job.index,
                    "shape": asdict(job.shape),
                    "timeout_min": job.timeout_min,
                    "tasks": job.tasks,
                }
                for job in manifest.jobs
            ],
            "done": manifest.done,
            "provenance": manifest.provenance,
            "force": manifest.force,
            "save_untracked": manifest.save_untracked,
            "snapshot": asdict(manifest.snapshot) if manifest.snapshot else None,
        },
    )


def write_handles(manifest: Manifest) -> None:
    """Write the file handles.json.

    For a Slurm submission, the file contains the Slurm id of each job. Otherwise it contains the
    local process that runs the jobs.
    """
    handles = {
        str(index): {"slurm": handle.job_id} if isinstance(handle, SlurmHandle) else asdict(handle)
        for index, handle in manifest.handles.items()
    }
    write_json(manifest.path / "handles.json", handles)


def read_manifest(path: Path) -> Manifest:
    """Read manifest.json and handles.json of a submission.

    Args:
        path: the submission's folder.

    Raises:
        BrokenManifest: if a file cannot be read or is invalid, e.g. because a later version of
            the project wrote it.
    """
    data = _read_json(path / "manifest.json")
    handles_path = path / "handles.json"
    handles = _read_json(handles_path) if handles_path.exists() else {}
    try:
        return _manifest(path, data, handles)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        why = f"sweep.{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except KeyError as error:
        why = f"the key {error} is missing"
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        why = str(error)
    raise BrokenManifest(
        f"{path}/manifest.json is not a manifest that this version can read: {why}"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BrokenManifest(f"{path} cannot be read: {why}") from None


def _handle(data: dict[str, Any]) -> SlurmHandle | ProcessHandle:
    if "slurm" in data:
        return SlurmHandle(str(data["slurm"]))
    known = {field.name for field in fields(ProcessHandle)}
    return ProcessHandle(**{name: value for name, value in data.items() if name in known})


def _manifest(path: Path, data: dict[str, Any], handles: dict[str, Any]) -> Manifest:
    shapes = [Shape(**shape) for shape in data["shapes"]]
    runs = {
        run["id"]: Run(
            run["id"],
            run["benchmark"],
            run["version"],
            run["params"],
            shapes[run["shape"]],
            run["timeout_s"],
            tuple(run.get("code", ())),
        )
        for run in data["runs"]
    }
    jobs = [
        Job(
            job["index"],
            Shape(**job["shape"]),
            job["timeout_min"],
            [(r, n) for r, n in job["tasks"]],
        )
        for job in data["jobs"]
    ]
    return Manifest(
        folder=path.parent.parent,
        id=data["id"],
        created_at=data["created_at"],
        executor=Executor(data["executor"]),
        sweep=Sweep.model_validate(_without_texts(data["sweep"])),
        sweep_path=data["sweep_path"],
        command=data["command"],
        runs=runs,
        jobs=jobs,
        done=[(r, n) for r, n in data["done"]],
        provenance=data["provenance"],
        force=data["force"],
        save_untracked=data.get("save_untracked", False),
        snapshot=Snapshot(**data["snapshot"]) if data.get("snapshot") else None,
        handles={int(index): _handle(handle) for index, handle in handles.items()},
    )


def _without_texts(sweep: dict[str, Any]) -> dict[str, Any]:
    """Remove the key `text` from the tables of a sweep.

    Older versions of the project wrote this key to manifests.
    """
    tables = sweep.get("tables") if isinstance(sweep, dict) else None
    if not isinstance(tables, list):
        return sweep  # the schema reports what is wrong
    without = [
        {key: value for key, value in table.items() if key != "text"}
        if isinstance(table, dict)
        else table
        for table in tables
    ]
    return sweep | {"tables": without}


def read_manifests(folder: Path, notes: list[str] | None = None) -> list[Manifest]:
    """Read the manifests of all submissions of a results folder, oldest first.

    Args:
        folder: the results folder.
        notes: list to which a note is added for each manifest that cannot be read, if another one
            can. None: raise an error for the first one.

    Raises:
        FileNotFoundError: if the folder contains no submissions.
        BrokenManifest: if a manifest.json or handles.json cannot be read. With `notes`, only if no
            manifest can be read.
    """
    paths = sorted((folder / SUBMISSIONS).glob("*/manifest.json"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no submission (expected {folder}/{SUBMISSIONS}/*/manifest.json)"
        )
    manifests: list[Manifest] = []
    broken: list[BrokenManifest] = []
    for path in paths:
        try:
            manifests.append(read_manifest(path.parent))
        except BrokenManifest as error:
            broken.append(error)
    if broken and (notes is None or not manifests):
        raise broken[0]
    if notes is not None:
        notes += [f"submission not shown: {error}" for error in broken]
    return sorted(manifests, key=lambda m: m.created_at)
