"""Commit, host and GPUs of a record as tables show them, and notes on results of several commits.

Only the records contain these values, so they are unknown before a run has been measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jobs.formatting import counted
from jobs.results.record import Record

UNKNOWN = "unknown"  # the record does not contain the value
NO_RECORD = "no record"  # shown instead of the commit, host or GPU of a run without a record
MAX_COMMITS = 3  # maximum number of commits that a note lists
_COMMIT_DIGITS = 7
_DIFF_DIGITS = 4
_SUFFIXES = {"True": "-dirty", "unknown": "-dirty?"}  # by the field `dirty` as text
_UUID_START = re.compile(r"[0-9a-f]{8}", re.IGNORECASE)
State = tuple[str, str]  # commit as tables show it, hash of the uncommitted changes or ""


def recorded_value(record: Record, name: str) -> str:
    """Return a value of a record, of those in `jobs.sweep.schema.RECORDED`, as tables show it."""
    return _VALUES[name](record)


def _commit(record: Record) -> str:
    """Return the commit of the measured code, such as `4bb999b` or `4bb999b-dirty+371f`.

    The measured code is the last entry of `environment.code`. If there is none, the measured code
    is in this project, and its commit is in `environment.git`. Uncommitted changes are told apart
    by the first digits of the hash of their diff.
    """
    entries = record.environment.get("code") or [record.environment.get("git") or {}]
    diff = str(entries[-1].get("diff") or "")[:_DIFF_DIGITS]
    return _shown_commit(entries[-1]) + (f"+{diff}" if diff else "")


def _shown_commit(state: dict[str, Any]) -> str:
    commit = state.get("commit")
    if not commit:
        return UNKNOWN
    return f"{str(commit)[:_COMMIT_DIGITS]}{_SUFFIXES.get(str(state.get('dirty')), '')}"


def _host(record: Record) -> str:
    return str(record.environment.get("host") or UNKNOWN)


def _gpu(record: Record) -> str:
    """Return the first 8 digits of the UUID of each GPU, such as `6fb37310+a6a95123`.

    Return an en dash for a run on the CPU.
    """
    if not record.gpus:
        return "–" if record.device.startswith("cpu:") else UNKNOWN
    found = [_UUID_START.search(str(gpu.get("uuid"))) for gpu in record.gpus]
    return "+".join(match[0].lower() if match else UNKNOWN for match in found)


_VALUES: dict[str, Callable[[Record], str]] = {"commit": _commit, "host": _host, "gpu": _gpu}


def commit_order(records: Iterable[Record]) -> dict[str, int]:
    """Return the position of each commit. Commits are in the order of their first records."""
    first: dict[str, float] = {}
    for record in records:
        commit = _commit(record)
        first[commit] = min(first.get(commit, record.started_at), record.started_at)
    return {commit: i for i, commit in enumerate(sorted(first, key=first.__getitem__))}


def commit_notes(records: Iterable[Record], shows_commits: bool) -> list[str]:
    """Return a note for each repository of which the records have several commits.

    The repositories are this project and those of measured code outside this project. Uncommitted
    changes count as a separate commit, and so does an unknown commit. There is no note if the
    commit is a row or column of the table.
    """
    if shows_commits:
        return []
    of_environment: dict[int, tuple[Record, set[str]]] = {}  # records share equal environments
    for record in records:
        known = of_environment.setdefault(id(record.environment), (record, set()))
        known[1].add(record.run)
    runs: dict[str, dict[State, set[str]]] = {}  # ids of the runs, by repository and state
    for record, ids in of_environment.values():
        for repository, state in _states(record):
            runs.setdefault(repository, {}).setdefault(state, set()).update(ids)
    notes = []
    for repository, states in runs.items():
        counts = {state: len(ids) for state, ids in states.items()}
        if len(counts) > 1:
            of = f" of {repository}" if repository else ""
            notes.append(f"Results come from {len(counts)} commits{of}: {_listed(counts)}")
    return notes


def _states(record: Record) -> Iterator[tuple[str, State]]:
    """Yield the state of each repository whose code a record measured. "" is this project."""
    entries = record.environment.get("code") or []
    for repository, entry in (
        ("", record.environment.get("git") or {}),
        *((entry.get("repository"), entry) for entry in entries),
    ):
        if repository is not None:
            yield repository, (_shown_commit(entry), entry.get("diff") or "")


def _listed(counts: dict[State, int]) -> str:
    """Return the commits with their numbers of runs as text, beginning with the most frequent."""
    labels = [label for label, _ in counts]
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    texts = []
    for (label, diff), count in ordered[:MAX_COMMITS]:
        which = f"{label} diff {diff[:_COMMIT_DIGITS]}" if labels.count(label) > 1 else label
        texts.append(f"{which.removesuffix(' diff ')} ({counted(count, 'run')})")
    more = len(ordered) - MAX_COMMITS
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")
