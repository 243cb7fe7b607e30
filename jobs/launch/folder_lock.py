"""Lock of a results folder: only one local queue or debug run may use the folder at a time.

Two queues on one folder would measure the same runs twice and disturb each other's timings. The
lock is an flock on the file queue.lock in the folder. The operating system releases the lock when
its process ends, even after a crash. The file names the process that holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jobs.errors import CommandError
from jobs.processes import command_line

LOCK = "queue.lock"


class FolderInUse(CommandError):
    """Raised if another process submits to the same results folder or runs its jobs."""


@contextmanager
def sole_queue(folder: Path, force: bool = False) -> Iterator[None]:
    """Hold the lock of a results folder while the `with` block runs.

    On a file system without flock, the block runs without a lock.

    Args:
        folder: results folder; created if it does not exist.
        force: run the block even if another process holds the lock.

    Raises:
        FolderInUse: if another process holds the lock and `force` is False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:  # in a folder with the sticky bit, O_CREAT is an error for the file of another user
        handle = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not force:
                holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
                raise FolderInUse(
                    f"{folder} is in use by {holder or 'another queue'}; wait until that process "
                    "ends, or stop it with `python -m jobs cancel`, or use --force to execute all "
                    "runs at the same time"
                ) from None
        except OSError:
            pass  # the file system does not support flock
        else:
            _sign(handle)
        yield
    finally:
        os.close(handle)


def _sign(handle: int) -> None:
    """Write the pid, host, time and command of this process to the lock file."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {os.uname().nodename} since {since}: {command_line()}\n"
    with suppress(OSError):  # the lock works without this text, e.g. if the disk is full
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(errors="replace"), 0)
