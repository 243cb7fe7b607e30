"""The command `sweeps`: its commands, its help and its completion in bash."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import aggregate
from jobs import __main__ as commands
from jobs import console
from jobs.command_line.invocation import JOBS, REPORTS
from jobs.sweep.load import load_sweep
from tests.jobs.harness import ROOT, call
from tests.jobs.results_folder import GRID, TOY, ResultsFolder, ok


def test_the_commands_of_each_module_are_known() -> None:
    for app, names in ((commands.app, JOBS), (aggregate.app, REPORTS)):
        assert list(get_command(app).commands) == list(names)  # type: ignore[attr-defined]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with sweeps and the results of one."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "studies/deep/one.yaml", "studies/notes.txt", ".hidden.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TOY + GRID)
    loaded = load_sweep(tmp_path / "my.yaml")
    ResultsFolder(tmp_path / "logs" / "my").submit(loaded, lambda *_: ok(1.0))
    return tmp_path


def sweeps(*arguments: str, **environment: str) -> str:
    """Return the output of `sweeps ARGUMENTS`."""
    done = CliRunner().invoke(console.app, arguments, env=environment, prog_name="sweeps")
    assert done.exit_code == 0, done.output
    return done.output


def complete(*words: str) -> list[str]:
    """Return the candidates for the last word of a command line in bash."""
    given = {"COMP_WORDS": shlex.join(["sweeps", *words]), "COMP_CWORD": str(len(words))}
    return sweeps(_SWEEPS_COMPLETE="complete_bash", **given).strip().splitlines()


def test_commands_of_all_modules() -> None:
    """`sweeps` has all commands, and their help names commands of `sweeps`."""
    groups = [get_command(app) for app in (commands.app, aggregate.app)]
    names = ["submit", *(name for group in groups for name in group.commands)]  # type: ignore[attr-defined]
    assert {"status", "replay", "tables", "compare"} < set(names)
    shown = sweeps("--help")
    assert all(f"\n  {name} " in shown for name in names)
    for name in names:
        shown = sweeps(name, "--help")
        assert f"Usage: sweeps {name}" in shown
        assert "python" not in shown.partition("Example")[2]


def test_a_package_of_the_user_that_hides_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["sweeps", "--help"])
    Path("jobs").mkdir()  # a folder without modules hides nothing
    Path("systems.py").touch()
    with pytest.raises(SystemExit) as stopped:
        console.main()
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "/systems.py hides a package of" in told


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
            env=os.environ | {"PYTHONPATH": str(ROOT)} | extra,
            capture_output=True,
            text=True,
        )
        assert "submit" in done.stdout or "my.yaml" in done.stdout, done.stderr
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "jobs.console" in imported and not imported & unwanted


def test_completion_of_commands_options_and_files(elsewhere: Path) -> None:
    assert complete("st") == ["status"]
    assert complete("co") == ["compare"]
    assert complete("submit", "--dry") == ["--dry-run"]
    assert complete("submit", "--cluster", "lo") == ["local"]
    assert complete("submit", "m") == ["my.yaml"]
    assert complete("submit", "st") == ["studies/deep/one.yaml"]
    assert complete("submit", ".h") == [".hidden.yaml"]
    assert complete("submit", str(elsewhere / "my")) == [str(elsewhere / "my.yaml")]
    assert complete("submit", "nowhere/") == []
    stock = complete("submit", "sw")
    assert {"sweeps/flash.yaml", "sweeps/cpu/"} < set(stock)
    assert complete("tables", "logs/my", "--views", "sweeps/quick") == ["sweeps/quickstart.yaml"]


def test_completion_of_results(elsewhere: Path) -> None:
    assert complete("status", "lo") == ["logs/my"]
    assert complete("compare", "logs/my", "logs/") == ["logs/my"]
    assert complete("submit", "my.yaml", "--out", "") == ["logs/my"]
    seen = json.loads(call("jobs", "status", "logs/my", "--json").stdout)
    ids = sorted(task["run"] for task in seen["tasks"])
    assert complete("logs", "") == ids
    assert complete("replay", "--in", "logs/my", ids[0][:6]) == [ids[0]]
    assert complete("replay", "--in", "nowhere", ids[0][:6]) == []
    assert complete("status", "--watch", "lo") == ["logs/my"]
    assert "--follow" in complete("logs", ids[0], "--")
    (elsewhere / "logs" / "h").mkdir()
    (elsewhere / "logs" / "my").rename(elsewhere / "logs" / "h" / "my")
    try:
        assert complete("status", "lo") == ["logs/h/my"]
        assert complete("logs", "") == ids
    finally:
        (elsewhere / "logs" / "h" / "my").rename(elsewhere / "logs" / "my")
        (elsewhere / "logs" / "h").rmdir()


@pytest.mark.slow
def test_tab_key(elsewhere: Path) -> None:
    """Bash completes a word as the function `complete` says, and adds a space."""
    script = elsewhere / "bin" / "sweeps"
    script.parent.mkdir()
    start = "from jobs.console import main; main()"
    script.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{start}' \"$@\"\n")
    script.chmod(0o755)
    setup = elsewhere / "bashrc"  # Ctrl-T prints the input line
    setup.write_text(
        sweeps(_SWEEPS_COMPLETE="source_bash") + "bind 'set enable-bracketed-paste off'\n"
        """bind -x '"\\C-t": printf "LINE<%s>" "$READLINE_LINE"'\n"""
    )
    path = os.pathsep.join([str(script.parent), os.environ.get("PATH", os.defpath)])
    given = {"PYTHONPATH": str(ROOT), "PATH": path, "TERM": "dumb", "PS1": "", "HISTFILE": ""}
    ours, its = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(setup), "-i"],
        env=os.environ | given | {"COLUMNS": "200"},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    try:
        os.write(ours, b"sweeps submit sweeps/quick\t\x14")
        shown = ""
        while "LINE<" not in shown or not shown.partition("LINE<")[2].count(">"):
            shown += os.read(ours, 1000).decode()
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    line = shown.partition("LINE<")[2].partition(">")[0]
    assert line == "sweeps submit sweeps/quickstart.yaml "


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
