"""The rule that decides which attempts of a run count.

An attempt is one execution of a run. Attempts with the present code are later than those with older
code, and those of unknown code are the earliest.

1. Best attempt: of the attempts of one repeat of a run on one kind of device, the latest with
   status ok counts, or the latest if none is ok. But if the present code ended by itself in another
   way (unsupported, oom, timeout, error, wrong, a crash), this replaces results of older code.
2. Rounds: the attempts of a run in a block count by rounds. An execution of a round is complete if
   it has an attempt of each of its runs. Of several complete executions of a round in one
   allocation, the latest counts. The best attempt counts while a run has no complete round.
   Attempts in the trial of a block are in no round: one that was ok counts for nothing. Tables show
   what its check found (the facts that rounds lack) beside the first round after it.
3. Older code: tables never mix rounds of old and new code. Of a run in rounds, they show only
   attempts with the code of its latest round. The rounds of an allocation in which one run is
   hidden for this reason are hidden for all their runs, if each run has as many later rounds. A
   verdict needs rounds in which every run has its latest code.
4. Wrong outputs: if an attempt was wrong, tables show it instead of attempts of the same run with
   the same sources that were ok, also of later rounds and other devices.
5. Old versions: if a folder has runs of a newer version of a benchmark, the others are not shown.
6. Not again: a run is not executed again if an attempt on this kind of device with the present
   code was ok, or the latest was unsupported. Nor is it, without --retry-failed, if the latest
   failed by itself: oom, timeout, error, wrong, or the third crash in a row. A round is not
   executed again if this holds for all its runs in its latest complete execution, and no GPU was
   throttled by heat or hardware. There, one crash is enough.

Rules 1 to 5 decide what tables, plots, comparisons, exports and reports show. Rule 6 decides what a
submission, a worker and the local queue execute. The state of a run that `status` shows is that of
its job, or of its best attempt on any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jobs.block import Block, TaskKey
from jobs.results.record import BlockPlace, Record, throttle_reasons
from jobs.run import Run
from jobs.status import Status

TaskOnDevice = tuple[str, int, str]  # run id, repeat, device
Execution = list[Record]  # attempts in one execution of a round
Hashes = Mapping[str, str | None]  # of the present code of each run, by run id; None: unknown
NO_HASHES: Hashes = {}

# Why an attempt is not shown
INCOMPLETE = "its round is not complete"
AGAIN = "its round was executed again"
TRIAL = "trial of its block"
OLDER_CODE = "other code than that of the latest complete round"
OLDER_ROUND = "another run of its round has older code"
NO_BLOCK = "not measured in a block"

# Signals by which a process ends itself. SIGKILL and SIGTERM come from outside, and SIGINT and
# SIGHUP from a terminal.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
MAX_CRASHES = 3  # consecutive crashes after which a run needs --retry-failed
# Number of executions after which a round counts as complete although a GPU was throttled in each.
MAX_EXECUTIONS = 3
# Heat and hardware that slow down a GPU, as named in `jobs.provenance.THROTTLE_REASONS`. The power
# limit is no disturbance.
DISTURBANCES = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake")


# ---- 1: the best attempt -------------------------------------------------------------------------


def best(
    attempts: Iterable[Record], key: Callable[[Record], Any], present: Hashes = NO_HASHES
) -> dict[Any, Record]:
    """Return the best attempt for each value of `key`, see rule 1.

    Attempts are ordered, oldest first. `present` has the hash of the present code of each run.
    """
    found: dict[Any, Record] = {}
    for record in attempts:
        if is_thrown_away(record):
            continue
        known = found.get(place := key(record))
        if (
            known is None
            or known.status is not Status.ok
            or record.status is Status.ok
            or _replaces(record, known, present)
        ):
            found[place] = record
    return found


def _replaces(record: Record, known: Record, present: Hashes) -> bool:
    """Return whether an attempt that is not ok counts instead of `known`, which is."""
    now = present.get(record.run)
    return (
        now is not None
        and record.source_hash == now != known.source_hash
        and record.device == known.device
        and (not record.status.runs_again_on_submit or _crashed(record))
    )


def task_of(record: Record) -> TaskOnDevice:
    return record.run, record.repeat, record.device


def code_of(record: Record) -> tuple[str, str, str | None]:
    """Return what decides whether two attempts measured the same code."""
    return record.run, record.checkout, record.source_hash


def wrong_code(attempts: Iterable[Record]) -> dict[tuple[str, str, str | None], Record]:
    """Return the latest wrong attempt of each code. No later round and no other GPU repairs it."""
    return {code_of(r): r for r in attempts if r.status is Status.wrong and r.source_hash}


# ---- 2: rounds -----------------------------------------------------------------------------------


def is_trial(record: Record) -> bool:
    return record.block is not None and record.block.trial


def is_thrown_away(record: Record) -> bool:
    """Return whether an attempt was ok, but in a trial. A failure in a trial counts."""
    return is_trial(record) and record.status is Status.ok


def place_of(record: Record) -> BlockPlace:
    assert record.block is not None
    return record.block


def tried(record: Record) -> tuple[str, str, str, str | None]:
    """Return what a trial and the rounds after it have in common."""
    return record.run, place_of(record).id, allocation_of(record), record.source_hash


def allocation_of(record: Record) -> str:
    """Return the allocation of an attempt. Without the id of the boot, each job has its own."""
    return record.allocation or f"{record.submission}/{record.job}"


def executions_of(attempts: Iterable[Record]) -> list[Execution]:
    """Return all executions of rounds, each in the order in which its runs were executed.

    An attempt that was repeated in one replaces the earlier.
    """
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for record in attempts:
        if record.block is None or record.block.trial:
            continue
        positions = found.setdefault((record.block.id, record.block.execution), {})
        known = positions.get(record.block.position)
        if known is None or record.started_at >= known.started_at:
            positions[record.block.position] = record
    return [[own[position] for position in sorted(own)] for own in found.values()]


def is_complete(execution: Execution) -> bool:
    return len(execution) >= place_of(execution[0]).size


def complete_executions(attempts: Iterable[Record]) -> list[Execution]:
    return list(filter(is_complete, executions_of(attempts)))


def counted_executions(complete: Iterable[Execution]) -> list[tuple[str, Execution]]:
    """Return those of complete executions that count, with their allocations, in their order."""
    latest: dict[tuple[str, str, int], tuple[str, Execution]] = {}
    for execution in complete:
        first = execution[0]
        allocation = allocation_of(first)
        key = (place_of(first).id, allocation, place_of(first).round)
        latest.pop(key, None)
        latest[key] = (allocation, execution)
    return list(latest.values())


def judged_executions(attempts: Iterable[Record]) -> list[tuple[str, Execution]]:
    """Return the executions that verdicts rest on, with their allocations, see rule 3."""
    complete = complete_executions(attempts)
    latest = {(r.run, r.checkout): r.source_hash for execution in complete for r in execution}
    return counted_executions(
        execution
        for execution in complete
        if all(r.source_hash == latest[r.run, r.checkout] for r in execution)
    )


def results_of(attempts: Sequence[Record]) -> list[Record]:
    """Return the attempts that count whatever their code is: what was measured was of use once."""
    alone = best((record for record in attempts if record.block is None), task_of)
    counted = counted_executions(complete_executions(attempts))
    return [*alone.values(), *(record for _, execution in counted for record in execution)]


# ---- 3: what tables show -------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The attempts that tables show, and why they do not show others."""

    shown: dict[TaskOnDevice, list[Record]]
    # Tasks that have attempts of which none is shown, with the reason.
    withheld: dict[TaskOnDevice, str]
    # By the `id` of records: the attempts in rounds that are shown, and why other attempts of the
    # same runs are not.
    in_rounds: set[int]
    hidden: dict[int, str]

    def is_in_round(self, record: Record) -> bool:
        return id(record) in self.in_rounds

    def is_shown(self, record: Record) -> bool:
        return any(each is record for each in self.shown.get(task_of(record), ()))

    def reason(
        self, record: Record, shown: bool, submitted: Collection[TaskKey], old: Collection[str]
    ) -> str:
        """Return why tables show an attempt or not.

        `submitted` has all tasks of the folder, `old` the runs that are `superseded`.
        """
        if shown:
            if self.is_in_round(record):
                return "its round is complete"
            return "latest attempt with status ok" if record.status == "ok" else "latest attempt"
        if record.checkout:
            return f"code of {record.checkout}, which only compare shows"
        if record.run in old:
            return "the folder has runs of a newer version of the benchmark"
        if (record.run, record.repeat) not in submitted:
            return "no submission in the folder has this run"
        if is_trial(record):
            return TRIAL
        if self.is_shown(record):
            return "all runs are unsupported on this device"
        if id(record) in self.hidden:
            return self.hidden[id(record)]
        others = self.shown.get(task_of(record), ())
        same_code = any(record.source_hash == each.source_hash for each in others)
        if record.status == "ok" and code_of(record) in wrong_code(others):
            return "an attempt with the same code was wrong"
        if record.status != "ok" and any(each.status == "ok" for each in others):
            return "another attempt has status ok"
        if others and not same_code:
            return "an attempt with the present or later code is shown"
        return "a later attempt is shown"

    @cached_property
    def devices(self) -> dict[str, None]:
        """The kinds of device that count as measured: those on which a run is supported."""
        return {
            device: None
            for (_, _, device), found in self.shown.items()
            if any(record.status is not Status.unsupported for record in found)
        }


