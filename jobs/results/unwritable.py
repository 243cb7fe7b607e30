"""Marker of a submission whose worker could not write a record, e.g. because the disk is full.

The worker then ends its job, because it could not record later runs either. The marker is an empty
file, which usually can be created on a full disk: DIR/submissions/<id>/cannot-write-3-ENOSPC, where
3 is the job. `status` shows the marker of the newest submission.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from jobs.errors import CommandError

EXIT_CODE = os.EX_IOERR  # exit code of the worker, 74
FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk and of an exhausted quota
_PREFIX = "cannot-write-"


class ResultsUnwritable(CommandError):
    """A worker of a local or debug submission could not write its results."""


def mark(submission: Path, job: int, error: OSError) -> None:
    """Leave a marker in the folder of a submission, if possible."""
    name = errno.errorcode.get(error.errno or 0, "unknown")
    with suppress(OSError):
        (submission / f"{_PREFIX}{job}-{name}").touch()


def unmark(submission: Path, job: int) -> None:
    """Remove the markers that an earlier worker of a job has left."""
    with suppress(OSError):
        for path in submission.glob(f"{_PREFIX}{job}-*"):
            path.unlink()


def problem(folder: Path, submission: Path) -> str | None:
    """Return a message if a worker of a submission could not write its results, else None."""
    names = sorted(path.name for path in submission.glob(f"{_PREFIX}*"))
    return message(folder, getattr(errno, names[0].rpartition("-")[2], None)) if names else None


def message(folder: Path, number: int | None) -> str:
    """Return the error message for a results folder that cannot be written, by errno if known."""
    if number == errno.ENOENT or (number not in FULL and not os.path.isdir(folder)):
        return f"{folder} was moved or removed while its runs executed; repeat the command"
    why = "see the log of the job" if number is None else os.strerror(number)
    remedy = "free space" if number in FULL else "correct this"
    return f"cannot write results to {folder}: {why}; {remedy} and repeat the command"
