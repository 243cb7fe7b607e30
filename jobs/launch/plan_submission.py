"""Plan a submission from a sweep: which runs it executes, in which jobs.

Used by `python -m jobs.submit` and `python -m jobs retry`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs import provenance
from jobs.block import Block, TaskKey
from jobs.errors import CommandError, InputError, Problem
from jobs.formatting import counted
from jobs.launch import snapshot
from jobs.launch.against import OtherCode, require_benchmarks, same_sources, with_other_code
from jobs.launch.packing import Slots, local_slots, pack, too_short
from jobs.launch.protection import weakness
from jobs.launch.resume import Task, split_done, split_rounds, tasks_of
from jobs.processes import command_line
from jobs.results.counting import best, is_trial
from jobs.results.judgements import Judgement
from jobs.results.manifest import Executor, Manifest, new_id
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.results.run_states import observe
from jobs.results.stale import Staleness, without_hash
from jobs.run import Run
from jobs.status import Status
from jobs.sweep.expand import Expansion, expand
from jobs.sweep.load import LoadedSweep
from jobs.sweep.schema import Blocks, Sweep
from jobs.sweep.stock_sweeps import stock_sweeps


@dataclass(frozen=True)
class Options:
    """Options of a submission, as given on the command line."""

    executor: Executor
    out: Path  # results folder
    retry_failed: bool = False  # whether to execute failed runs again
    force: bool = False  # whether to execute all runs, even those that are done or in flight
    parallel: int | None = None  # maximum number of jobs at the same time; local executor only
    snapshot: bool = False  # whether the jobs run from a copy of the code
    save_untracked: bool = False  # whether diffs contain small untracked files
    keep_stale: bool = False  # whether results of older code count as done
    only: frozenset[tuple[str, int]] | None = None  # (run id, repeat) to execute; None: all
    leave_out: frozenset[tuple[str, int]] = frozenset()  # (run id, repeat) not to execute
    repeat_unknown: bool = False  # whether to execute runs of which Slurm does not know the state
    against: OtherCode | None = None  # other checkout with which the runs are compared


@dataclass(frozen=True)
class Prepared:
    """A submission that is planned but not started, and the lists of what it skips.

    A `Task` is a (run, repeat) pair.
    """

    manifest: Manifest
    expansion: Expansion
    done: list[Task]  # skipped because of earlier records
    failed_before: list[Record]  # records of the tasks in `done` that failed
    in_flight: list[Task]  # skipped because they are queued or running in earlier submissions
    unknown: int  # number of tasks in `in_flight` of which Slurm does not know the state
    # False if there are no jobs, and the folder already has these runs, tables and plots.
    is_new: bool = True
    notes: list[str] = field(default_factory=list)  # remarks for the user, one line each


def prepare(loaded: LoadedSweep, options: Options, sweep_path: str) -> Prepared:
    """Plan a submission, without writing files.

    Expands the sweep into runs, skips runs that are done, queued or running, and groups the other
    runs into jobs.

    Args:
        sweep_path: path of the sweep file, to be saved in the manifest.

    Raises:
        InputError: if the sweep cannot be expanded.
        UnreadableResults: if the records or submissions of the results folder cannot be read, or
            none of its manifests.
        SnapshotError: if `options.snapshot` is True and no snapshot can be taken.
        AgainstError: if the other checkout cannot execute the runs.
        CommandError: if others could replace a copy of the code.
    """
    expansion = expand(loaded)
    other = options.against
    notes: list[str] = []
    if other is None:
        _require_candidates(loaded, expansion)
    else:
        require_benchmarks(other, expansion.runs)
        if same_sources(other, expansion.runs):
            notes.append(
                f"the sources of all runs are the same in {other.name} and in the working tree, so "
                "only noise is measured; --against HEAD compares with the last commit, "
                "--against HEAD~1 with the one before"
            )
        expansion = with_other_code(expansion, other, loaded.sweep.blocks)
    if any(block.rounds == 1 for block in expansion.blocks):
        notes.append("1 round gives no verdict, only unsure; set blocks.rounds to at least 2")
    folder = options.out.resolve()
    live: set[TaskKey] = set()
    unknown: dict[TaskKey, str] = {}
    earlier: dict[str, Manifest] = {}
    judgements: dict[str, Judgement] = {}
    try:
        observation = observe(folder)
    except FileNotFoundError:  # no submission yet, but the folder may contain copied records
        records, bad_lines = read_records(folder)
    else:
        records, bad_lines = observation.records, observation.bad_lines
        earlier = {manifest.id: manifest for manifest in observation.manifests}
        judgements = observation.judgements
        if not options.force:
            live = {t.key for t in observation.tasks if t.status.is_live}
            unknown = {t.key: t.detail for t in observation.tasks if t.status is Status.unknown}
            if options.repeat_unknown:
                live -= unknown.keys()
    same_device = _same_device(options.executor, loaded, records, earlier)
    staleness = Staleness(expansion.runs)
    older = {id(record) for record in records if staleness.is_stale(record)}
    ignored = set() if options.keep_stale else older

    def counts(record: Record, run: Run) -> bool:
        return id(record) not in ignored and same_device(record, run)

    decided = _decided(expansion.blocks, loaded.sweep, judgements)
    todo, done, in_flight = _split(expansion, loaded.sweep, records, live, counts, options, decided)
    counting = (record for record in records if id(record) not in ignored)
    outcome = best(counting, lambda record: (record.run, record.repeat))
    before = [outcome[run.id, repeat] for run, repeat in done]
    manifest = Manifest(
        folder=folder,
        id=new_id(),
        created_at=time.time(),
        executor=options.executor,
        sweep=loaded.sweep,
        sweep_path=sweep_path,
        command=command_line(),
        runs={run.id: run for run in expansion.runs},
        jobs=pack(
            todo,
            loaded.sweep.runs_per_job,
            _slots(options),
            expansion.blocks,
            _earlier_s(records),
        ),
        done=[(run.id, repeat) for run, repeat in (*done, *in_flight)],
        provenance={},
        force=options.force,
        save_untracked=options.save_untracked,
        blocks=expansion.blocks,
        checkouts={other.name: other.planned(folder)} if other is not None else {},
        keep_stale=options.keep_stale,
    )
    notes += [*map(str, bad_lines), *_stale_notes(records, older, todo, done, options)]
    if options.executor is Executor.slurm:
        notes += too_short(manifest.jobs, manifest.runs)
    else:
        notes += _without_gpus(todo, sweep_path)
    if (options.snapshot or other is not None) and (how := weakness(folder)):
        raise CommandError(
            f"others could replace the copy of the code that the jobs run, because {how}; "
            "with --snapshot or --against, use a results folder of your own"
        )
    if options.snapshot:
        wanted = {run.id: run for run, _ in todo}
        notes += snapshot.check(wanted.values(), folder)
    is_new = bool(todo) or _is_new(manifest, earlier)
    failed = failed_records(before)
    if not options.leave_out:
        notes += _unsupported_note(before)
    flying = unknown.keys() & {(run.id, repeat) for run, repeat in in_flight}
    if options.leave_out:  # `retry` repeats no such runs
        flying = set()
    elif flying:
        why = "; ".join(sorted({unknown[key] for key in flying}))
        which = f"{counted(len(flying), 'run')} may be queued or running ({why})"
        notes.append(f"{which}; --repeat-unknown submits them again")
    return Prepared(manifest, expansion, done, failed, in_flight, len(flying), is_new, notes)


def _earlier_s(records: Iterable[Record]) -> dict[str, float]:
    """Return the mean time of the successful attempts of runs, in seconds, by run id."""
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status is Status.ok:
            times.setdefault(record.run, []).append(record.finished_at - record.started_at)
    return {run: sum(found) / len(found) for run, found in times.items()}


def _require_candidates(loaded: LoadedSweep, expansion: Expansion) -> None:
    """Check that the blocks have runs to compare, since there is no other checkout."""
    keys = loaded.sweep.blocks
    if keys is None:
        return
    if not keys.interleave:
        what = "blocks.interleave and blocks.baseline are required, except with --against"
        raise InputError([Problem(loaded.document.at(("blocks",)), what)])
    if all(len(block.runs) == 1 for block in expansion.blocks):
        what = (
            "blocks: each block holds one run, the baseline, so there is nothing to compare; give "
            f"{' or '.join(keys.interleave)} at least 2 values, or measure without blocks: "
            "blocks=null"
        )
        raise InputError([Problem(loaded.document.at(("blocks", "interleave")), what)])


def _decided(
    blocks: Iterable[Block], sweep: Sweep, judgements: Mapping[str, Judgement]
) -> dict[str, int]:
    """Return the numbers of rounds after which blocks of a sweep were decided, by id of the block.

    A judgement counts if it was about the same phases, with the same margin.
    """
    keys = sweep.blocks or Blocks()
    asked = (keys.margin, sorted(keys.phases))
    return {
        block.id: found.rounds
        for block in blocks
        if block.auto and (found := judgements.get(block.id)) is not None
        if found.is_decided and (found.margin, found.phases) == asked
    }


def _split(
    expansion: Expansion,
    sweep: Sweep,
    records: list[Record],
    live: set[TaskKey],
    counts: Callable[[Record, Run], bool],
    options: Options,
    decided: Mapping[str, int],
) -> tuple[list[Task], list[Task], list[Task]]:
    """Return the (run, repeat) pairs to execute, those that are done, and those that are `live`.

    A round of a block is executed as a whole, or not at all. A block of which a pair is queued or
    running is not executed.
    """
    runs = {run.id: run for run in expansion.runs}
    paired = {run for block in expansion.blocks for run in block.runs}
    tasks = tasks_of([run for run in expansion.runs if run.id not in paired], sweep.repeats)
    flying = live & {(run.id, repeat) for run, repeat in tasks}
    free: list[Block] = []
    for block in expansion.blocks:
        if live.isdisjoint(block.all_tasks()):
            free.append(block)
        else:
            flying |= set(block.all_tasks())
    how = (records, counts, options.retry_failed, options.force)
    single, done = split_done(tasks, *how)
    rounds, done_in_rounds = split_rounds(free, runs, *how, decided)
    todo: list[Task] = []
    for together in [*([task] for task in single), *rounds]:
        keys = {(run.id, repeat) for run, repeat in together}
        if options.only is not None and keys.isdisjoint(options.only):
            continue
        if not keys <= flying | options.leave_out:
            todo += together
    in_flight = [(runs[run], repeat) for run, repeat in flying]
    return todo, done + done_in_rounds, sorted(in_flight, key=lambda task: task[1])


def _stale_notes(
    records: list[Record], older: set[int], todo: list[Task], done: list[Task], options: Options
) -> list[str]:
    """Return a note on the results of older code, if there are any.

    `older` has the identities of the records of older code.
    """
    # A later record of the same task comes later in the list.
    latest = {(r.run, r.repeat): r for r in records if r.status == "ok" and not is_trial(r)}
    tasks = done if options.keep_stale else todo
    found = [latest[key] for run, repeat in tasks if (key := (run.id, repeat)) in latest]
    found = [record for record in found if id(record) in older]
    if not found or options.force:
        return []
    count, which = counted(len(found), "result"), without_hash(found)
    them = "it" if len(found) == 1 else "them"
    if options.keep_stale:
        return [f"{count} of older code{which} kept"]
    return [f"{count} of older code{which} measured again; --keep-stale keeps {them}"]


def _without_gpus(todo: list[Task], sweep_path: str) -> list[str]:
    """Return a note if this machine has too few GPUs for all runs that are to be executed."""
    visible = len(set(provenance.visible_gpus()))
    needed = min((run.shape.gpus_per_node for run, _ in todo), default=0)
    if needed <= visible:
        return []
    note = (
        f"all runs will be recorded as unsupported: they need {counted(needed, 'GPU')} or more, "
        f"but {visible} are visible here"
    )
    variant = Path(sweep_path).with_name("cpu") / Path(sweep_path).name
    known = variant.is_file() or variant in stock_sweeps()
    return [f"{note}; a variant for CPUs is {variant}" if known else note]


def _is_new(manifest: Manifest, earlier: dict[str, Manifest]) -> bool:
    """Return whether a manifest lists runs, tables or plots that the folder does not have yet.

    Tables show the runs of all manifests. Their layout is that of the newest manifest. `earlier` is
    ordered from the oldest to the newest.
    """
    if not earlier:
        return True
    known = {run for before in earlier.values() for run in before.runs}
    last, now = list(earlier.values())[-1].sweep, manifest.sweep
    return not known >= manifest.runs.keys() or (last.tables, last.plots) != (now.tables, now.plots)


def _slots(options: Options) -> Slots | None:
    """Return how many jobs of a `Shape` run at the same time. None for Slurm and debug."""
    if options.executor is not Executor.local:
        return None
    return local_slots(len(set(provenance.visible_gpus())), options.parallel)


def _same_device(
    executor: Executor, loaded: LoadedSweep, records: list[Record], earlier: dict[str, Manifest]
) -> Callable[[Record, Run], bool]:
    """Return a function that tells whether a record is from the device on which a run will execute.

    With Slurm, that is unknown until the job starts. Then the records of earlier submissions with
    the same partition and constraint are accepted, if all of them come from one kind of device,
    separately for CPU and GPU runs. The worker compares the devices again before each run.
    """
    if executor is not Executor.slurm:
        tokens = provenance.visible_gpus()
        cpu, gpu = provenance.cpu_device(), provenance.device_kind(tokens)

        def here(record: Record, run: Run) -> bool:
            return record.device == (gpu if run.shape.gpus_per_node and tokens else cpu)

        return here
    slurm = loaded.sweep.slurm

    def alike(record: Record) -> bool:
        manifest = earlier.get(record.submission)
        if manifest is None or manifest.executor is not Executor.slurm:
            return False
        theirs = manifest.sweep.slurm
        return (theirs.partition, theirs.constraint) == (slurm.partition, slurm.constraint)

    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for record in filter(alike, records):
        kinds[record.device.startswith("cpu:")].add(record.device)

    def there(record: Record, run: Run) -> bool:
        on_cpu = not run.shape.gpus_per_node
        return alike(record) and kinds[on_cpu] == {record.device}

    return there


def _unsupported_note(records: list[Record]) -> list[str]:
    """Return a note if skipped runs have no measurement because a machine did not support them."""
    unsupported = [record for record in _latest(records) if record.status is Status.unsupported]
    reasons = dict.fromkeys(r.failure.message for r in unsupported if r.failure is not None)
    if not unsupported:
        return []
    why = f" ({'; '.join(reasons)})" if reasons else ""
    count = f"{len(unsupported)} of the skipped runs"
    return [f"unsupported before: {count}{why}; --force executes them again"]


def failed_records(records: list[Record]) -> list[Record]:
    """Return the records of failed runs. Only the latest record of each (run, repeat) pair counts.

    The statuses oom and unsupported are results, not failures.
    """
    return [record for record in _latest(records) if record.status.is_failure]


def _latest(records: list[Record]) -> Iterable[Record]:
    """Return the latest record of each (run, repeat) pair."""
    return {(record.run, record.repeat): record for record in records}.values()
