"""The application: its commands, entry points, help, and its completion in bash."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs import console
from jobs.cli.application import COMMANDS, app
from jobs.cli.application import load as load_command
from jobs.sweep.load import load_sweep
from tests.jobs.harness import call, run
from tests.jobs.results_folder import GRID, TOY, ResultsFolder, ok


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with sweeps and the results of one."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "studies/deep/one.yaml", "studies/notes.txt", ".hidden.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TOY + GRID)
    loaded = load_sweep(tmp_path / "my.yaml")
    ResultsFolder(tmp_path / "logs" / "my").submit(loaded, ok(1.0))
    return tmp_path


def sweeps(*arguments: str, **environment: str) -> str:
    """Return the output of `sweeps ARGUMENTS`."""
    done = CliRunner().invoke(app, arguments, env=environment, prog_name="sweeps")
    assert done.exit_code == 0, done.output
    return done.output


def complete(*words: str) -> list[str]:
    """Return the candidates for the last word of a command line in bash."""
    given = {"COMP_WORDS": shlex.join(["sweeps", *words]), "COMP_CWORD": str(len(words))}
    return sweeps(_SWEEPS_COMPLETE="complete_bash", **given).strip().splitlines()


def test_every_command_has_help_and_examples_that_begin_as_the_user_called_it() -> None:
    shown = sweeps("--help")
    for name, summary in COMMANDS.items():
        assert f"\n  {name} " in shown
        command = load_command(name)
        assert str(command.help).startswith(summary)
        shown_of_it = sweeps(name, "--help")
        assert f"Usage: sweeps {name}" in shown_of_it and f"\n  sweeps {name} " in shown_of_it


@pytest.mark.parametrize(
    ("door", "words", "usage"),
    [
        ("jobs.submit", "--help", "Usage: python -m jobs.submit [OPTIONS] {SWEEP}"),
        ("jobs", "submit --help", "Usage: python -m jobs submit "),
        ("aggregate", "cancel --help", "Usage: python aggregate.py cancel "),
        ("jobs.console", "compare --help", "Usage: sweeps compare "),
    ],
)
def test_every_door_leads_to_every_command(door: str, words: str, usage: str) -> None:
    assert usage in run(door, *words.split()).stdout


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


def test_completion_of_commands_options_and_files(elsewhere: Path) -> None:
    assert complete("st") == ["status"]
    assert complete("co") == ["compare"]
    assert complete("submit", "--dry") == ["--dry-run"]
    assert complete("submit", "--cluster", "lo") == ["local"]
    assert complete("submit", "m") == ["my.yaml"]
    assert complete("submit", "studies/deep/") == ["studies/deep/one.yaml"]
    assert complete("submit", ".h") == [".hidden.yaml"]
    assert complete("submit", str(elsewhere / "my")) == [str(elsewhere / "my.yaml")]
    assert complete("submit", "nowhere/") == []
    stock = complete("submit", "sw")
    assert {"sweeps/flash.yaml", "sweeps/cpu/flash.yaml"} < set(stock)
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
    assert "--in" in complete("logs", ids[0], "--")