def select_attempts(attempts: Sequence[Record], present: Hashes = NO_HASHES) -> Selection:
    """Select the attempts of each run, repeat and device that tables show, see the module.

    Attempts are ordered, oldest first. `present` has the hash of the present code of each run.
    """
    in_rounds, hidden = _find_rounds(attempts)
    outside = best((r for r in attempts if id(r) not in in_rounds), task_of, present)
    paired: dict[TaskOnDevice, dict[tuple[str, str], Record]] = {}  # by block and allocation
    for record in attempts:
        if id(record) in in_rounds:
            place = place_of(record).id, allocation_of(record)
            paired.setdefault(task_of(record), {})[place] = record
    wrong = wrong_code(attempts)
    shown: dict[TaskOnDevice, list[Record]] = {}
    withheld: dict[TaskOnDevice, str] = {}
    for key in dict.fromkeys([*outside, *paired]):
        own = list(paired.get(key, {}).values())
        chosen = [record for record in own if record.status == "ok"] or own
        other = outside.get(key)
        if not chosen and other is not None:
            # A failure outside of complete rounds tells more than no attempt at all.
            why = hidden.get(id(other))
            if why is None or (other.status != "ok" and why != OLDER_ROUND):
                chosen = [other]
            else:
                withheld[key] = why
        for record in chosen:
            instead = wrong.get(code_of(record)) if record.status is Status.ok else None
            shown.setdefault(key, []).append(instead or record)
    return Selection(shown, withheld, in_rounds, hidden)


