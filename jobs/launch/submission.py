"""Start the jobs of a planned submission."""

from __future__ import annotations

import signal
import time

from jobs import provenance
from jobs.code.state import project_state
from jobs.errors import CommandError, InputError
from jobs.launch import snapshot
from jobs.launch.gpu_claims import POLL_S, WAITS, claim, release
from jobs.launch.lock import SubmitLock
from jobs.launch.plan_submission import Options, Prepared
from jobs.launch.protection import protected
from jobs.launch.signals import handled
from jobs.results.heartbeat import runs_here
from jobs.results.latest import note_accepted
from jobs.results.manifest import Executor, Manifest, submitter, write_manifest
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.results.unwritable import ResultsUnwritable, message
from jobs.slurm_client import SlurmSilent
from jobs.sweep.load import LoadedSweep, load_benchmarks
from jobs.sweep.strict_yaml import Document


def start(prepared: Prepared, lock: SubmitLock) -> list[Record]:
    """Start a planned submission, and return its records. For Slurm, there are none yet.

    Its copies of code and its manifest are written first, unless there are no jobs and the folder
    already has what the manifest lists. The lock is released before jobs run on this machine.

    Raises:
        CommandError: if the submission is not possible, e.g. because a local queue or a debug run
            executes in the folder: two would disturb each other's timings.
        ResultsUnwritable: if a local or debug submission cannot write its records.
        KeyboardInterrupt: if it was interrupted.
    """
    manifest, options = prepared.manifest, prepared.options
    if options.executor is Executor.slurm:
        from jobs.launch import slurm_executor

        slurm_executor.require_slurm(manifest.folder)
        if manifest.jobs:
            try:
                where = slurm_executor.cluster_of(manifest.sweep.slurm)
            except SlurmSilent as error:
                raise CommandError(
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
    if prepared.queue and not options.force:
        raise CommandError(
            f"{manifest.folder} is in use by {prepared.queue}; wait until it has ended, or stop it "
            "with `python -m jobs cancel`, or use --force to execute all runs in both"
        )
    note_accepted(manifest.folder)
    if not prepared.is_new:
        return []
    manifest, _ = _write(manifest, options)
    with handled(signal.default_int_handler), runs_here(manifest):
        lock.release()  # from here on, other submissions see that this one runs
        if options.executor is Executor.debug:
            return _debug(manifest)
        from jobs.launch.local_queue import LocalQueue

        return LocalQueue(manifest, options.parallel).run()


def _write(manifest: Manifest, options: Options) -> tuple[Manifest, str]:
    """Take the snapshot if there are jobs for it. Return the written manifest and its hash."""
    git = project_state(manifest.folder).entry(manifest.folder)
    facts = {"git": git, "user": submitter(), "packages": provenance.packages()}
    copies_code = (options.snapshot and bool(manifest.jobs)) or options.against is not None
    with protected(manifest.folder, copies_code):
        if options.snapshot and manifest.jobs:
            manifest = snapshot.take(manifest)
        if options.against is not None:
            options.against.keep(manifest.folder)
        manifest.provenance.update(facts)
        return manifest, write_manifest(manifest)


def _debug(manifest: Manifest) -> list[Record]:
    """Run the jobs in this process, one after another, until a run fails."""
    from jobs.worker.recorder import CannotRecord
    from jobs.worker.worker import Worker

    for job in manifest.jobs:
        worker = Worker(manifest, job.index, in_process=True)
        told = False
        while (claims := claim(worker.gpus, len(worker.gpus))) is None:
            if not told:
                print(WAITS, flush=True)
            told = True
            time.sleep(POLL_S)
        try:
            worker.run()
        except CannotRecord as error:
            raise ResultsUnwritable(message(manifest.folder, error.error.errno)) from None
        finally:
            release(claims)
        if worker.failures:
            failed = worker.failures[0]
            how = f"run {failed.run} ended with status {failed.status}"
            print(f"stopped at the first failure: {how}")
            break
    return [r for r in read_records(manifest.folder)[0] if r.submission == manifest.id]


def reload(manifest: Manifest) -> LoadedSweep:
    """Load the sweep of an earlier submission from its manifest, not from the sweep file.

    Raises InputError if a benchmark of the sweep can no longer be imported.
    """
    sweep = manifest.sweep
    document = Document(
        sweep.model_dump(mode="json", by_alias=True), f"{manifest.path}/manifest.json"
    )
    benchmarks = load_benchmarks(document)
    if benchmarks is None:
        raise InputError(document.problems)
    return LoadedSweep(sweep, benchmarks, document)
