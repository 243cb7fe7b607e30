"""The lock of a results folder, held by real processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from jobs.launch import lock as lock_module
from jobs.launch.lock import FolderInUse, SubmitLock
from tests.jobs.harness import await_true, grow_old

LOCK = SubmitLock.NAME

FORK = multiprocessing.get_context("fork")


class Takers:
    """Processes that take the lock at the same time. One that gets it keeps it until `end`."""

    def __init__(self, folder: Path, count: int):
        self.start, self.end = FORK.Barrier(count), FORK.Event()
        answers = FORK.SimpleQueue()

        def take() -> None:
            self.start.wait()
            try:
                with SubmitLock(folder):
                    answers.put("taken")
                    self.end.wait()
            except FolderInUse:
                answers.put("refused")

        self.processes = [FORK.Process(target=take, daemon=True) for _ in range(count)]
        for process in self.processes:
            process.start()
        self.answers = sorted(answers.get() for _ in range(count))


def killed_taker(folder: Path) -> None:
    """Let a process take the lock and kill it."""
    takers = Takers(folder, 1)
    assert takers.answers == ["taken"]
    takers.processes[0].kill()
    takers.processes[0].join()
    assert (folder / LOCK).exists()


def test_one_of_many_takes_over_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    killed_taker(tmp_path)
    takers = Takers(tmp_path, 4)
    assert takers.answers == ["refused"] * 3 + ["taken"]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    takers.end.set()
    for process in takers.processes:
        process.join()
    assert list(tmp_path.iterdir()) == []


def test_takeover_by_a_process_that_is_killed_itself(tmp_path: Path) -> None:
    """The file that permits a takeover may be left behind, too."""
    killed_taker(tmp_path)
    token = json.loads((tmp_path / LOCK).read_text())["token"]
    (tmp_path / f"{LOCK}.{token}").write_text((tmp_path / LOCK).read_text().replace(token, "0" * 8))
    with SubmitLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"pids": "of a container"}])
def test_lock_of_another_host(tmp_path: Path, other: dict[str, str]) -> None:
    """It is valid until its holder has not updated it for a while."""
    lock = SubmitLock(tmp_path).__enter__()
    path = tmp_path / LOCK
    held = json.loads(path.read_text())
    held["process"] |= {"pid": 2**22 + 1, **other}  # here, no process has this pid
    path.write_text(json.dumps(held))
    grow_old(path, SubmitLock.STALE_S - 60)
    where = held["process"]["host"]
    with pytest.raises(FolderInUse, match=rf"on {where} since .* --force .*{path}"):
        SubmitLock(tmp_path).__enter__()
    with SubmitLock(tmp_path, force=True):
        pass
    assert path.exists()  # a forced submission leaves the lock to its holder
    grow_old(path, SubmitLock.STALE_S + 60)
    with SubmitLock(tmp_path):
        lock.release()  # no longer owns the file
        assert path.exists()
    assert not path.exists()


def test_the_holder_updates_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.01)
    path = tmp_path / LOCK
    with SubmitLock(tmp_path):
        os.utime(path, (0, 0))
        await_true(lambda: path.stat().st_mtime > 0, "the holder updated its file")


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*paths: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with SubmitLock(tmp_path):
        with pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
            SubmitLock(tmp_path).__enter__()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []


def test_file_that_no_process_wrote(tmp_path: Path) -> None:
    """An unreadable lock file counts as that of another host."""
    other = {"pid": 1, "started": 1, "host": os.uname().nodename}
    odd = json.dumps({"token": "../x", "process": other, "since": "", "command": ""})
    for text in (odd, "half"):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(FolderInUse, match="unknown process"):
            SubmitLock(tmp_path).__enter__()
    os.utime(tmp_path / LOCK, (0, 0))
    SubmitLock(tmp_path).__enter__().release()
    assert list(tmp_path.iterdir()) == []
