"""One queue at a time in a results folder: two would measure the same runs, and beside each other.

The lock is the kernel's, on a file in the folder, so it goes with its process however that ends.
What a second queue is told of the first stands in the file.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "queue.lock"


class FolderInUse(RuntimeError):
    """Another process runs a queue into the folder."""


@contextmanager
def sole_queue(folder: Path, force: bool = False) -> Iterator[None]:
    """Keep other queues out of a results folder while this one runs.

    Args:
        folder: made where it does not exist.
        force: go on beside another.

    Raises:
        FolderInUse: naming the process that runs there. Never on a file system without locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not force:
                holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
                raise FolderInUse(
                    f"{folder} is in use by {holder or 'another queue'}; wait for it or cancel it; "
                    "--force measures everything beside it"
                ) from None
        except OSError:
            pass  # this file system has no locks
        else:
            _sign(handle)
        yield
    finally:
        os.close(handle)


def _sign(handle: int) -> None:
    """Say who holds the lock."""
    command = shlex.join(["python", *sys.orig_argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {os.uname().nodename} since {since}: {command}\n"
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(errors="replace"), 0)
