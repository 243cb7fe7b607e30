"""Lock of a results folder: a file that names its holder.

It is held while a submission is planned, until the ids of all its jobs are saved: of two at the
same time, both would submit the same runs.

It is created with a hard link, which is atomic on network file systems, too. A thread updates the
time of the file. The lock of a holder on this host that has ended is taken over at once, that of a
holder on another host when the file has become old.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from jobs.errors import CommandError, shown
from jobs.processes import ProcessHandle, command_line
from jobs.results.heartbeat import BEAT_S
from jobs.whole_files import age_s


class FolderInUse(CommandError):
    """Raised if another process submits to the same results folder."""


@dataclass(frozen=True)
class _Holder:
    """The process that holds a lock, as written in the lock file."""

    # Identifies this lock, and is part of a file name. Empty if the file cannot be read.
    token: Annotated[str, Field(pattern="^([0-9a-f]{8})?$")]
    process: ProcessHandle
    since: str
    command: str

    def __str__(self) -> str:
        if not self.token:
            return "an unknown process"
        where = f"process {self.process.pid} on {self.process.host}"
        return f"{where} since {self.since}: {self.command}"


_HOLDER = TypeAdapter(_Holder)
_UNKNOWN = _Holder("", ProcessHandle(0, None, ""), "", "")


class SubmitLock:
    """Lock of a results folder, for a `with` statement.

    The folder is created if it does not exist, and removed again if it is empty at the end. If
    another process holds the lock, FolderInUse is raised, or with `force`, this object has no
    effect.
    """

    NAME = "submit.lock"
    # Age at which a lock that another host holds is taken over, in seconds. It is long, because a
    # suspended process still submits when it continues.
    STALE_S = 600.0

    def __init__(self, folder: Path, force: bool = False):
        self._path = folder / self.NAME
        self._force = force
        self._created = self._held = False
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = ProcessHandle.of_this_process()
        # Without lone surrogates, which JSON must not contain.
        self._me = _Holder(os.urandom(4).hex(), me, since, shown(command_line(), 1000))
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._created = not self._path.parent.exists()
        try:
            self._acquire(self._path)
        except FolderInUse:
            if not self._force:
                raise
        except OSError:
            self._remove_folder()
            raise
        else:
            self._held = True
            # A thread, because sbatch may take minutes.
            threading.Thread(target=self._beat, name=self.NAME, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        if self._held:
            self._held = False
            self._over.set()
            with suppress(OSError):
                if _read(self._path) == self._me:  # else another host has taken it over
                    self._path.unlink()
            self._remove_folder()

    def _acquire(self, path: Path) -> None:
        """Create a lock file, after removing the file of a holder that is gone."""
        while not _create(path, json.dumps(asdict(self._me))):
            other = _read(path)
            if other is None:  # released in the meantime
                continue
            here = other.token and other.process.is_on_this_host
            if other.process.is_running if here else age_s(path) <= self.STALE_S:
                gone = "" if here else "; if it no longer exists, remove this file"
                raise FolderInUse(
                    f"{path.parent} is in use by {other}; repeat the command when it has ended, or "
                    f"use --force to execute all runs in both submissions; it holds {path}{gone}"
                )
            # Only the holder of this second lock may remove a file with this token. So of two
            # processes that find the same file, none removes that of the other one.
            permit = path.with_name(f"{path.name}.{other.token}")
            self._acquire(permit)
            try:
                if _read(path) == other:
                    path.unlink()
            except PermissionError:  # the sticky bit
                left = f"{path} was left by {other}, which has ended"
                raise FolderInUse(f"{left}; only the owner of the file can remove it") from None
            finally:
                permit.unlink(missing_ok=True)

    def _beat(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the main thread
        while not self._over.wait(BEAT_S):
            with suppress(OSError):
                if _read(self._path) != self._me:
                    return
                os.utime(self._path)

    def _remove_folder(self) -> None:
        if self._created:
            with suppress(OSError):  # not empty
                self._path.parent.rmdir()


def _create(path: Path, text: str) -> bool:
    """Create a lock file with its content at once. Return False if it exists."""
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.urandom(4).hex()}")
    try:
        while True:
            draft.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has removed the empty folder
                draft.write_text(text, encoding="utf-8")
                break
        try:
            os.link(draft, path)
        except FileExistsError:
            # If the answer of an NFS server is lost, the request is repeated and fails.
            return draft.stat().st_nlink == 2
        except OSError:  # the file system has no hard links
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> _Holder | None:
    """Return the holder of a lock, or None if the lock file does not exist."""
    try:
        return _HOLDER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return _UNKNOWN if path.is_symlink() else None  # a link without a target
    except ValidationError:  # half written, or from elsewhere
        return _UNKNOWN
