"""The command `status`: the state of each run in a results folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from jobs.cli.arguments import Folder, Where, flag
from jobs.cli.completion import results_folders
from jobs.cli.observed import observed
from jobs.cli.output import broken, columns
from jobs.cli.watch import LONGEST_S, SHORTEST_S, WatchingCommand, watch
from jobs.cli.where import matching
from jobs.code.short_names import run_labels
from jobs.formatting import abridged, compact_ids, counted, format_range
from jobs.results.run_states import Observation, TaskState, summary
from jobs.results.stale import with_stale
from jobs.status import Status

EXAMPLES = """
logs/flash --json
--watch
--where 'status == error and seq_len > 4096'
"""
COMMAND_CLASS = WatchingCommand
SHOWN_RUNS = 30
SHOWN_SIMILAR = 5  # maximum number of runs with the same state and reason that are listed
URGENT = (
    Status.running, Status.unknown, Status.wrong, Status.error, Status.timeout, Status.killed,
    Status.oom, Status.unsupported, Status.preempted,
)  # fmt: skip
HIDDEN = (Status.ok, Status.queued, Status.unknown, Status.not_needed)  # a note says why
SHOWN_SUBMISSIONS = 5


def status(
    folder: Folder = None,
    as_json: Annotated[
        bool, flag("--json", "Print the submissions and the state of every run as JSON.")
    ] = False,
    where: Where = None,
    lists_all: Annotated[
        bool, flag("--all", "List every run, also those that are ok or queued.")
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="[SECONDS]",
            min=SHORTEST_S,
            max=LONGEST_S,
            help="Repeat every SECONDS (5 if left out) until no run is queued or running. In a "
            "pipe, print the states again only when they change.",
            autocompletion=results_folders,
        ),
    ] = None,
) -> None:
    """Show the state of each run in a results folder.

    Prints the number of runs in each state: queued, running, missing, unknown (Slurm does not
    answer for its job), not_needed (a round of a block that was decided before, with rounds: auto),
    or the status with which a run ended (ok, oom, timeout, error, wrong, unsupported, killed,
    preempted, cancelled). Then it lists at most 30 runs, with the reason: those in other states
    than ok, queued, unknown and not_needed, or with --where in any. Results of older code are
    marked.

    Exit code: 0 if no run failed, 1 if a run failed or is missing. The states ok, oom, unsupported,
    queued, running, unknown and not_needed are not failures.
    """
    tasks: list[TaskState] = []

    def report() -> tuple[str, bool]:
        nonlocal folder, tasks
        seen = observed(folder)
        folder = seen.folder  # another submission may become the last one while this command runs
        chosen = with_stale(matching(seen, where))
        tasks = chosen.tasks
        if as_json:
            text = json.dumps(summary(chosen)) + "\n"
        else:
            text = "".join(_parts(chosen, len(seen.tasks), where is not None, lists_all))
        return text, any(task.status.is_live for task in tasks)

    if every_s is None:
        print(report()[0], end="")
    else:
        watch(report, every_s)
    raise SystemExit(1 if any(task.status.is_failure for task in tasks) else 0)


def _parts(seen: Observation, total: int, any_state: bool, every: bool) -> Iterator[str]:
    """Yield the lines about the chosen runs of a folder, which has `total` runs.

    With `any_state`, runs that are ok or queued are listed, too, and with `every` all of them.
    """
    newest = seen.manifests[-1]
    some = f"{len(seen.tasks)} of " if len(seen.tasks) != total else ""
    of_rounds = any(manifest.blocks for manifest in seen.manifests)
    what = counted(total, "process" if of_rounds else "run")  # as --dry-run counts them
    yield broken(
        f"{seen.folder}: sweep {newest.sweep.name}, {some}{what}, "
        f"{counted(len(seen.manifests), 'submission')} (executor of the newest: {newest.executor})",
        indent=2,
    )
    yield from _slurm_ids(seen)
    counts = seen.counts()
    yield columns(
        (
            (state, str(counts[state]), _waits_for(seen) if state is Status.queued else "")
            for state in Status
            if state in counts
        ),
        start="  ",
    )
    yield from _judgements(seen)
    yield from _runs(seen, any_state or every, None if every else SHOWN_RUNS)
    for line in (*map(str, seen.bad_lines), *seen.notes):
        yield broken(f"  note: {line}", indent=4)


def _slurm_ids(seen: Observation) -> Iterator[str]:
    submitted = [manifest for manifest in seen.manifests if manifest.slurm_ids]
    several = len({job.cluster for m in submitted for job in m.slurm_jobs.values()}) > 1
    for manifest in submitted[-SHOWN_SUBMISSIONS:]:
        jobs = manifest.slurm_jobs.values()
        where = f" on cluster {next(iter(jobs)).cluster}" if several else ""
        ids = compact_ids(manifest.slurm_ids.values())
        yield broken(f"  submission {manifest.id}: Slurm jobs {ids}{where}", indent=4)
    if len(submitted) > SHOWN_SUBMISSIONS:
        yield f"  and {len(submitted) - SHOWN_SUBMISSIONS} earlier to Slurm; --json lists all\n"


def _judgements(seen: Observation) -> Iterator[str]:
    """Yield how many blocks are decided, if workers choose the number of rounds."""
    blocks = {block.id for manifest in seen.manifests for block in manifest.blocks if block.auto}
    found = {block: judgement for block, judgement in seen.judgements.items() if block in blocks}
    decided = [judgement.rounds for judgement in found.values() if judgement.is_decided]
    undecided = {block: each for block, each in found.items() if not each.is_decided}
    parts = [f"{len(decided)} decided after {format_range(decided, 'round')}"] if decided else []
    parts += [f"{len(undecided)} undecided"] if undecided else []
    if new := len(blocks) - len(found):
        parts.append(f"{new} not judged yet")
    if parts:
        yield broken(f"  blocks: {', '.join(parts)}", indent=4)
    for block, each in list(undecided.items())[:SHOWN_SIMILAR]:
        cells = abridged(each.undecided, SHOWN_SIMILAR)
        which = f"    block {block} after {counted(each.rounds, 'round')}: undecided {cells}"
        yield broken(f"{which} (of {counted(each.cells, 'cell')})", indent=6)


def _runs(seen: Observation, any_state: bool, most: int | None) -> Iterator[str]:
    """Yield at most `most` runs with the reasons of their states. Urgent states come first."""
    label = run_labels([task.run for task in seen.tasks])
    chosen = [task for task in seen.tasks if any_state or task.status not in HIDDEN]
    chosen.sort(key=lambda task: (*URGENT, task.status).index(task.status))
    several = seen.manifests[-1].sweep.repeats > 1
    lines: Counter[tuple[Status, str, str]] = Counter()  # rounds of a run often have the same line
    for task in chosen:
        why = task.failure.summary if task.failure else task.detail
        repeat = f" repeat={task.repeat}" if several else ""
        older = "  older code" if task.key in seen.stale else ""
        lines[task.status, f"{task.run.id}  {label(task.run)}{repeat}{older}", why] += 1
    similar: Counter[tuple[Status, str]] = Counter()
    left: Counter[Status] = Counter()
    shown = 0
    for (status, run, why), count in lines.items():
        # The reasons of many runs differ only in the number of a Slurm job or of a process.
        kind = (status, re.sub(r"\d+", "N", why))
        similar[kind] += 1
        if most is not None and ((similar[kind] > SHOWN_SIMILAR and why) or shown == most):
            left[status] += count
            continue
        shown += 1
        times = f"  ({counted(count, 'process')})" if count > 1 else ""
        yield broken(f"  {status:11} {run}{times}  {why}".rstrip(), indent=14)
    for status, count in left.items():
        yield f"  {status:11} … and {count} more; --all lists them\n"


def _waits_for(seen: Observation) -> str:
    """Return Slurm's reasons why jobs are pending, for example "Priority, Resources"."""
    details = (task.detail for task in seen.tasks if task.status is Status.queued)
    reasons = (detail.partition("PENDING (")[2].removesuffix(")") for detail in details)
    return ", ".join(dict.fromkeys(filter(None, reasons)))
