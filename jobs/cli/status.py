"""The command `status`: the state of each run in a results folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated

import typer
from rich.table import Table as Grid

from jobs.cli.arguments import Folder
from jobs.cli.completion import results_folders
from jobs.cli.consoles import console
from jobs.cli.find import observed
from jobs.cli.watch import LONGEST_S, SHORTEST_S, WatchingCommand, watch
from jobs.cli.where import Where, matching
from jobs.code.short_names import run_labels
from jobs.formatting import compact_ids, counted, format_range, wrapped
from jobs.results.run_states import Observation, TaskState, summary
from jobs.results.stale import with_stale
from jobs.status import Status

EXAMPLES = """
logs/flash --json
--watch
--where 'status == error and seq_len > 4096'
"""

SHOWN_RUNS = 30
SHOWN_SIMILAR = 5  # maximum number of runs with the same state and reason that are listed
URGENT = (
    Status.running, Status.unknown, Status.wrong, Status.error, Status.timeout, Status.killed,
    Status.oom, Status.unsupported, Status.preempted,
)  # fmt: skip
LAST = len(URGENT)
COMMAND_CLASS = WatchingCommand
SHOWN_SUBMISSIONS = 5


def status(
    folder: Folder = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the submissions and the state of every run as JSON."),
    ] = False,
    where: Where = None,
    lists_all: Annotated[
        bool, typer.Option("--all", help="List every run, also those that are ok or queued.")
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
    preempted, cancelled). For rounds: auto, it tells how many blocks are decided, and the undecided
    cells. Then it lists the runs that are neither ok nor queued, with the reason, or with --where
    all runs that satisfy the condition, or with --all every run. Results of older code are counted
    in a note and marked in the list. For submissions to Slurm, it prints the ids of the jobs.

    Exit code: 0 if no run failed, 1 if a run failed or is missing. The states ok, oom, unsupported,
    queued, running, unknown and not_needed are not failures.
    """
    tasks: list[TaskState] = []

    def report() -> tuple[str, bool]:
        nonlocal folder, tasks
        seen = observed(folder, shows_bad_lines=True)
        folder = seen.folder  # another submission may become the last one while this command runs
        chosen = with_stale(matching(seen, where))
        tasks = chosen.tasks
        text = (
            json.dumps(summary(chosen)) + "\n"
            if as_json
            else _text(chosen, len(seen.tasks), where is not None, lists_all)
        )
        return text, any(task.status.is_live for task in tasks)

    if every_s is None:
        print(report()[0], end="")
    else:
        try:
            watch(report, every_s)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    raise SystemExit(1 if any(task.status.is_failure for task in tasks) else 0)


def _text(seen: Observation, total: int, any_state: bool, every: bool) -> str:
    with console.capture() as capture:
        _show(seen, total, any_state, every)
    return capture.get()


def _show(seen: Observation, total: int, any_state: bool, every: bool) -> None:
    """Print the state of a results folder.

    `seen` has the runs to show, and `total` is the number of all runs in the folder. With
    `any_state`, runs that are ok or queued are listed, too, and with `every` all of them.
    """
    newest = seen.manifests[-1]
    some = f"{len(seen.tasks)} of " if len(seen.tasks) != total else ""
    of_rounds = any(manifest.blocks for manifest in seen.manifests)
    what = counted(total, "process" if of_rounds else "run")  # as --dry-run counts them
    head = (
        f"{seen.folder}: sweep {newest.sweep.name}, {some}{what}, "
        f"{counted(len(seen.manifests), 'submission')} (executor of the newest: {newest.executor})"
    )
    console.print(wrapped(head, console.width, "  "), soft_wrap=True)
    _show_slurm_ids(seen)
    grid = Grid.grid(padding=(0, 2))
    counts = seen.counts()
    for state, count in ((state, counts[state]) for state in Status if state in counts):
        grid.add_row("", state, str(count), _waits_for(seen) if state is Status.queued else "")
    console.print(grid)
    _show_judgements(seen)
    _show_runs(seen, any_state or every, None if every else SHOWN_RUNS)
    for line in (*map(str, seen.bad_lines), *seen.notes):
        _print_line(f"  note: {line}", " " * 4)


