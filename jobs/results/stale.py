"""Results of older code: records whose sources are not the present ones, see `jobs.code.sources`.

A record without a hash of its sources counts as older code.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from jobs.formatting import counted, relative
from jobs.results.record import Record, is_without_code
from jobs.results.run_states import Observation


def with_stale(observation: Observation) -> Observation:
    """Return the state of a results folder with notes that tell its results of older code.

    A note also tells of how many results the code is not found.
    """
    measured = {task.key: task.outcome for task in observation.tasks if task.outcome is not None}
    records = [measured[key] for key in observation.stale]
    notes = []
    if records:
        are = "is" if len(records) == 1 else "are"
        folder = shlex.quote(str(relative(observation.folder)))
        notes.append(
            f"{len(records)} of {counted(len(measured), 'result')} {are} from older code"
            f"{without_hash(records)}; submitting the sweep again measures them, "
            f"python -m jobs status {folder} --where 'older_code == true' lists them"
        )
    lost = sum(is_without_code(record, observation.source_hashes) for record in measured.values())
    if lost:
        notes.append(
            f"the code of {lost} of {counted(len(measured), 'result')} is not found from this "
            "folder, so these may be from older code"
        )
    return replace(observation, notes=[*observation.notes, *notes])


def without_hash(records: Iterable[Record]) -> str:
    """Return how many records have no hash of their sources, in parentheses. "" if all have."""
    count = sum(record.source_hash is None for record in records)
    return f" ({count} without a source hash)" if count else ""
