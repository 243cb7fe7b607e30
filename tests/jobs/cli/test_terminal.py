"""Output and interrupts of the commands: Ctrl-C, closed pipes, encodings, texts, `--watch`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    Fifo,
    call,
    records,
    run,
    start,
    start_python,
    waiting_sweep,
    write_sweep,
)

CLEAR = "\x1b[H\x1b[2J"
INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


def start_command(
    command: list[str], stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    return start_python(*command, environment=environment, stdout=stdout, stderr=subprocess.PIPE)


def on_terminal(
    command: list[str], react: Callable[[str], int | None] = lambda text: None, width: int = 150
) -> str:
    """Run a command on a terminal with `width` columns and return its output.

    A form feed stands for what clears the terminal. Other escape sequences are left out.

    Args:
        command: the arguments of the interpreter.
        react: function that is called with the output so far, and returns a signal to send to the
            command or None.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    raw, text = b"", ""
    while True:
        assert select.select([ours], [], [], PATIENCE_S)[0], text
        try:
            data = os.read(ours, 100_000)
        except OSError:  # the command has closed the terminal
            break
        raw += data
        shown = raw.decode(errors="replace").replace(CLEAR, "\f")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
        number = react(text)
        if number is not None:
            process.send_signal(number)
            react = lambda text: None  # noqa: E731
    os.close(ours)
    process.wait(PATIENCE_S)
    return text


def closed_pipe() -> int:
    """Return the write end of a pipe whose reader has exited."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with two runs: one is ok, one failed with a message that is hard to show."""
    folder = tmp_path_factory.mktemp("done")
    sweep = write_sweep(folder, [{"what": "ok"}, {"what": "raise_odd_message"}])
    assert run("jobs.submit", sweep, "--local", "--out", folder / "out").returncode == 1
    return folder / "out"


def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPT)
    script = tmp_path / "sweeps"  # as pip writes it
    script.write_text("import sys\nfrom jobs.console import main\nsys.exit(main())\n")
    commands = [
        ["-m", "jobs.submit"], ["-m", "jobs"], ["-m", "jobs.console"], [str(script)],
        ["aggregate.py"],
    ]  # fmt: skip
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    processes = [start_command(command, PYTHONPATH=path) for command in commands]
    for command, process in zip(commands, processes, strict=True):
        printed = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, *printed) == (130, "", ""), command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk_is_full", "code", "said"),
    [(False, 141, ""), (True, 2, "cannot write the output: No space left on device\n")],
)
def test_a_command_ends_if_its_reader_exits_or_the_disk_is_full(
    done: Path, tmp_path: Path, disk_is_full: bool, code: int, said: str
) -> None:
    copy = shutil.copytree(done, tmp_path / "copy")
    commands = [
        ["-m", "jobs", "status", str(done), "--watch"],
        ["-m", "jobs.submit", str(done.parent / "sweep.yaml"), "--dry-run"],
        ["aggregate.py", "export", str(done)],
        ["aggregate.py", "compare", str(done), str(copy), "--all"],
    ]
    output = os.open("/dev/full", os.O_WRONLY) if disk_is_full else closed_pipe()
    processes = [start_command(command, output) for command in commands]
    os.close(output)
    for command, process in zip(commands, processes, strict=True):
        _, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (code, said), command


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "reader"), [("--local", True), ("--debug", False)])
def test_runs_on_this_machine_continue_without_their_reader_or_with_a_full_disk(
    tmp_path: Path, executor: str, reader: bool
) -> None:
    sweep = write_sweep(tmp_path, [{"what": "ok", "tag": tag} for tag in range(3)], runs_per_job=1)
    out = tmp_path / "out"
    output = closed_pipe() if reader else os.open("/dev/full", os.O_WRONLY)
    process = start_command(["-m", "jobs.submit", str(sweep), executor, "--out", str(out)], output)
    os.close(output)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and error.count("\n") == 2, error
    assert "the runs continue" in error and f"jobs status {out}" in error
    assert [record.status for record in records(out)] == ["ok"] * 3


@pytest.mark.slow
def test_any_text_can_be_printed_in_any_encoding(done: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "swé….yaml"
    sweep.write_text((done.parent / "sweep.yaml").read_text().replace("ok}", 'ok, path: "é…"}'))
    commands: list[tuple[int, list[str]]] = [
        (1, ["-m", "jobs", "status", str(done)]),
        (1, ["-m", "jobs.submit", str(sweep), "--local", "--out", f"{tmp_path}/ü…"]),
        (0, ["aggregate.py", str(done)]),
    ]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    started = [(code, start_command(command, **ascii_only)) for code, command in commands]
    for code, process in started:
        output = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code and "Traceback" not in "".join(output), output


def test_a_table_fits_the_terminal(done: Path) -> None:
    lines = on_terminal(["aggregate.py", str(done)], width=20).splitlines()
    assert "- what: ok" in " ".join(lines) and "|" not in "".join(lines), lines


@pytest.mark.slow
def test_texts_of_the_user_are_no_markup(done: Path) -> None:
    """The message of a failure is shown from its first line with text, as it is, on one line."""
    shown = "ValueError: at file.yaml:100:8 [red]not[/red] [/] valid " + "x" * 100
    assert f"{shown}\n" in call("jobs", "status", done).stdout
    (log,) = done.glob("submissions/*/jobs/0/worker.log")
    assert f"{shown}\n" in log.read_text()
    command = [str(done.parent / "sweep.yaml"), "--local", "--force", "--out", str(done)]
    assert f"{shown}\r\n" in on_terminal(["-m", "jobs.submit", *command])


@pytest.mark.slow
def test_the_bar_shows_the_time_left_and_what_is_running(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    pids: list[tuple[int, int]] = []

    def stop_when_shown(text: str) -> int | None:
        pids or pids.append(fifo.pids())
        shown = re.search(r" 1/3 .* left: \S+\s+running: \S+ what=wait", text)
        return signal.SIGINT if shown else None

    command = ["-m", "jobs.submit", str(sweep), "--local", "--out", str(tmp_path / "out")]
    assert "interrupted: " in on_terminal(command, stop_when_shown)


@pytest.mark.slow
def test_watch_redraws_a_terminal(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting = [fifo.pids()[0]]

    def kill_when_drawn_twice(text: str) -> None:
        if waiting and text.count("Ctrl-C ends this") >= 2:
            os.kill(waiting.pop(), signal.SIGKILL)

    shown = on_terminal(["-m", "jobs", "status", str(out), "--watch=0.5"], kill_when_drawn_twice)
    _, first, *_, last = shown.split("\f")
    assert "running" in first and "killed" in last and "Ctrl-C" not in last
    assert queue.wait(PATIENCE_S) == 1


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
    """`logs` tells meanwhile how to follow the output of a running run."""
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