def _find_rounds(attempts: Sequence[Record]) -> tuple[set[int], dict[int, str]]:
    """Return the fields `in_rounds` and `hidden` of a `Selection`."""
    complete = complete_executions(attempts)
    executions = counted_executions(complete)
    counted = {id(record) for _, execution in executions for record in execution}
    again = {id(record) for execution in complete for record in execution} - counted
    latest_code = {_run_of(r): r.source_hash for r in attempts if id(r) in counted}
    shown: set[int] = set()
    hidden: dict[int, str] = {}
    for record in attempts:
        if _run_of(record) not in latest_code:
            continue
        if id(record) in again:
            hidden[id(record)] = AGAIN
        elif record.source_hash != latest_code[_run_of(record)]:
            hidden[id(record)] = OLDER_CODE
        elif id(record) in counted:
            shown.add(id(record))
        else:
            hidden[id(record)] = INCOMPLETE if record.block else NO_BLOCK
    for record in _beside_older_code(executions, shown, hidden):
        shown.remove(id(record))
        hidden[id(record)] = OLDER_ROUND
    return shown, hidden


def _run_of(record: Record) -> tuple[str, str]:
    return record.run, record.device


def _beside_older_code(
    executions: Sequence[tuple[str, Execution]], shown: set[int], hidden: dict[int, str]
) -> list[Record]:
    """Return the attempts that are hidden because another run of their rounds has older code.

    Alone, a run whose code has not changed would stand beside newer times of the run that it is
    compared with. The rounds of a block in an allocation are hidden together, and only if each of
    their runs has as many later ok rounds in this block. So no result is lost, and no pair.
    """
    older: dict[tuple[str, str], list[Execution]] = {}
    newer: dict[str, list[tuple[int, Execution]]] = {}
    end: dict[tuple[str, str], int] = {}
    for i, (allocation, execution) in enumerate(executions):
        block = place_of(execution[0]).id
        if any(hidden.get(id(record)) == OLDER_CODE for record in execution):
            older.setdefault((block, allocation), []).append(execution)
            end[block, allocation] = i
        else:
            newer.setdefault(block, []).append((i, execution))
    found: list[Record] = []
    for (block, allocation), rounds in older.items():
        later = [each for i, each in newer.get(block, ()) if i > end[block, allocation]]
        kept = [record for execution in rounds for record in execution if id(record) in shown]
        missing = Counter(_run_of(record) for record in kept if record.status == "ok")
        missing.subtract(_run_of(r) for execution in later for r in execution if r.status == "ok")
        if all(missing[_run_of(record)] <= 0 for record in kept):
            found += kept
    return found


