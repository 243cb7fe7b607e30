"""Manifests: the runs and the jobs of one submission.

A run is one combination of parameters. A job executes one or more runs. An attempt is one execution
of a run. This module writes these files in the results folder DIR:

    DIR/submissions/<id>/manifest.json    the merged sweep file, the runs and the jobs
    DIR/submissions/<id>/handles.json     for each job, the job in Slurm or the local process
    DIR/submissions/<id>/jobs/<index>/    folder of the job, empty

docs/results_folders.md lists all files. The manifest is written before the jobs are submitted.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import time
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jobs.block import Block
from jobs.processes import ProcessHandle
from jobs.results.slurm_job import SlurmJob
from jobs.results.unreadable import (
    BadLine,
    NoResults,
    UnreadableResults,
    first_problem,
    names_in,
    read_json,
)
from jobs.run import Run, Shape
from jobs.sweep.schema import Sweep
from jobs.whole_files import is_own, write_json

SUBMISSIONS = "submissions"
ARTIFACTS = "artifacts"
HANDLES = "handles.json"
SNAPSHOTS = "snapshots"  # folder of copies of the code
SHOWN_BELOW = 5  # maximum number of results folders that an error message lists


class Executor(StrEnum):
    """The way in which the jobs of a submission are executed."""

    slurm = "slurm"
    local = "local"  # by a queue on the submitting machine
    debug = "debug"  # in the submitting process, which stops at the first failure


class BrokenManifest(UnreadableResults):
    def __init__(self, path: Path, reason: str):
        self.problem = BadLine(path, 0, reason)
        super().__init__(f"{path} is not a manifest that this version can read: {reason}")


@dataclass(frozen=True)
class Job:
    """Runs that one Slurm job, or one process of the local queue, executes one after another."""

    index: int
    shape: Shape  # resources and launch settings, equal for all runs of the job
    timeout_min: int  # time limit of the whole job, in minutes
    tasks: list[tuple[str, int]]  # (run id, repeat)


@dataclass(frozen=True)
class Snapshot:
    """Copy of the code from which the jobs of a submission run."""

    folder: str  # relative to the results folder: snapshots/<id>
    cwd: str  # current folder of the jobs; in the copy if its repository was copied
    python_path: list[str]  # value of PYTHONPATH for the jobs, one folder per element


@dataclass(frozen=True)
class Checkout:
    """Another checkout of the code that a submission measures, see `jobs.launch.against`."""

    name: str
    folder: str  # copy of the checkout, relative to the results folder: snapshots/<name>
    cwd: str  # current folder of the runs
    python_path: list[str]  # folders that come first in PYTHONPATH of the runs
    state: dict[str, Any]  # commit and changes, as in the field environment.git of records
    of_project: bool  # whether it is a checkout of this project, not of the user's repository


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
    done: list[tuple[str, int]]  # (run id, repeat) not submitted: done, queued or running before
    provenance: dict[str, Any]
    force: bool = False
    keep_stale: bool = False  # whether results of older code count as done
    snapshot: Snapshot | None = None  # None: the jobs run the code where it is
    blocks: list[Block] = field(default_factory=list)  # empty: the runs are not paired
    checkouts: dict[str, Checkout] = field(default_factory=dict)  # other checkouts, by name
    handles: dict[int, SlurmJob | ProcessHandle] = field(default_factory=dict, compare=False)
    handles_unreadable: bool = False  # whether handles.json cannot be read

    @property
    def path(self) -> Path:
        return self.folder / SUBMISSIONS / self.id

    @property
    def is_submit(self) -> bool:
        """Whether the command is submit, not retry, so that it accepts all options of submit."""
        return not {"jobs.submit", "submit"}.isdisjoint(shlex.split(self.command))

    @property
    def is_own(self) -> bool:
        """Whether this user owns the submission. Others may have put anything into its files."""
        files = [self.path / name for name in ("manifest.json", HANDLES)]
        return all(is_own(path) for path in (self.path, *filter(os.path.exists, files)))

    @property
    def slurm_jobs(self) -> dict[int, SlurmJob]:
        return {i: h for i, h in self.handles.items() if isinstance(h, SlurmJob)}

    @property
    def slurm_ids(self) -> dict[int, str]:
        """Ids of the jobs that Slurm has accepted, as far as they are known, by job index."""
        return {i: job.id for i, job in self.slurm_jobs.items() if job.id is not None}

    @property
    def process(self) -> ProcessHandle | None:
        """The process that runs a local or debug submission, from its start on."""
        return next((h for h in self.handles.values() if isinstance(h, ProcessHandle)), None)

    def job_folder(self, index: int) -> Path:
        return self.path / "jobs" / str(index)

    def artifacts(self, run: str, repeat: int, attempt: int) -> Path:
        """Return the folder for files of an attempt. It exists only if the benchmark creates it."""
        return self.folder / ARTIFACTS / f"{run}-{repeat}-{attempt}"


def new_id() -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{os.getpid()}-{os.urandom(2).hex()}"


def submitter() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        return str(os.getuid())


def write_manifest(manifest: Manifest) -> str:
    """Create the log folders of the jobs, and write manifest.json. Return a hash for the jobs."""
    manifest.path.mkdir(parents=True, exist_ok=True)
    for job in manifest.jobs:  # Slurm kills a job that has no log folder, and gives no reason
        manifest.job_folder(job.index).mkdir(parents=True, exist_ok=True)
    data = _MANIFEST.dump_python(manifest, by_alias=True, exclude=_NOT_IN_FILE)
    shapes = list(dict.fromkeys(run.shape for run in manifest.runs.values()))
    for run_id, run in manifest.runs.items():  # thousands of runs have few shapes
        data["runs"][run_id]["shape"] = shapes.index(run.shape)
    for key in ("runs", "checkouts"):
        data[key] = list(data[key].values())
    data["shapes"] = [asdict(shape) for shape in shapes]
    return write_json(manifest.path / "manifest.json", data)


def write_handles(manifest: Manifest) -> None:
    handles = {
        str(index): handle.entry() if isinstance(handle, SlurmJob) else asdict(handle)
        for index, handle in manifest.handles.items()
    }
    write_json(manifest.path / HANDLES, handles)


_NOT_IN_FILE = {"folder", "handles", "handles_unreadable"}  # fields that manifest.json lacks
_HANDLES = TypeAdapter(dict[int, SlurmJob | ProcessHandle])
_MANIFEST = TypeAdapter(Manifest)
_OBJECT = TypeAdapter(dict[str, Any])
_OBJECTS = TypeAdapter(list[dict[str, Any]])
_SHAPES = TypeAdapter(list[Shape])


def read_manifest(
    path: Path, bad: list[BadLine] | None = None, digest: str | None = None
) -> Manifest:
    """Read manifest.json and handles.json in the folder of a submission.

    `digest` is the hash that manifest.json must have, from `write_manifest`. None: any.
    Raises BrokenManifest, or FileNotFoundError or NotADirectoryError if there is none.
    """
    file = path / "manifest.json"
    try:
        content = file.read_bytes()
        if digest not in (None, hashlib.sha256(content).hexdigest()):
            raise BrokenManifest(file, "it was changed after its jobs were submitted")
        manifest = _manifest(path, _OBJECT.validate_json(content))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        why = first_problem(error)
    except KeyError as error:
        why = f"the key {error} is missing"
    except (TypeError, ValueError) as error:
        why = str(error)
    else:
        unreadable: list[BadLine] = []
        handles = read_json(path / HANDLES, _HANDLES, unreadable) or {}
        if bad is not None:
            bad += unreadable
        return replace(manifest, handles=handles, handles_unreadable=bool(unreadable))
    raise BrokenManifest(file, why)


def _manifest(path: Path, data: dict[str, Any]) -> Manifest:
    """Return a manifest from the content of its file. Raises KeyError, TypeError or ValueError."""
    shapes = dict(enumerate(_SHAPES.validate_python(data["shapes"])))
    runs = _OBJECTS.validate_python(data["runs"])
    data["runs"] = {str(each["id"]): each | {"shape": shapes[each["shape"]]} for each in runs}
    checkouts = _OBJECTS.validate_python(data.get("checkouts", []))
    data["checkouts"] = {str(one["name"]): one for one in checkouts}
    data |= {"folder": path.parent.parent, "handles": {}, "handles_unreadable": False}
    manifest = _MANIFEST.validate_python(data, extra="ignore")
    if manifest.id != path.name:
        what = f"the id must be the name of its folder, {path.name!r}"
        raise ValueError(f"{what}, got {manifest.id!r}")
    named = [run for run, _ in (*manifest.done, *(t for job in manifest.jobs for t in job.tasks))]
    named += [run for block in manifest.blocks for run in (block.baseline, *block.runs)]
    for run in named:
        if run not in manifest.runs:
            raise ValueError(f"every task and block must name one of the runs, got {run!r}")
    return manifest


def read_manifests(folder: Path, bad: list[BadLine] | None = None) -> list[Manifest]:
    """Read the manifests of all submissions of a results folder, oldest first.

    Raises NoResults if there are none, BrokenManifest if none can be read.
    """
    manifests: list[Manifest] = []
    broken: list[BrokenManifest] = []
    if os.path.isfile(folder):
        raise UnreadableResults(f"{folder} is a file; give a results folder")
    for name in names_in(folder / SUBMISSIONS):
        try:
            manifests.append(read_manifest(folder / SUBMISSIONS / name, bad))
        except BrokenManifest as error:
            broken.append(error)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the submission was interrupted before it wrote its manifest
    if broken and not manifests:
        raise broken[0]
    if bad is not None:
        bad += [error.problem for error in broken]
    if not manifests:
        if not os.path.isdir(folder):
            raise NoResults(f"there is no folder {folder}; `python -m jobs list` lists results")
        inside = [folder / name for name in names_in(folder)]
        below = [str(path) for path in inside if os.path.isdir(path / SUBMISSIONS)]
        raise NoResults(
            f"{folder} holds no submission (expected {folder}/{SUBMISSIONS}/*/manifest.json)"
            + (f"; results folders in it: {', '.join(below[:SHOWN_BELOW])}" if below else "")
        )
    return sorted(manifests, key=lambda m: m.created_at)
