"""Selects the attempts that tables and plots show, from all attempts of a results folder.

A run that was measured in blocks is shown by its attempts in complete rounds. Rounds in which it
has older code are left out, and so are rounds in which another run has, if all their runs have as
many later rounds. Any other run is shown by the latest attempt with status ok, or else the latest
attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.report.comparison.paired import (
    Execution,
    complete_executions,
    counted_executions,
    place_of,
    started_at,
)
from jobs.report.recorded import recorded_value
from jobs.results.record import Record

TaskOnDevice = tuple[str, int, str]  # run id, repeat, device
_Group = tuple[Any, ...]  # values of a record by which attempts are told apart

INCOMPLETE = "its round is not complete"
OLDER_CODE = "older code than that of the latest complete round"
OLDER_ROUND = "another run of its round has older code"
NO_BLOCK = "not measured in a block"


@dataclass(frozen=True)
class Selection:
    """The attempts that tables show, and why others are not shown."""

    shown: dict[TaskOnDevice, list[Record]]
    # Tasks that have attempts with status ok, but none that is shown, with the reason.
    withheld: dict[TaskOnDevice, str]
    rounds: _Rounds

    def is_in_round(self, record: Record) -> bool:
        """Return whether an attempt is shown because its round is complete."""
        return id(record) in self.rounds.shown

    def reason(self, record: Record) -> str:
        """Return why an attempt is shown or not shown, such as `a later attempt is shown`."""
        shown = self.shown.get(task_of(record), [])
        if any(each is record for each in shown):
            if self.is_in_round(record):
                return "its round is complete"
            return "latest attempt with status ok" if record.status == "ok" else "latest attempt"
        if id(record) in self.rounds.complete and id(record) not in self.rounds.counted:
            return "its round was executed again"
        if id(record) in self.rounds.hidden:
            return self.rounds.hidden[id(record)]
        if record.status != "ok" and any(each.status == "ok" for each in shown):
            return "another attempt has status ok"
        return "a later attempt is shown"


@dataclass(frozen=True)
class _Rounds:
    """Attempts in rounds, by the identity of their records, as of the function id."""

    complete: set[int]  # in complete executions
    counted: dict[int, str]  # in those that count, with their allocation
    shown: set[int]  # in those that tables show
    hidden: dict[int, str]  # other attempts of the same runs, with the reason


def select_attempts(records: Sequence[Record], told_apart: Sequence[str] = ()) -> Selection:
    """Select the attempts of each run, repeat and device that tables show.

    Of a run in blocks, these are the attempts in the executions of rounds that count, see
    `jobs.report.comparison.paired`: one for each allocation. All are from the code of the latest.
    If the code of another run of their round has changed since, they are not shown either, if there
    are as many later ones, see `_superseded`. Records are oldest first. Attempts with different
    values of the names `told_apart`, of `jobs.sweep.schema.RECORDED`, do not replace each other.
    """

    def values(record: Record) -> _Group:
        return tuple([recorded_value(record, name) for name in told_apart]) if told_apart else ()

    rounds = _find_rounds(records, values)
    latest: dict[_Group, Record] = {}  # the latest ok attempt outside of complete rounds
    paired: dict[_Group, dict[tuple[str, str], Record]] = {}  # by block and allocation
    for record in records:
        key = (task_of(record), values(record))
        if record.block is not None and id(record) in rounds.shown:
            place = (record.block.id, rounds.counted[id(record)])
            paired.setdefault(key, {})[place] = record
        elif record.status == "ok" or key not in latest or latest[key].status != "ok":
            latest[key] = record
    shown: dict[TaskOnDevice, list[Record]] = {}
    withheld: dict[TaskOnDevice, str] = {}
    for key in dict.fromkeys([*latest, *paired]):
        in_rounds = list(paired.get(key, {}).values())
        chosen = [record for record in in_rounds if record.status == "ok"] or in_rounds
        other = latest.get(key)
        if not chosen and other is not None:
            # A failure outside of complete rounds tells more than no attempt at all.
            why = rounds.hidden.get(id(other))
            if why is None or (other.status != "ok" and why != OLDER_ROUND):
                chosen = [other]
            else:
                withheld[task_of(other)] = why
        for record in chosen:
            shown.setdefault(task_of(record), []).append(record)
    return Selection(shown, withheld, rounds)


def _find_rounds(records: Sequence[Record], values: Callable[[Record], _Group]) -> _Rounds:
    """Return the attempts in rounds that tables show or do not show.

    The records must be ordered from the oldest to the latest. `values` returns the values by which
    attempts are told apart.
    """

    def of_run(record: Record) -> _Group:
        return (record.run, record.device, *values(record))

    complete = complete_executions(records)
    groups: dict[_Group, list[Execution]] = {}
    for execution in complete:
        groups.setdefault(values(execution[0]), []).append(execution)
    executions = [each for group in groups.values() for each in counted_executions(group)]
    counted = {
        id(record): allocation for allocation, execution in executions for record in execution
    }
    latest_code = {of_run(r): r.source_hash for r in records if id(r) in counted}
    shown: set[int] = set()
    hidden: dict[int, str] = {}
    for record in records if counted else ():
        if of_run(record) not in latest_code:
            continue
        if record.source_hash != latest_code[of_run(record)]:
            hidden[id(record)] = OLDER_CODE
        elif id(record) in counted:
            shown.add(id(record))
        else:
            hidden[id(record)] = INCOMPLETE if record.block else NO_BLOCK
    for record in _superseded(executions, shown, hidden, of_run):
        shown.remove(id(record))
        hidden[id(record)] = OLDER_ROUND
    return _Rounds({id(r) for execution in complete for r in execution}, counted, shown, hidden)


def _superseded(
    executions: Sequence[tuple[str, Execution]],
    shown: set[int],
    hidden: dict[int, str],
    of_run: Callable[[Record], _Group],
) -> list[Record]:
    """Return the attempts that are not shown because another run of their rounds has older code.

    In such a round, a run whose code has not changed lacks the run that it is compared with. Its
    time, perhaps of another host, would stand beside newer times of that run.

    The rounds of a block in an allocation are hidden together, or not at all: each of their runs
    must have as many later rounds with status ok in this block. So no result is lost, and no pair.

    `executions` are the complete executions that count, with their allocation. For `shown` and
    `hidden`, see `_Rounds`: they lack the attempts that this function returns. `of_run` returns the
    values of a record that tell runs apart.
    """
    older: dict[tuple[str, str], list[Execution]] = {}
    newer: dict[str, list[Execution]] = {}
    for allocation, execution in executions:
        block = place_of(execution[0]).id
        if any(hidden.get(id(record)) == OLDER_CODE for record in execution):
            older.setdefault((block, allocation), []).append(execution)
        else:
            newer.setdefault(block, []).append(execution)
    found: list[Record] = []
    for (block, _), rounds in older.items():
        end = max(started_at(execution) for execution in rounds)
        later = [each for each in newer.get(block, ()) if started_at(each) > end]
        kept = [record for execution in rounds for record in execution if id(record) in shown]
        missing = Counter(of_run(record) for record in kept if record.status == "ok")
        missing.subtract(of_run(r) for execution in later for r in execution if r.status == "ok")
        if all(missing[of_run(record)] <= 0 for record in kept):
            found += kept
    return found


def task_of(record: Record) -> TaskOnDevice:
    """Return the run, the repeat and the device of an attempt."""
    return record.run, record.repeat, record.device