# ---- 5: old versions -----------------------------------------------------------------------------


def superseded(runs: Iterable[Run]) -> set[str]:
    """Return the ids of the runs of a benchmark of which others have a newer version."""
    known = {run.id: run for run in runs}
    newest: dict[str, int] = {}
    for run in known.values():
        newest[run.benchmark] = max(newest.get(run.benchmark, 0), run.version)
    return {run.id for run in known.values() if run.version < newest[run.benchmark]}


# ---- 6: what is executed again -------------------------------------------------------------------


def is_done(attempts: Sequence[Record], retry_failed: bool = False) -> bool:
    """Return whether a run need not be executed again, by its attempts that count, oldest first."""
    attempts = [record for record in attempts if not is_thrown_away(record)]
    if any(record.status is Status.ok for record in attempts):
        return True
    last = attempts[-1].status if attempts else Status.missing
    crashed = len(attempts) >= MAX_CRASHES and all(map(_crashed, attempts[-MAX_CRASHES:]))
    by_itself = last.runs_again_on_submit and not crashed
    on_retry = last.runs_again_on_submit or last.runs_again_on_retry
    return not (by_itself or (retry_failed and on_retry))


def is_done_in_round(record: Record, retry_failed: bool = False) -> bool:
    """Return whether an attempt does not require that its round is executed again."""
    crashed = _crashed(record)
    failed = record.status.runs_again_on_retry or crashed
    interrupted = record.status.runs_again_on_submit and not crashed
    return not (interrupted or (retry_failed and failed))


def is_done_in_job(record: Record, submission: str, usable: bool = False) -> bool:
    """Return whether a job keeps an attempt instead of executing its run again.

    It keeps those of its own `submission` however they ended, except preempted and cancelled ones,
    and others if they are ok and `usable`: on the same kind of device, and of the present code.
    """
    if is_trial(record):
        return False
    if record.submission == submission:
        return not record.status.runs_again_in_its_job
    return record.status is Status.ok and usable


def _crashed(record: Record) -> bool:
    return record.failure is not None and record.failure.type in CRASHES


def complete_rounds(
    block: Block, attempts: Iterable[Record], counts: Callable[[Record], bool]
) -> set[int]:
    """Return the rounds of a block that need not be executed again, see rule 6.

    Attempts of different executions are not put together, because the runs would then not be
    paired. A round in which a GPU was throttled is executed up to MAX_EXECUTIONS times. `counts`
    tells whether an attempt is a valid result.
    """
    own = (
        record for record in attempts if record.block is not None and record.block.id == block.id
    )
    latest: dict[tuple[int, str], tuple[bool, bool]] = {}  # by round and device
    tries: Counter[int] = Counter()
    for execution in complete_executions(own):
        number = place_of(execution[0]).round
        valid = [record for record in execution if counts(record)]
        is_valid = set(block.tasks(number)) <= {(record.run, record.repeat) for record in valid}
        tries[number] += is_valid
        is_disturbed = any(not throttle_reasons(r).isdisjoint(DISTURBANCES) for r in valid)
        latest[number, execution[0].device] = is_valid, is_disturbed
    return {
        number
        for (number, _), (is_valid, is_disturbed) in latest.items()
        if is_valid and (not is_disturbed or tries[number] >= MAX_EXECUTIONS)
    }
