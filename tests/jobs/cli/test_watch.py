"""`status --watch`, and `logs` of a running run, while a local submission runs.

test_terminal.py has `--watch` on a terminal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.jobs.harness import PATIENCE_S, Fifo, call, start, write_sweep


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
    fifo = Fifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "chat")
    paths = {"wait": fifo.path, "chat": tmp_path / "chat"}
    cases = [{"what": what, "path": str(path)} for what, path in paths.items()]
    sweep, out = write_sweep(tmp_path, cases), tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting, _ = fifo.pids()
    watching = start("jobs", "status", out, "--watch", "0.5")
    interrupted = start("jobs", "status", "--watch", out)  # without SECONDS, before the folder
    shown = read_until(watching, "what=wait")
    assert shown.count("queued") == 1
    read_until(interrupted, "what=wait")
    interrupted.send_signal(signal.SIGINT)
    rest, _ = interrupted.communicate(timeout=PATIENCE_S)
    assert interrupted.returncode == 130 and "Traceback" not in rest and "Aborted" not in rest
    tasks = json.loads(call("jobs", "status", out, "--json").stdout)["tasks"]
    (chat_id,) = (task["run"] for task in tasks if task["params"]["what"] == "chat")
    assert "tail" not in call("jobs", "logs", chat_id, "--in", out).stdout  # it is queued

    os.kill(waiting, signal.SIGKILL)
    with (tmp_path / "chat").open("w") as chat:  # opens when the second run executes
        print("first", file=chat, flush=True)
        assert "killed" in read_until(watching, "what=chat")
        (log,) = out.glob(f"submissions/*/jobs/0/{chat_id}-0-1.log")
        other = log.with_suffix(".node1.log")
        other.write_text("said by another node\n")
        running = call("jobs", "logs", chat_id, "--in", out).stdout
        assert f"# running; to follow its output: tail -F {log} {other}\n" in running
        print("fail", file=chat, flush=True)
    rest, _ = watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode == 1 and "told to fail" in rest and "running" not in rest
    assert rest.count("submission") == len(rest.split(f"{out}: ")) - 1  # only changes are printed
    assert queue.wait(PATIENCE_S) == 1
    ended = call("jobs", "logs", chat_id, "--in", out).stdout
    assert "-> error\n# ValueError: told to fail\n" in ended and ended.count("Traceback") == 1
    assert "said first\n" in ended and "said fail\n" in ended and "tail" not in ended
