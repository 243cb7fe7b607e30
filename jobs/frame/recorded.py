"""Commit, host, GPUs, CPU threads and versions of torch and Triton of a record as tables show them.

Only the records contain these values, so they are unknown before a run has been measured.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from jobs.results.record import Record

UNKNOWN = "unknown"  # the record does not contain the value
RECORDED = ("commit", "host", "gpu", "threads", "torch", "triton")  # names of these values
COMMIT_DIGITS = 7
_DIFF_DIGITS = 4
_SUFFIXES = {"True": "-dirty", "unknown": "-dirty?"}  # by the field `dirty` as text
_LOCAL = re.compile(r"\+(cu\d+|cpu)$")
_UUID_START = re.compile(r"[0-9a-f]{8}", re.IGNORECASE)


def recorded_value(record: Record, name: str) -> str:
    """Return a value of a record, of those in `RECORDED`, as tables show it."""
    match name:
        case "commit":
            return _commit(record)
        case "host":
            return str(record.environment.get("host") or UNKNOWN)
        case "threads":
            return str(record.environment.get("threads") or "–")
        case "gpu":
            return _gpu(record)
    # The version of a package that was loaded, or else installed
    installed = environment_value(record, "packages", name)
    return loaded_version(record, name) or str(installed or UNKNOWN)


def _commit(record: Record) -> str:
    """Return the commit of the measured code, such as `4bb999b` or `4bb999b-dirty+371f`.

    It is that of the last entry of `environment.code`, or else of the other checkout, or else of
    this project. The first digits of the hash of their diff tell uncommitted changes apart.
    """
    entry = _code_entry(record)
    diff = str(entry.get("diff") or "")[:_DIFF_DIGITS]
    return shown_commit(entry) + (f"+{diff}" if diff else "")


def commit_or_reason(record: Record) -> str:
    """Return the commit, or `unknown: att.py is in no git repository` if the reason is known."""
    entry, commit = _code_entry(record), _commit(record)
    if commit != UNKNOWN or not entry.get("why"):
        return commit
    file = str(entry.get("file") or "")
    return f"{commit}: {str(entry['why']).replace(file, PurePath(file).name)}"


def _code_entry(record: Record) -> dict[str, Any]:
    known = record.environment
    entries = known.get("code") or [known.get("checkout") or known.get("git") or {}]
    return dict(entries[-1])


def shown_commit(state: dict[str, Any]) -> str:
    """Return the commit in a state of code, such as `4bb999b-dirty`."""
    commit = state.get("commit")
    if not commit:
        return UNKNOWN
    return f"{str(commit)[:COMMIT_DIGITS]}{_SUFFIXES.get(str(state.get('dirty')), '')}"


def _gpu(record: Record) -> str:
    """Return the first 8 digits of the UUID of each GPU, such as `6fb37310+a6a95123`; `–`: none."""
    if not record.gpus:
        return "–" if record.device.startswith("cpu:") else UNKNOWN
    found = [_UUID_START.search(str(gpu.get("uuid"))) for gpu in record.gpus]
    return "+".join(match[0].lower() if match else UNKNOWN for match in found)


def environment_value(record: Record, *keys: str) -> Any:
    """Return a value of the environment of a record by its keys. None: the record has none."""
    found: Any = record.environment
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def loaded_version(record: Record, package: str) -> str:
    """Return the version of a package that a run loaded, as tables show it. Empty: unknown.

    The part after "+" is left out if it only names the CUDA of a release.
    """
    return _LOCAL.sub("", str(environment_value(record, "loaded", package) or ""))
