"""Bad input ends with exit code 2 and a short message that names what is wrong."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.cli.application import load as load_command
from jobs.errors import InputError
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.jobs.bad_input import command_lines, folders, sweep_files
from tests.jobs.bad_input.case import HEAD, ONE, Case
from tests.jobs.harness import ROOT, call, shell
from tests.jobs.results_folder import errors, load, write

CASES = [*sweep_files.CASES, *command_lines.CASES, *folders.CASES]
MAX_LINES = 40
ANY = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


def check_short(output: str) -> None:
    lines = output.splitlines()
    assert lines and "Traceback" not in output
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= 2500, output


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:40])
def test_each_kind_of_error(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = call(*case.words, environment=case.environment)
    assert done.returncode == 2, (case, done.stdout)
    assert case.message in done.stdout, (case, done.stdout)
    check_short(done.stdout)


@pytest.mark.parametrize("line", sweep_files.REFUSED)
def test_values_that_a_key_must_not_have(tmp_path: Path, line: str) -> None:
    head = [x for x in (HEAD + ONE).splitlines() if x.partition(":")[0] != line.partition(":")[0]]
    *_, key = re.findall(r"(\w+): (?=#)", line)
    for value in sweep_files.REFUSED[line]:
        text = "\n".join([line.replace("#", value), *head, ""])
        found = [x for x in errors(write(tmp_path, text)) if x.startswith("sweep.yaml:1:")]
        assert any(key in x for x in found), (text, found)


@pytest.mark.slow
def test_a_pipe_is_a_sweep_file() -> None:
    printed = shell(f"{sys.executable} -m jobs.submit <(echo name: a) --local", exit_code=2)
    assert ": benchmark is required" in printed


# ---- any input -----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["name", "benchmark", "fixed", "grid", "zip", "cases", "exclude", "tables", "resources",
     "size", "mode", "fast", "tests.benchmarks.toy", "attention", "$size", "filter", "base",
     "size > 1", ": ", ": ", "\n", "\n  ", "\n- ", "[", "]", "{", "}", ", ", "1", "-1", "1e-4",
     "null", "true", "on", "'", "&a ", "*a", "repeats", "order", "shuffle", "where", "baseline"]
)  # fmt: skip
OWN = [path.read_text() for path in sorted((ROOT / "sweeps").glob("*.yaml"))]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Draw one of the project's sweeps with a few random edits."""
    text = draw(st.sampled_from(OWN))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 8)) :]
    return text


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A current folder with a sweep and the results folders `out` and `other`."""
    folder = tmp_path_factory.mktemp("any")
    folders.results(folder / "out")
    folders.other(folder / "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@settings(ANY, max_examples=300)
@given(
    st.one_of(
        damaged(),
        st.lists(PIECES, max_size=40).map("".join),
        st.lists(PIECES, max_size=25).map(lambda pieces: HEAD + "".join(pieces)),
        st.text(max_size=80),
    ),
    st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), max_size=2),
    st.one_of(st.none(), st.lists(PIECES, max_size=5).map(" ".join)),
)
def test_any_sweep_file_is_read_or_refused(
    here: Path, text: str, overrides: list[str], filter: str | None
) -> None:
    path = here / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        expand(load_sweep(path, overrides, filter))
    except InputError as error:
        check_short(str(error))


# Commands that only show something
SHOWING = {
    name: load_command(name)
    for name in ("status", "logs", "hours", "tables", "attempts", "export", "compare")
}
WORDS = st.sampled_from(
    ["out", "other", "no", "", "0", "-1", "nan", "a\0", "a\udcff", "size", "size > 1", "sise > 1",
     "status == ok", "md", "csv", "toy", "a.csv", "sweep.yaml", "x" * 300]
)  # fmt: skip


@st.composite
def command_line(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(list(SHOWING)))
    endless = ("--watch", "--help")
    options = [x for p in SHOWING[name].params for x in p.opts if x[0] == "-"]
    option = st.sampled_from([x for x in options if x not in endless] or ["--in"])
    return ["jobs", name, *draw(st.lists(st.one_of(WORDS, WORDS, option), max_size=5))]


@ANY
@given(command_line())
def test_any_command_line_is_answered_or_refused(here: Path, words: list[str]) -> None:
    done = call(*words)
    assert done.returncode in (0, 1, 2, 3), done.stdout
    if done.returncode == 2:
        check_short(done.stdout)


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value in nested mappings and lists."""
    yield place
    if isinstance(data, list):
        data = dict(enumerate(data))
    for key, value in data.items() if isinstance(data, dict) else ():
        yield from places(value, (*place, key))


@ANY
@given(data=st.data())
def test_any_manifest_is_read_or_refused(here: Path, data: st.DataObject) -> None:
    (path,) = here.glob("out/submissions/*/manifest.json")
    text = path.read_text()
    manifest = json.loads(text)
    *above, key = data.draw(st.sampled_from([place for place in places(manifest) if place]))
    owner = manifest
    for name in above:
        owner = owner[name]
    owner[key] = data.draw(st.sampled_from([None, True, -1, 1e300, "", "a\0", [], [1], {}]))
    try:
        path.write_text(json.dumps(manifest))
        done = call("jobs", "status", "out")
    finally:
        path.write_text(text)
    assert done.returncode in (0, 1, 2), done.stdout
    if done.returncode == 2:
        check_short(done.stdout)


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
        expand(load(tmp_path, HEAD + text % ", ".join(values)))
    assert time.process_time() - start < 40  # on a fast processor at most 4, for 30,000
    lines = str(caught.value).splitlines()
    assert len(lines) == 31
    assert lines[-1].startswith("… and at least ")