def _print_line(line: str, indent: str) -> None:
    """Print a line. On a terminal, it is broken between words if it is too long."""
    text = wrapped(line, console.width, indent)
    console.print(text, highlight=False, soft_wrap=True)


def _show_slurm_ids(seen: Observation) -> None:
    submitted = [manifest for manifest in seen.manifests if manifest.slurm_ids]
    several = len({job.cluster for m in submitted for job in m.slurm_jobs.values()}) > 1
    for manifest in submitted[-SHOWN_SUBMISSIONS:]:
        jobs = manifest.slurm_jobs.values()
        where = f" on cluster {next(iter(jobs)).cluster}" if several else ""
        ids = compact_ids(manifest.slurm_ids.values())
        line = f"  submission {manifest.id}: Slurm jobs {ids}{where}"
        _print_line(line, " " * 4)
    if len(submitted) > SHOWN_SUBMISSIONS:
        earlier = counted(len(submitted) - SHOWN_SUBMISSIONS, "earlier submission")
        console.print(f"  and {earlier} to Slurm; --json lists all", highlight=False)


def _show_judgements(seen: Observation) -> None:
    """Print how many blocks are decided, if workers choose the number of rounds."""
    blocks = {block.id for manifest in seen.manifests for block in manifest.blocks if block.auto}
    found = {block: judgement for block, judgement in seen.judgements.items() if block in blocks}
    decided = [judgement.rounds for judgement in found.values() if judgement.is_decided]
    undecided = {block: each for block, each in found.items() if not each.is_decided}
    parts = [f"{len(decided)} decided after {format_range(decided)} rounds"] if decided else []
    parts += [f"{len(undecided)} undecided"] if undecided else []
    if new := len(blocks) - len(found):
        parts.append(f"{new} not judged yet")
    if parts:
        _print_line(f"  blocks: {', '.join(parts)}", " " * 4)
    for block, each in list(undecided.items())[:SHOWN_SIMILAR]:
        cells = ", ".join(each.undecided[:SHOWN_SIMILAR])
        more = len(each.undecided) - SHOWN_SIMILAR
        cells += f" and {more} more" if more > 0 else ""
        which = f"  block {block} after {counted(each.rounds, 'round')}: undecided {cells}"
        _print_line(f"  {which} (of {counted(each.cells, 'cell')})", " " * 6)


def _show_runs(seen: Observation, any_state: bool, most: int | None) -> None:
    """Print at most `most` runs with the reasons of their states. Urgent states come first.

    Without `any_state`, these are the runs that are neither ok nor queued.
    """
    label = run_labels([task.run for task in seen.tasks])
    hidden = (
        () if any_state else (Status.ok, Status.queued, Status.unknown, Status.not_needed)
    )  # a note says why
    chosen = [task for task in seen.tasks if task.status not in hidden]
    chosen.sort(key=lambda task: URGENT.index(task.status) if task.status in URGENT else LAST)
    similar: Counter[tuple[Status, str]] = Counter()
    left: Counter[Status] = Counter()
    shown = 0
    for task in chosen:
        why = _why(task)
        # The reasons of many runs differ only in the number of a Slurm job or of a process.
        kind = (task.status, re.sub(r"\d+", "N", why))
        similar[kind] += 1
        if most is not None and ((similar[kind] > SHOWN_SIMILAR and why) or shown == most):
            left[task.status] += 1
            continue
        shown += 1
        repeat = f" repeat={task.repeat}" if seen.manifests[-1].sweep.repeats > 1 else ""
        older = "  older code" if task.key in seen.stale else ""
        text = f"  {task.status:11} {task.run.id}  {label(task.run)}{repeat}{older}  {why}"
        _print_line(text.rstrip(), " " * 14)
    for status, count in left.items():
        console.print(f"  {status:11} … and {count} more; --all lists them", highlight=False)


def _why(task: TaskState) -> str:
    failure = task.record.failure if task.record and not task.status.is_live else None
    return failure.summary if failure else task.detail


def _waits_for(seen: Observation) -> str:
    """Return Slurm's reasons why jobs are pending, for example "Priority, Resources"."""
    details = (task.detail for task in seen.tasks if task.status is Status.queued)
    reasons = (detail.partition("PENDING (")[2].removesuffix(")") for detail in details)
    return ", ".join(dict.fromkeys(filter(None, reasons)))
