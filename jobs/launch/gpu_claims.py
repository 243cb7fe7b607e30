"""Claims of GPUs, so that no two submissions on this machine measure on one at the same time.

A claim is a lock on a file in the folder for temporary files, named by the UUID of the GPU. The
kernel releases it when the local queue and the worker that uses the GPU have ended, also if they
are killed. Submissions that see different folders for temporary files, as in containers, do not see
each other's claims.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs.errors import CommandError
from jobs.provenance import gpu_uuid

POLL_S = 0.1
WAITS = "waiting for GPUs that another submission on this machine uses"


def claim(gpu: str) -> int | None:
    """Return an open file that holds the claim of a GPU. None if another process holds it."""
    path = Path(tempfile.gettempdir()) / f"cluster-sweeps-{gpu_uuid(gpu)}.lock"
    try:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except PermissionError:  # it belongs to another user
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise CommandError(f"cannot open {path}, which claims a GPU: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        pass  # the file system has no such locks
    return file


def release(files: Iterable[int]) -> None:
    """End claims, unless another process also has their files open."""
    for file in files:
        os.close(file)


@contextmanager
def claimed(gpus: list[str]) -> Iterator[None]:
    """Wait until all of some GPUs can be claimed, and hold the claims in the `with` block."""
    with ExitStack() as held:
        told = False
        for gpu in gpus:
            while (file := claim(gpu)) is None:
                if not told:
                    print(WAITS, flush=True)
                told = True
                time.sleep(POLL_S)
            held.callback(os.close, file)
        yield
