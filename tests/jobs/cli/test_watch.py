"""`status --watch` and `logs --follow` while a local submission runs.

test_terminal.py has `--watch` on a terminal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import PATIENCE_S, Fifo, call, start, write_sweep


def sweep_of(folder: Path, *cases: dict[str, Any]) -> tuple[Path, Fifo]:
    """Write a sweep whose first run waits, and return it with the FIFO of this run."""
    fifo = Fifo(folder / "fifo")
    return write_sweep(folder, [{"what": "wait", "path": str(fifo.path)}, *cases]), fifo


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the output of a process up to the first line that contains `words`."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"{words!r} is not in the output: {text}")


@pytest.mark.slow
def test_watch_prints_changes_until_nothing_is_live(tmp_path: Path) -> None:
    sweep, fifo = sweep_of(tmp_path, {"what": "chat", "path": str(tmp_path / "chat")})
    os.mkfifo(tmp_path / "chat")
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting, _ = fifo.pids()
    watching = start("jobs", "status", out, "--watch", "0.5")
    following = start("jobs", "logs", run_id(out, "chat"), "--in", out, "--follow")
    interrupted = [
        start("jobs", "status", "--watch", out),  # without SECONDS, before the folder
        start("jobs", "logs", run_id(out, "wait"), "--in", out, "--follow"),
    ]
    shown = read_until(watching, "what=wait")
    assert shown.count("queued") == 1
    assert "waiting for earlier runs of its job" in read_until(following, "# queued: ")
    for process, words in zip(interrupted, ("what=wait", "-> running"), strict=True):
        read_until(process, words)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130 and "Traceback" not in rest and "Aborted" not in rest

    os.kill(waiting, signal.SIGKILL)
    with (tmp_path / "chat").open("w") as chat:  # opens when the second run executes
        print("first", file=chat, flush=True)
        assert "/jobs/0/" in read_until(following, "said first")
        assert "killed" in read_until(watching, "what=chat")
        (log,) = out.glob(f"submissions/*/jobs/0/{run_id(out, 'chat')}-0-1.log")
        log.with_suffix(".node1.log").write_text("said by another node\n")
        assert ".node1.log" in read_until(following, "said by another node")
        print("fail", file=chat, flush=True)
    rest, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 0
    assert "said fail\n" in rest and "said first" not in rest
    assert "-> error\n# ValueError: told to fail\n" in rest and rest.count("Traceback") == 1
    rest, _ = watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode == 1 and "told to fail" in rest and "running" not in rest
    assert rest.count("submission") == len(rest.split(f"{out}: ")) - 1  # only changes are printed
    assert queue.wait(PATIENCE_S) == 1
    assert "said fail" in call("jobs", "logs", run_id(out, "chat"), "--in", out, "-f").stdout


@pytest.mark.exhaustive
def test_follow_goes_on_after_a_moment_in_which_the_folder_cannot_be_read(tmp_path: Path) -> None:
    sweep, fifo = sweep_of(tmp_path)
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting, _ = fifo.pids()
    following = start("jobs", "logs", run_id(out, "wait"), "--in", out, "--follow")
    read_until(following, "-> running")
    (out / "records").touch()  # the run has no record yet
    note = read_until(following, "records cannot be read: ")
    assert note.endswith(": Not a directory; trying again\n")
    (out / "records").unlink()
    os.kill(waiting, signal.SIGKILL)
    rest, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 0 and "-> killed\n" in rest, rest
    assert queue.wait(PATIENCE_S) == 1


def run_id(out: Path, what: str) -> str:
    tasks = json.loads(call("jobs", "status", out, "--json").stdout)["tasks"]
    return next(str(task["run"]) for task in tasks if task["params"]["what"] == what)
