"""Start the jobs of a planned submission.

Used by `python -m jobs.submit` and `python -m jobs retry`.
"""

from __future__ import annotations

import signal

from rich.console import Console

from jobs import provenance
from jobs.code.state import project_state
from jobs.launch import snapshot
from jobs.launch.lock import QueueLock, SubmitLock
from jobs.launch.plan_submission import Options, Prepared
from jobs.launch.protection import protected
from jobs.launch.signals import handled
from jobs.results.heartbeat import RunsHere
from jobs.results.latest import note_accepted
from jobs.results.manifest import Executor, Manifest, submitter, write_manifest
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.results.unwritable import ResultsUnwritable, message
from jobs.slurm_client import SlurmSilent
from jobs.sweep.benchmarks import load_benchmarks
from jobs.sweep.load import LoadedSweep
from jobs.sweep.strict_yaml import Document


def start(prepared: Prepared, options: Options, console: Console, lock: SubmitLock) -> list[Record]:
    """Start a planned submission: run its jobs on this machine, or submit them to Slurm.

    Its copies of code and its manifest are written first, unless there are no jobs and the folder
    already has what the manifest lists.

    Args:
        lock: lock of the results folder. It is released before jobs run on this machine.

    Returns:
        The records of this submission. For Slurm, an empty list, because the jobs run later.

    Raises:
        SubmissionError: if the jobs cannot be submitted to Slurm.
        SnapshotError: if no snapshot can be taken.
        FolderInUse: if another local or debug submission uses the results folder, and
            `options.force` is False.
        ResultsUnwritable: if a local or debug submission cannot write its records.
        KeyboardInterrupt: if a local or debug submission was interrupted.
    """
    manifest = prepared.manifest
    if options.executor is Executor.slurm:
        from jobs.launch import slurm_executor

        slurm_executor.require_slurm(manifest.folder)
        if manifest.jobs:
            try:
                where = slurm_executor.cluster_of(manifest.sweep.slurm)
            except SlurmSilent as error:
                raise slurm_executor.SubmissionError(
                    f"{error}; nothing was submitted; --local runs the jobs on this machine"
                ) from None
            manifest, digest = _write(manifest, options)
            try:
                with handled(signal.default_int_handler):
                    slurm_executor.submit(manifest, digest, *where)
            finally:  # Slurm may have accepted some of the arrays
                if manifest.slurm_jobs:
                    note_accepted(manifest.folder)
            return []
        if prepared.is_new:
            _write(manifest, options)
        note_accepted(manifest.folder)
        return []
    with QueueLock(manifest.folder, options.force):
        note_accepted(manifest.folder)
        if not prepared.is_new:
            return []
        manifest, _ = _write(manifest, options)
        with handled(signal.default_int_handler), RunsHere(manifest):
            lock.release()
            if options.executor is Executor.debug:
                return _debug(manifest, console)
            from jobs.launch.local_queue import LocalQueue

            return LocalQueue(manifest, options.parallel, console).run()


def _write(manifest: Manifest, options: Options) -> tuple[Manifest, str]:
    """Take the snapshot if there are jobs for it, and write the manifest.

    Return the manifest and the hash of its file.
    """
    git = project_state(manifest.folder, options.save_untracked).entry(manifest.folder)
    facts = {"git": git, "user": submitter(), "packages": provenance.packages()}
    copies_code = (options.snapshot and bool(manifest.jobs)) or options.against is not None
    with protected(manifest.folder, copies_code):
        if options.snapshot and manifest.jobs:
            manifest = snapshot.take(manifest)
        if options.against is not None:
            options.against.keep(manifest.folder)
        manifest.provenance.update(facts)
        return manifest, write_manifest(manifest)


def _debug(manifest: Manifest, console: Console) -> list[Record]:
    """Run the jobs in this process, one after another, until a run fails.

    Raises:
        ResultsUnwritable: if a record cannot be written.
    """
    from jobs.worker.recorder import CannotRecord
    from jobs.worker.worker import Worker

    for job in manifest.jobs:
        worker = Worker(manifest, job.index, in_process=True)
        try:
            worker.run()
        except CannotRecord as error:
            words = message(manifest.folder, error.error.errno)
            raise ResultsUnwritable(words) from None
        if worker.failures:
            failed = worker.failures[0]
            console.print(
                f"stopped at the first failure: run {failed.run} ended with status {failed.status}",
                style="red",
            )
            break
    return [r for r in read_records(manifest.folder)[0] if r.submission == manifest.id]


def reload(manifest: Manifest) -> LoadedSweep:
    """Load the sweep of an earlier submission from its manifest. The sweep file is not read.

    Raises:
        NoBenchmark: if a benchmark of the sweep can no longer be imported.
    """
    sweep = manifest.sweep
    document = Document(
        sweep.model_dump(mode="json", by_alias=True), f"{manifest.path}/manifest.json"
    )
    benchmarks = load_benchmarks(sweep.benchmark, [case.benchmark for case in sweep.cases])
    return LoadedSweep(sweep, benchmarks, document)
