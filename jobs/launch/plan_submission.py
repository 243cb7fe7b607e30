"""Plan a submission from a sweep: which runs it executes, in which jobs.

Used by `python -m jobs.submit` and `python -m jobs retry`.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobs import provenance
from jobs.block import Block, TaskKey
from jobs.code import git
from jobs.code.measured_files import is_project
from jobs.code.state import repository_root
from jobs.errors import CommandError, InputError, Problem, shown
from jobs.formatting import counted
from jobs.launch import snapshot
from jobs.launch.against import OtherCode, require_benchmarks, with_other_code
from jobs.launch.expected_time import mean_times
from jobs.launch.packing import local_slots, pack, too_short
from jobs.launch.protection import weakness
from jobs.launch.ranks import require_ranks, unlike_gpus
from jobs.launch.resume import Counts, split
from jobs.processes import command_line
from jobs.results.counting import best, complete_executions, is_trial, place_of
from jobs.results.manifest import Executor, Manifest, new_id
from jobs.results.record import Record, is_stale
from jobs.results.record_reader import read_records
from jobs.results.run_states import Observation, observe
from jobs.results.stale import without_hash
from jobs.run import Run
from jobs.status import Status
from jobs.sweep.expand import Expansion, expand
from jobs.sweep.load import LoadedSweep
from jobs.sweep.run_sources import RunSources, source_hashes
from jobs.sweep.schema import Blocks, Sweep
from jobs.sweep.stock_sweeps import stock_sweeps


@dataclass(frozen=True)
class Options:
    """Options of a submission."""

    executor: Executor
    out: Path  # results folder
    retry_failed: bool = False  # whether to execute failed runs again
    force: bool = False  # whether to execute all runs, even those that are done or in flight
    parallel: int | None = None  # maximum number of jobs at the same time; local executor only
    snapshot: bool = False  # whether the jobs run from a copy of the code
    keep_stale: bool = False  # whether results of older code count as done
    # (run id, repeat) to execute, with their rounds. None: all. Only `retry` sets it.
    only: frozenset[TaskKey] | None = None
    repeat_unknown: bool = False  # whether to execute runs of which Slurm does not know the state
    against: OtherCode | None = None  # other checkout with which the runs are compared


@dataclass(frozen=True)
class Prepared:
    """A submission that is planned but not started, and what it skips."""

    options: Options
    manifest: Manifest
    expansion: Expansion
    done: list[TaskKey]  # skipped because of earlier records
    failed_before: list[Record]  # records of the tasks in `done` that failed
    in_flight: set[TaskKey]  # skipped because they are queued or running in earlier submissions
    unknown: int  # number of tasks in `in_flight` of which Slurm does not know the state
    queue: str  # process that executes runs of this folder without Slurm; empty if there is none
    # False if there are no jobs, and the folder already has these runs, tables and plots.
    is_new: bool
    notes: list[str]  # remarks for the user, one line each


def prepare(loaded: LoadedSweep, options: Options, sweep_path: str) -> Prepared:
    """Plan a submission, without writing files.

    Expands the sweep into runs, skips runs that are done, queued or running, and groups the other
    runs into jobs. `sweep_path` is saved in the manifest.

    Raises:
        InputError, UnreadableResults, CommandError: if that is not possible.
    """
    sweep, other = loaded.sweep, options.against
    expansion = expand(loaded, with_blocks=other is None)
    notes: list[str] = []
    if other is None:
        _require_candidates(loaded, expansion)
    else:
        if sweep.repeats > 1:
            what = "repeats must be 1 together with --against; set --rounds instead"
            at = loaded.document.at(("repeats",))
            raise InputError([Problem(at, f"{what}, got {sweep.repeats}")])
        require_benchmarks(other, expansion.runs)
        expansion = with_other_code(expansion, other, sweep.blocks)
    if any(block.rounds == 1 for block in expansion.blocks):
        notes.append("1 round gives no verdict, only unsure; set blocks.rounds to at least 2")
    folder = options.out.resolve()
    runs = {run.id: run for run in expansion.runs}
    sources = RunSources()
    try:
        seen = observe(folder, sources)
    except FileNotFoundError:  # no submission yet, but the folder may contain copied records
        seen = Observation(folder, [], *read_records(folder), tasks=[])
    records, tasks = seen.records, [] if options.force else seen.tasks
    unknown = {task.key: task.detail for task in tasks if task.status is Status.unknown}
    live = {task.key for task in tasks if task.status.is_live}
    if options.repeat_unknown:
        live -= unknown.keys()
    same_device = _same_device(options.executor, sweep, runs, seen)
    now = source_hashes(expansion.runs, sources)

    def is_usable(record: Record) -> bool:
        return options.keep_stale or not is_stale(record, now)

    def counts(record: Record) -> bool:
        return is_usable(record) and same_device(record)

    paired = {run for block in expansion.blocks for run in block.runs}
    # Each run once before any is repeated. A slow change of the machine then affects all equally.
    alone = [(run, n) for n in range(sweep.repeats) for run in runs if run not in paired]
    groups, done, in_flight = split(
        alone,
        expansion.blocks,
        [] if options.force else records,
        counts,
        live,
        _decided(expansion.blocks, sweep, seen, is_usable),
        options.retry_failed,
    )
    if options.only is not None:
        groups = [group for group in groups if not options.only.isdisjoint(group)]
    todo = [task for group in groups for task in group]
    outcome = best(filter(counts, records), lambda record: (record.run, record.repeat))
    before = [outcome[task] for task in done]
    wanted = [runs[run] for run in dict.fromkeys(run for run, _ in todo)]
    if options.only is None:
        require_ranks(loaded, wanted)
    slots = None  # unknown for Slurm, and one after another for debug
    if options.executor is Executor.local:
        gpus = len(provenance.visible_gpus())
        slots = partial(local_slots, gpus=gpus, parallel=options.parallel)
    manifest = Manifest(
        folder=folder,
        id=new_id(),
        created_at=time.time(),
        executor=options.executor,
        sweep=sweep,
        sweep_path=sweep_path,
        command=command_line(),
        runs=runs,
        jobs=pack(todo, runs, sweep.runs_per_job, slots, expansion.blocks, mean_times(records)),
        done=[*done, *sorted(in_flight)],
        provenance={},
        force=options.force,
        blocks=expansion.blocks,
        checkouts={other.name: other.planned(folder)} if other is not None else {},
        keep_stale=options.keep_stale,
    )
    notes += [*map(str, seen.bad_lines), *_stale_notes(records, now, todo, done, options)]
    notes += unlike_gpus(wanted)
    if options.executor is Executor.slurm:
        notes += too_short(manifest.jobs, manifest.runs)
        notes += [] if options.force else _measured_before(filter(is_usable, records), todo)
    else:
        notes += _without_gpus(wanted, sweep_path)
    if (options.snapshot or other is not None) and (how := weakness(folder)):
        raise CommandError(
            f"others could replace the copy of the code that the jobs run, because {how}; "
            "with --snapshot or --against, use a results folder of your own"
        )
    if options.snapshot:
        notes += snapshot.check(wanted, folder)
    else:
        notes += _untracked_note(wanted)
    is_new = bool(todo) or _is_new(manifest, seen.manifests)
    failed = failed_records(before)
    flying: set[TaskKey] = set()
    if options.only is None:  # `retry` repeats no such runs
        notes += _unsupported_note(before)
        flying = unknown.keys() & in_flight
    if flying:
        why = "; ".join(sorted({unknown[key] for key in flying}))
        which = f"{counted(len(flying), 'run')} may be queued or running ({why})"
        notes.append(f"{which}; --repeat-unknown submits them again")
    queue, unsure = _queue(seen), len(flying)
    return Prepared(
        options, manifest, expansion, done, failed, in_flight, unsure, queue, is_new, notes
    )


def _queue(seen: Observation) -> str:
    """Return the process, here or on another host, that executes runs of the folder. "": none."""
    for manifest in seen.manifests:
        process, states = manifest.process, seen.job_states[manifest.id].values()
        if process is not None and any(job.status.is_live for job in states):
            return f"process {process.pid} on {process.host}: {shown(manifest.command, 1000)}"
    return ""


def _untracked_note(runs: Iterable[Run]) -> list[str]:
    """Return a note on measured files in a repository that does not track them."""
    left = []
    for path in snapshot.code_of(runs).values():
        root = None if is_project(path) else repository_root(path)
        if root is not None:
            with suppress(git.GitError):  # whether it is tracked is unknown
                if not git.tracked(root, [str(path.relative_to(root))]):
                    left.append(os.path.relpath(path))
    if not left:
        return []
    words = shlex.join(["git", "add", "-N", "-f", *left])  # -f: also if .gitignore has it
    return [f"git does not track {', '.join(left)}, so records lack their content; run: {words}"]


def _require_candidates(loaded: LoadedSweep, expansion: Expansion) -> None:
    """Check that the blocks have runs to compare, since there is no other checkout."""
    keys = loaded.sweep.blocks
    if keys is not None and not keys.interleave:
        what = "blocks.interleave and blocks.baseline are required, except with --against"
        raise InputError([Problem(loaded.document.at(("blocks",)), what)])
    if keys is not None and all(len(block.runs) == 1 for block in expansion.blocks):
        what = (
            "blocks: each block holds one run, the baseline, so there is nothing to compare; give "
            f"{' or '.join(keys.interleave)} at least 2 values, or measure without blocks: "
            "blocks=null"
        )
        raise InputError([Problem(loaded.document.at(("blocks", "interleave")), what)])


def _decided(
    blocks: Iterable[Block], sweep: Sweep, seen: Observation, is_usable: Callable[[Record], bool]
) -> dict[str, int]:
    """Return after how many rounds blocks were decided on the same phases and margin, by id."""
    keys = sweep.blocks or Blocks()
    asked = (keys.margin, sorted(keys.phases))
    # After an edit that was undone, the judgement is of other code than the rounds that count.
    in_time = sorted(complete_executions(seen.records), key=lambda rounds: rounds[-1].finished_at)
    newest = {place_of(execution[0]).id: execution for execution in in_time}
    return {
        block.id: found.rounds
        for block in blocks
        if block.auto and (found := seen.judgements.get(block.id)) is not None
        if all(map(is_usable, newest.get(block.id, ())))
        if found.is_decided and (found.margin, found.phases) == asked
    }


def _stale_notes(
    records: list[Record],
    now: Mapping[str, str | None],
    todo: list[TaskKey],
    done: list[TaskKey],
    options: Options,
) -> list[str]:
    """Return a note on the results of older code. `now` has the hash of the code of each run."""
    # A later record of the same task comes later in the list.
    latest = {(r.run, r.repeat): r for r in records if r.status == "ok" and not is_trial(r)}
    tasks = done if options.keep_stale else todo
    found = [latest[task] for task in tasks if task in latest and is_stale(latest[task], now)]
    if not found or options.force:
        return []
    count, which = counted(len(found), "result"), without_hash(found)
    them = "it" if len(found) == 1 else "them"
    if options.keep_stale:
        return [f"{count} of older code{which} kept"]
    return [f"{count} of older code{which} measured again; --keep-stale keeps {them}"]


def _measured_before(records: Iterable[Record], todo: list[TaskKey]) -> list[str]:
    """Return a note on tasks that have results of a device that Slurm may choose for them."""
    asked = set(todo)
    found = [
        record
        for record in records
        if (record.run, record.repeat) in asked and record.status == "ok" and not is_trial(record)
    ]
    if not found:
        return []
    number = len({(record.run, record.repeat) for record in found})
    devices = " or ".join(dict.fromkeys(record.device for record in found))
    return [f"{number} of those to run have results of {devices}; a job may skip them there"]


def _without_gpus(todo: list[Run], sweep_path: str) -> list[str]:
    """Return a note if this machine has too few GPUs for all runs that are to be executed."""
    visible = len(provenance.visible_gpus())
    needed = min((run.shape.gpus_per_node for run in todo), default=0)
    if needed <= visible:
        return []
    note = (
        f"all runs will be recorded as unsupported: they need {counted(needed, 'GPU')} or more, "
        f"but {visible} are visible here"
    )
    variant = Path(sweep_path).with_name("cpu") / Path(sweep_path).name
    known = variant.is_file() or variant in stock_sweeps()
    return [f"{note}; a variant for CPUs is {variant}" if known else note]


def _is_new(manifest: Manifest, earlier: list[Manifest]) -> bool:
    """Return whether a manifest lists runs, tables or plots that the folder does not have yet.

    Tables show the runs of all manifests, in the layout of the newest, the last in `earlier`.
    """
    if not earlier:
        return True
    known = {run for before in earlier for run in before.runs}
    last, now = earlier[-1].sweep, manifest.sweep
    return not known >= manifest.runs.keys() or (last.tables, last.plots) != (now.tables, now.plots)


def _same_device(
    executor: Executor, sweep: Sweep, runs: Mapping[str, Run], seen: Observation
) -> Counts:
    """Return a function that tells whether a record is from the device that will execute its run.

    Slurm chooses it when the job starts. So the records of submissions with the same partition and
    constraint are accepted, if they come from one kind of device, separately for CPU and GPU runs.
    The worker compares the devices again before each run.
    """
    needs_gpu = {run.id: bool(run.shape.gpus_per_node) for run in runs.values()}
    if executor is not Executor.slurm:
        cpu, gpu = provenance.cpu_device(), provenance.device_kind(provenance.visible_gpus())
        devices = {run: gpu if on_gpu else cpu for run, on_gpu in needs_gpu.items()}
        return lambda record: record.device == devices.get(record.run)
    alike = {
        manifest.id
        for manifest in seen.manifests
        if manifest.executor is Executor.slurm
        and manifest.sweep.slurm.partition == sweep.slurm.partition
        and manifest.sweep.slurm.constraint == sweep.slurm.constraint
    }
    found = {record.device for record in seen.records if record.submission in alike}
    kinds = {
        on_gpu: {device for device in found if device.startswith("cpu:") != on_gpu}
        for on_gpu in (True, False)
    }
    return lambda record: (
        record.submission in alike
        and record.run in needs_gpu
        and kinds[needs_gpu[record.run]] == {record.device}
    )


def _unsupported_note(records: list[Record]) -> list[str]:
    """Return a note if skipped runs have no measurement because a machine did not support them."""
    unsupported = [record for record in records if record.status is Status.unsupported]
    reasons = dict.fromkeys(r.failure.message for r in unsupported if r.failure is not None)
    if not unsupported:
        return []
    why = f" ({'; '.join(reasons)})" if reasons else ""
    count = f"{len(unsupported)} of the skipped runs"
    return [f"unsupported before: {count}{why}; --force executes them again"]


def failed_records(records: list[Record]) -> list[Record]:
    """Return the records of failed runs. Only the latest record of each task counts."""
    latest = {(record.run, record.repeat): record for record in records}
    return [record for record in latest.values() if record.status.is_failure]
