"""Lock of a results folder while a submission is planned and its jobs are submitted.

Two submissions that plan at the same time would both submit the same runs. The lock is held from
the moment at which the records and the queue are read until the ids of all jobs are saved. A later
submission then sees these jobs as queued.

The lock is the file submit.lock in the results folder. It is created exclusively with a hard link,
which is atomic on network file systems, too. It names its holder. The lock is taken over if the
holder is gone: if its process has ended (on the same host), or if it has not refreshed the file for
STALE_S seconds (on another host).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from jobs.launch.folder_lock import FolderInUse
from jobs.processes import ProcessHandle, command_line

LOCK = "submit.lock"
STALE_S = 600.0  # age at which a lock that another host holds is taken over, in seconds


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


class SubmissionLock:
    """Lock of a results folder. Use it in a `with` statement, which releases it at the end.

    With `force`, the lock is taken if it is free. If another process holds it, this object has no
    effect.

    Args:
        folder: results folder; created if it does not exist, and removed again if it is empty when
            the lock is released.

    Raises:
        FolderInUse: if another process holds the lock and `force` is False.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path, force: bool = False):
        self._path = folder / LOCK
        self._force = force
        self._created = self._held = False
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = ProcessHandle.of_this_process()
        self._me = _Holder(os.urandom(4).hex(), me, since, command_line())

    def __enter__(self) -> Self:
        self._created = not self._path.parent.exists()
        try:
            other = _acquire(self._path, self._me)
        except OSError:
            self._remove_folder()
            raise
        self._held = other is None
        if other is not None and not self._force:
            raise FolderInUse(_in_use(self._path, other))
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def refresh(self) -> None:
        """Show to other hosts that this process is still submitting."""
        if self._held:
            with suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Release the lock. Do nothing if this object does not hold it."""
        if self._held:
            self._held = False
            with suppress(OSError):
                if _read(self._path) == self._me:
                    self._path.unlink()
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._created:
            with suppress(OSError):  # not empty
                self._path.parent.rmdir()


def _in_use(path: Path, holder: _Holder) -> str:
    remove = ""
    if not holder.token or not holder.process.is_on_this_host:
        remove = f" (if it no longer exists, remove {path}, which is ignored after 10 minutes)"
    return (
        f"{path.parent} is in use by {holder}; this process is submitting jobs and holds "
        f"{path}; repeat the command when it has ended{remove}, or use --force to execute all "
        "runs in both submissions"
    )


def _acquire(path: Path, me: _Holder) -> _Holder | None:
    """Create a lock file, or take it over if its holder is gone.

    Only the process that holds the lock `<path>.<token>` may replace the lock file with this token.
    Two processes that find the same lock without a living holder therefore cannot both take it
    over. The second lock is acquired in the same way, in case a process ends while it holds it.

    Return None if the lock now belongs to `me`, else its holder.
    """
    while True:
        with _Draft(path, me) as draft:
            if draft.publish():
                return None
            other = _read(path)
            if other is None:  # released in the meantime
                continue
            if not _is_gone(path, other, draft.path):
                return other
            permit = path.with_name(f"{path.name}.{other.token}")
            competitor = _acquire(permit, me)
            if competitor is not None:
                return competitor
            try:
                if _read(path) == other:
                    draft.path.replace(path)
                    return None
            except PermissionError:  # the sticky bit: only the owner of the file may remove it
                return other
            finally:
                permit.unlink(missing_ok=True)


class _Draft:
    """A complete lock file under a temporary name, in the folder of the lock."""

    def __init__(self, target: Path, me: _Holder):
        self._target = target
        name = f".{target.name}.{me.process.host}.{os.getpid()}.{os.urandom(4).hex()}"
        self.path = target.with_name(name)
        self._text = json.dumps(asdict(me))

    def __enter__(self) -> Self:
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self.path.open("w", encoding="utf-8") as file:
                    file.write(self._text)
                    file.flush()
                    os.fsync(file.fileno())
                return self
            except FileNotFoundError:  # another process has removed the folder, which was empty
                continue
            except OSError:  # e.g. a full disk
                self.path.unlink(missing_ok=True)
                raise

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    def publish(self) -> bool:
        """Create the lock file. Returns whether it did not exist before."""
        try:
            os.link(self.path, self._target)
            return True
        except FileExistsError:
            # If the answer of an NFS server is lost, the request is repeated and fails.
            return self.path.stat().st_nlink == 2
        except OSError:  # the file system has no hard links
            try:
                with self._target.open("x", encoding="utf-8") as file:
                    file.write(self._text)
                return True
            except FileExistsError:
                return False


def _read(path: Path) -> _Holder | None:
    """Return the holder of a lock, or None if the lock file does not exist."""
    unknown = _Holder("", ProcessHandle(0, None, ""), "", "")
    try:
        return _HOLDER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return unknown if path.is_symlink() else None  # a link without a target
    except ValidationError:  # half written, or from elsewhere
        return unknown


def _is_gone(path: Path, holder: _Holder, fresh: Path) -> bool:
    """Return whether the holder of a lock no longer exists.

    `fresh` is a file that was just written to the same file system, whose clock is compared.
    """
    if holder.token and holder.process.is_on_this_host:
        return not holder.process.is_running
    try:
        return fresh.stat().st_mtime - path.stat().st_mtime > STALE_S
    except FileNotFoundError:
        return False  # released in the meantime; the caller reports its last holder
