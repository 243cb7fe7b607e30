"""Bad input ends with exit code 2 and a short message that names what is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jobs.errors import InputError
from jobs.sweep.expand import expand
from tests.jobs.bad_input import command_lines, folders, sweep_files, views
from tests.jobs.bad_input.case import ONE, Case
from tests.jobs.harness import ROOT, call
from tests.jobs.results_folder import TOY, load

CASES = [*sweep_files.CASES, *views.CASES, *command_lines.CASES, *folders.CASES]
SEED = "BAD_INPUT_SEED"  # environment variable that selects the drawn cases, by default 0
DRAWN = 25
MAX_LINES = 40
SECONDS = 5  # of CPU time, on a fast processor
NUMBERS = "[" + ", ".join(map(str, range(10_000))) + "]"


def takes_long(seconds: float) -> bool:
    """Return whether a check took more than SECONDS, also in relation to the processor.

    On a slow or shared processor, it may take 20 times as long as PyYAML takes for 10,000 numbers.
    The slowest cases, of 100,001 values and of 30,000 unknown keys, take 11 to 13 times as long.
    """
    if seconds < SECONDS:
        return False
    start = time.process_time()
    yaml.compose(NUMBERS, Loader=yaml.SafeLoader)
    return seconds > 20 * (time.process_time() - start)


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command with bad input in a folder, and check how it ends."""
    case.write(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    start = time.process_time()
    done = call(*case.words, environment=case.environment)
    seconds = time.process_time() - start
    assert done.returncode == 2, (case, done.stdout)
    assert case.message in done.stdout, (case, done.stdout)
    assert "Traceback" not in done.stdout
    assert len(done.stdout.splitlines()) <= MAX_LINES, done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 2500, done.stdout
    assert not takes_long(seconds), (case, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:40])
def test_every_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, tmp_path, monkeypatch)


def test_some_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a draw of the cases, always the same, so that no commit passes or fails by chance."""
    seed = int(os.environ.get(SEED, 0))
    for i, case in enumerate(random.Random(seed).sample(CASES, DRAWN)):
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, folder, monkeypatch)


def test_the_cases_differ() -> None:
    assert len({(case.words, str(case.files), str(case.environment)) for case in CASES}) == len(
        CASES
    )
    assert len(CASES) >= 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-m jobs.submit <(echo name: a) --local", "must be a regular file, got a pipe; write"),
        (
            r"-m jobs.submit $'a\xff.yaml' --local",
            "a path must be valid UTF-8, got 'a\\udcff.yaml'",
        ),
        (r"-m jobs.console status $'\xe9'", "a path must be valid UTF-8, got '\\udce9'"),
        (r"-m jobs.submit sweeps/quickstart.yaml --local $'seq_len=\xff'", "seq_len=\\udcff: "),
        ("aggregate.py logs/h200/flash --views /dev/zero", "must be a regular file, got a device"),
    ],
)
def test_a_shell_passes_what_no_test_can_pass_in_its_process(command: str, message: str) -> None:
    """Pipes and bytes that are not UTF-8 are refused in a process started by a shell."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {command}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# Sections with many errors, and a value, in which # stands for a number.
MANY = {
    "labels": ("grid: {size: [1], label: [%s]}", "a b#"),
    "values of a wrong type": ("grid: {size: [1], label: [%s]}", "[]"),
    "conditions": (ONE + "exclude: [%s]", "sise == #"),
    "unknown keys": ("fixed: {size: 1, %s}", "key#: 1"),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("count", [1100, pytest.param(30_000, marks=pytest.mark.exhaustive)])
def test_many_errors_take_seconds(tmp_path: Path, name: str, count: int) -> None:
    """Checks stop after 1,000 errors, and the message shows 30."""
    text, value = MANY[name]
    values = (value.replace("#", str(i)) for i in range(count))
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        expand(load(tmp_path, TOY + text % ", ".join(values)))
    assert not takes_long(time.process_time() - start)
    lines = str(caught.value).splitlines()
    assert len(lines) == 31
    assert lines[-1].startswith("… and at least ")
