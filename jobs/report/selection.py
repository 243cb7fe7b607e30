"""Selects the attempts that tables and plots show, from all attempts of a results folder.

A run that was measured in blocks is shown by its attempts in complete rounds, if they are of the
latest code. Any other run is shown by the latest attempt with status ok, or else the latest
attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.report.paired import Execution, complete_executions, counted_executions
from jobs.report.recorded import recorded_value
from jobs.results.record import Record

TaskOnDevice = tuple[str, int, str]  # run id, repeat, device
_Group = tuple[Any, ...]  # values of a record by which attempts are told apart

INCOMPLETE = "its round is not complete"
OLDER_CODE = "older code than that of the latest complete round"
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
    shown: set[int]  # in those of the latest code
    hidden: dict[int, str]  # other attempts of the same runs, with the reason


def select_attempts(records: Sequence[Record], told_apart: Sequence[str] = ()) -> Selection:
    """Select the attempts of each run, repeat and device that tables show.

    Of a run in blocks, these are the attempts in the executions of rounds that count, see
    `jobs.report.paired`: one for each allocation. All are from the code of the latest of them.

    Args:
        records: all records of a results folder, oldest first.
        told_apart: names in `jobs.sweep.schema.RECORDED`, such as `commit`. Attempts with different
            values of these names do not replace each other.
    """

    def values(record: Record) -> _Group:
        return tuple(recorded_value(record, name) for name in told_apart)

    rounds = _find_rounds(records, values)
    latest: dict[_Group, Record] = {}  # the latest ok attempt outside of complete rounds
    paired: dict[_Group, dict[tuple[str, str], Record]] = {}  # by block and allocation
    for record in records:
        key = (*task_of(record), *values(record))
        if id(record) in rounds.shown and record.block is not None:
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
            if id(other) not in rounds.hidden or other.status != "ok":
                chosen = [other]
            else:
                withheld[task_of(other)] = rounds.hidden[id(other)]
        for record in chosen:
            shown.setdefault(task_of(record), []).append(record)
    return Selection(shown, withheld, rounds)


def _find_rounds(records: Sequence[Record], values: Callable[[Record], _Group]) -> _Rounds:
    """Return the attempts in rounds that tables show or do not show.

    Args:
        records: all records of a results folder, oldest first.
        values: returns the values by which attempts are told apart.
    """

    def of_run(record: Record) -> _Group:
        return (record.run, record.device, *values(record))

    complete = complete_executions(records)
    groups: dict[_Group, list[Execution]] = {}
    for execution in complete:
        groups.setdefault(values(execution[0]), []).append(execution)
    counted = {
        id(record): allocation
        for group in groups.values()
        for allocation, execution in counted_executions(group)
        for record in execution
    }
    latest_code = {of_run(r): r.source_hash for r in records if id(r) in counted}
    shown, hidden = set(), {}
    for record in records if counted else ():
        if of_run(record) not in latest_code:
            continue
        if record.source_hash != latest_code[of_run(record)]:
            hidden[id(record)] = OLDER_CODE
        elif id(record) in counted:
            shown.add(id(record))
        else:
            hidden[id(record)] = INCOMPLETE if record.block else NO_BLOCK
    return _Rounds({id(r) for execution in complete for r in execution}, counted, shown, hidden)


def task_of(record: Record) -> TaskOnDevice:
    """Return the run, the repeat and the device of an attempt."""
    return record.run, record.repeat, record.device
