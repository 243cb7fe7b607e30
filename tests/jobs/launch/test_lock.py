"""The locks of a results folder, held by real processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jobs.launch import lock as lock_module
from jobs.launch.lock import FolderInUse, QueueLock, SubmitLock
from tests.jobs.harness import ROOT, await_true, call, records, write_sweep

LOCK = SubmitLock.NAME

# Takes the lock when stdin has a line, reports whether it got it, and keeps it until stdin ends.
TAKE = """
import sys
from pathlib import Path
from jobs.launch.lock import FolderInUse, SubmitLock
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = SubmitLock(Path(sys.argv[1])).__enter__()
except FolderInUse as error:
    print(f"refused {error}", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
    lock.release()
"""


def start_taker(folder: Path) -> subprocess.Popen[str]:
    """Start a process that is ready to take the lock."""
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert line(taker) == "ready\n"
    return taker


def line(taker: subprocess.Popen[str]) -> str:
    assert taker.stdout is not None
    return taker.stdout.readline()


def take(*takers: subprocess.Popen[str]) -> list[str]:
    """Let processes take the lock at the same time, and return what each of them reports."""
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("\n")
        taker.stdin.flush()
    return [line(taker) for taker in takers]


def change(lock: Path, age_s: float = 0.0, **process: Any) -> None:
    """Change the holder of a lock, and the age of the file."""
    data = json.loads(lock.read_text())
    data["process"] |= process
    lock.write_text(json.dumps(data))
    then = lock.stat().st_mtime - age_s
    os.utime(lock, (then, then))


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(50, marks=pytest.mark.exhaustive)], ids=["once", "often"]
)
def test_one_of_many_takes_over_the_lock_of_a_killed_process(tmp_path: Path, rounds: int) -> None:
    for number in range(rounds):
        folder = tmp_path / str(number)
        killed = start_taker(folder)
        assert take(killed) == ["taken\n"]
        killed.kill()
        killed.communicate()
        assert (folder / LOCK).exists()
        takers = [start_taker(folder) for _ in range(4)]
        answers = take(*takers)
        assert sorted(answer.split()[0] for answer in answers) == ["refused"] * 3 + ["taken"]
        assert [path.name for path in folder.iterdir()] == [LOCK]
        for taker in takers:
            taker.communicate()
        assert list(folder.iterdir()) == []


def test_takeover_by_a_process_that_is_killed_itself(tmp_path: Path) -> None:
    """The file that permits a takeover may be left behind, too."""
    dead = start_taker(tmp_path)
    take(dead)
    dead.kill()
    dead.communicate()
    token = json.loads((tmp_path / LOCK).read_text())["token"]
    (tmp_path / f"{LOCK}.{token}").write_text((tmp_path / LOCK).read_text().replace(token, "0" * 8))
    with SubmitLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_lock_of_another_host(tmp_path: Path) -> None:
    """It is valid until its holder has not updated it for a while."""
    lock = SubmitLock(tmp_path).__enter__()
    path = tmp_path / LOCK
    change(path, SubmitLock.STALE_S - 60, host="elsewhere")
    with pytest.raises(FolderInUse, match=rf"on elsewhere since .* --force .*{path}"):
        SubmitLock(tmp_path).__enter__()
    with SubmitLock(tmp_path, force=True):
        pass
    assert path.exists()  # a forced submission leaves the lock to its holder
    change(path, SubmitLock.STALE_S + 60)
    with SubmitLock(tmp_path):
        lock.release()  # no longer owns the file
        assert path.exists()
    assert not path.exists()


def test_the_holder_updates_its_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.01)
    path = tmp_path / QueueLock.NAME

    def is_old() -> bool:
        return path.stat().st_mtime == 0

    with QueueLock(tmp_path):
        os.utime(path, (0, 0))
        await_true(lambda: not is_old(), "the holder updated its file")
        path.write_text("taken over by another host")
        os.utime(path, (0, 0))
        for thread in threading.enumerate():
            if thread.name == QueueLock.NAME:
                thread.join()
        assert is_old()
    assert path.exists()


def test_a_file_of_another_user_in_a_folder_with_the_sticky_bit(folder_of_all: Path) -> None:
    """Only its owner and that of the folder can remove it. This process becomes another user."""
    out = folder_of_all / "out"
    out.mkdir()
    out.chmod(0o1777)
    dead = start_taker(out)
    take(dead)
    dead.kill()
    dead.communicate()
    os.seteuid(65534)
    try:
        with pytest.raises(FolderInUse, match="only the owner of the file can remove it"):
            SubmitLock(out).__enter__()
        with SubmitLock(out, force=True):
            pass
    finally:
        os.seteuid(0)
    assert [path.name for path in out.iterdir()] == [LOCK]


def test_a_command_with_bytes_that_are_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "\udcff"])
    with SubmitLock(tmp_path), pytest.raises(FolderInUse, match=r": python .*\\udcff"):
        SubmitLock(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


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
    """An unreadable lock file counts as that of another host, and so does a dangling link."""
    other = {"pid": 1, "started": 1, "host": os.uname().nodename}
    odd = json.dumps({"token": "../x", "process": other, "since": "", "command": ""})
    for text in ("half", odd, None):
        (tmp_path / LOCK).unlink(missing_ok=True)
        if text is None:
            (tmp_path / LOCK).symlink_to("nowhere")
        else:
            (tmp_path / LOCK).write_text(text)
        with pytest.raises(FolderInUse, match="unknown process"):
            SubmitLock(tmp_path).__enter__()
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).write_text("half")
    os.utime(tmp_path / LOCK, (0, 0))
    SubmitLock(tmp_path).__enter__().release()
    assert list(tmp_path.iterdir()) == []


def test_local_submission_is_refused_while_another_process_submits(tmp_path: Path) -> None:
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    holder = start_taker(out)
    assert take(holder) == ["taken\n"]
    refused = call("jobs.submit", sweep, "--local", "--out", out)
    assert refused.returncode == 2 and f"is in use by process {holder.pid}" in refused.stdout
    planned = call("jobs.submit", sweep, "--local", "--out", out, "--dry-run")
    assert planned.returncode == 0, planned.stdout
    assert [path.name for path in out.iterdir()] == [LOCK]
    holder.kill()
    holder.communicate()
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 0
    assert not (out / LOCK).exists()
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 0 and "nothing to submit" in again.stdout
    assert len(list((out / "submissions").iterdir())) == len(records(out)) == 1
