"""The command `sweeps`: its commands, its help and its completion in bash."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import aggregate
from jobs import __main__ as commands
from jobs.command_line.invocation import JOBS, REPORTS
from tests.jobs.harness import PATIENCE_S, ROOT

SWEEP = """
name: my
benchmark: own.toy
fixed: {kind: big}
grid: {size: [1, 2]}
resources: {gpus_per_node: 0}
"""
TOY = """
from typing import Literal
from systems.benchmark import BenchmarkParams

PRELOAD = ()

class Params(BenchmarkParams):
    size: int
    kind: Literal["big", "small", "smaller"]

def run(params):
    return {"samples_ms": {"forward": [1.0]}}
"""


def test_the_commands_of_each_module_are_known() -> None:
    for app, names in ((commands.app, JOBS), (aggregate.app, REPORTS)):
        assert list(get_command(app).commands) == list(names)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a benchmark, a sweep and its results, in which `sweeps` is on PATH."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "bin").mkdir()
    script = folder / "bin" / "sweeps"  # as pip writes it
    script.write_text(f"#!{sys.executable}\nfrom jobs.console import main\nmain()\n")
    script.chmod(0o755)
    (folder / "own").mkdir()
    (folder / "own" / "toy.py").write_text(TOY)
    (folder / "studies" / "deep").mkdir(parents=True)
    (folder / "my.yaml").write_text(SWEEP)
    (folder / "studies" / "deep" / "one.yaml").write_text(SWEEP)
    (folder / "studies" / "notes.txt").write_text("no sweep")
    (folder / ".hidden.yaml").write_text(SWEEP)
    done = sweeps(folder, "submit", "my.yaml", "--local")
    assert done.returncode == 0, done.stdout
    assert (folder / "logs" / ".latest.json").exists()
    return folder


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    inherited = {k: v for k, v in os.environ.items() if k != "JOBS_LATEST_NAME"}
    return inherited | {"PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "80"}


def sweeps(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return shell(folder, shlex.join(["sweeps", *arguments]))


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash in a folder. `stdout` of the result also contains stderr."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )


def completion_of_bash(folder: Path) -> Path:
    """Return the file with the completion for bash, which `sweeps` prints. It is made once."""
    file = folder / ".completion.bash"
    if not file.exists():
        file.write_text(shell(folder, "_SWEEPS_COMPLETE=source_bash sweeps").stdout)
    return file


def complete(folder: Path, *words: str) -> list[str]:
    """Return the candidates for the last word of a command line in bash.

    Args:
        folder: the current folder.
        words: the words as bash splits them. It splits them at "=", too.
    """
    given = shlex.join(["sweeps", *words])
    line = (
        f"source {shlex.quote(str(completion_of_bash(folder)))}; "
        f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _sweeps_completion sweeps; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return shell(folder, line).stdout.split()


@pytest.mark.slow
def test_commands_of_all_modules(elsewhere: Path) -> None:
    """`sweeps` has all commands, and their help names commands of `sweeps`."""
    groups = [get_command(app) for app in (commands.app, aggregate.app)]
    names = ["submit", *(name for group in groups for name in group.commands)]  # type: ignore[attr-defined]
    assert {"status", "replay", "tables", "compare"} < set(names)
    shown = sweeps(elsewhere, "--help").stdout
    assert all(f"\n  {name} " in shown for name in names)
    for name in names:
        done = sweeps(elsewhere, name, "--help")
        assert done.returncode == 0 and f"Usage: sweeps {name}" in done.stdout
        assert "python" not in done.stdout.partition("Example")[2]


@pytest.mark.slow
def test_import_of_the_command_is_quick(elsewhere: Path) -> None:
    """Neither help nor completion imports what only the commands themselves need."""
    code = "import sys; sys.argv[:1] = ['sweeps']; import jobs.console; jobs.console.main()"
    for arguments, extra, unwanted in (
        (["--help"], {}, {"torch", "pandas", "matplotlib"}),
        ([], {"COMP_WORDS": "sweeps\nsubmit\nmy", "COMP_CWORD": "2"}, {"torch", "numpy"}),
    ):
        extra = extra and extra | {"_SWEEPS_COMPLETE": "complete_bash"}
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code, *arguments],
            cwd=elsewhere,
            env=environment(elsewhere) | extra,
            capture_output=True,
            text=True,
        )
        assert "submit" in done.stdout or "my.yaml" in done.stdout, done.stderr
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "jobs.console" in imported and not imported & unwanted


@pytest.mark.slow
def test_completion_of_commands_options_and_files(elsewhere: Path) -> None:
    assert complete(elsewhere, "st") == ["status"]
    assert complete(elsewhere, "co") == ["compare"]
    assert complete(elsewhere, "submit", "--dry") == ["--dry-run"]
    assert complete(elsewhere, "submit", "--cluster", "lo") == ["local"]
    assert complete(elsewhere, "submit", "m") == ["my.yaml"]
    assert complete(elsewhere, "submit", "st") == ["studies/deep/one.yaml"]
    assert complete(elsewhere, "submit", ".h") == [".hidden.yaml"]
    assert complete(elsewhere, "submit", str(elsewhere / "my")) == [str(elsewhere / "my.yaml")]
    assert complete(elsewhere, "submit", "nowhere/") == []
    stock = complete(elsewhere, "submit", "sw")
    assert {"sweeps/flash.yaml", "sweeps/cpu/"} < set(stock)
    assert complete(elsewhere, "tables", "logs/my", "--views", "sweeps/quick") == [
        "sweeps/quickstart.yaml"
    ]


@pytest.mark.slow
def test_completion_of_results(elsewhere: Path) -> None:
    assert complete(elsewhere, "status", "lo") == ["logs/my"]
    assert complete(elsewhere, "compare", "logs/my", "logs/") == ["logs/my"]
    assert complete(elsewhere, "submit", "my.yaml", "--out", "") == ["logs/my"]
    seen = json.loads(sweeps(elsewhere, "status", "--json").stdout)
    ids = sorted(task["run"] for task in seen["tasks"])
    assert complete(elsewhere, "logs", "") == ids
    assert complete(elsewhere, "replay", "--in", "logs/my", ids[0][:6]) == [ids[0]]
    assert complete(elsewhere, "replay", "--in", "nowhere", ids[0][:6]) == []
    assert complete(elsewhere, "status", "--watch", "lo") == ["logs/my"]
    assert "--follow" in complete(elsewhere, "logs", ids[0], "--")
    (elsewhere / "logs" / "h").mkdir()
    (elsewhere / "logs" / "my").rename(elsewhere / "logs" / "h" / "my")
    try:
        assert complete(elsewhere, "status", "lo") == ["logs/h/my"]
        assert complete(elsewhere, "logs", "") == ids
    finally:
        (elsewhere / "logs" / "h" / "my").rename(elsewhere / "logs" / "my")
        (elsewhere / "logs" / "h").rmdir()


@pytest.fixture
def terminal(elsewhere: Path) -> Iterator[int]:
    """A terminal in which bash waits for input, with completion. Ctrl-T prints the input line."""
    ours, its = pty.openpty()
    setup = elsewhere / "bashrc"
    setup.write_text(
        f"source {completion_of_bash(elsewhere)}\n"
        "bind 'set enable-bracketed-paste off'\n"
        """bind -x '"\\C-t": printf "LINE<%s>" "$READLINE_LINE"'\n"""
    )
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(setup), "-i"],
        cwd=elsewhere,
        env=environment(elsewhere) | {"TERM": "dumb", "COLUMNS": "200", "PS1": "", "HISTFILE": ""},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    yield ours
    shell.kill()
    shell.wait()
    os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sub", "sweeps submit "),
        ("submit sweeps/quick", "sweeps submit sweeps/quickstart.yaml "),
    ],
)
def test_tab_key(terminal: int, typed: str, completed: str) -> None:
    """Bash completes a word as the function `complete` says, and adds a space."""
    os.write(terminal, f"sweeps {typed}\t\x14".encode())
    shown = ""
    while "LINE<" not in shown or not shown.partition("LINE<")[2].count(">"):
        shown += os.read(terminal, 1000).decode()
    assert shown.partition("LINE<")[2].partition(">")[0] == completed


@pytest.mark.slow
def test_printed_commands_in_a_checkout(tmp_path: Path) -> None:
    """In the checkout, with `python` from PATH, the commands are those of the documentation."""
    sweep, out = tmp_path / "toy.yaml", tmp_path / "out"
    sweep.write_text("{name: toy, benchmark: tests.benchmarks.toy, fixed: {size: 1}}")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        ["python", "-m", "jobs.submit", str(sweep), "--local", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith(f"\n  python aggregate.py {out}\n"), done.stdout + done.stderr
