"""Broken manifests and benchmarks give a one-line error with the position, not a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import ROOT, call, run, write_submission, write_sweep

# ---- a manifest ----------------------------------------------------------------------------------


def spoil(path: Path, **changes: Any) -> None:
    """Change keys of a manifest. None removes a key."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    submission = write_submission(write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out")
    return submission.path / "manifest.json"


def test_a_broken_manifest_is_named_with_what_is_wrong(manifest: Path) -> None:
    out, whole = manifest.parents[2], manifest.read_text()

    def torn() -> None:
        manifest.write_text(whole[: len(whole) // 2])

    broken: list[tuple[Any, str]] = [
        (torn, "manifest.json cannot be read: "),
        (lambda: manifest.write_text("[]"), "not a manifest that this version can read"),
        (lambda: spoil(manifest, jobs=None), "that this version can read: the key 'jobs' is m"),
        (lambda: spoil(manifest, sweep={"name": "a", "later": 1}), "sweep."),
        (lambda: (manifest.parent / "handles.json").write_text("{"), "handles.json cannot be read"),
    ]
    for spoiled, words in broken:
        manifest.write_text(whole)
        spoiled()
        done = call("jobs", "status", out)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
        assert str(manifest.parent) in done.stdout and words in done.stdout
    for command in (["aggregate", out], ["jobs", "logs", "0", "--in", out], ["jobs", "retry", out]):
        done = call(*command)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
    assert run("jobs", "status", out).stdout == call("jobs", "status", out).stdout
    again = call("jobs.submit", out.parent / "sweep.yaml", "--local", "--out", out)
    assert again.returncode == 2 and again.stdout.count("\n") == 1, again.stdout


# ---- a benchmark ---------------------------------------------------------------------------------


def beside(folder: Path) -> dict[str, str]:
    """Return environment variables with which the modules of a folder can be imported."""
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'", 1),
        ("x = 1\ndef run(:\n", "SyntaxError: invalid syntax", 2),
        ("import os\nos.environ['NO_SUCH_NAME']\n", "KeyError: 'NO_SUCH_NAME'", 2),
        ("x = 1\n\n1 / 0\n", "ZeroDivisionError: division by zero", 3),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
    ],
)
def test_a_benchmark_that_cannot_be_imported_is_an_error_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cause: str, line: int
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd").mkdir()
    module = tmp_path / "odd" / "needy.py"
    module.write_text(text)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("name: a\nbenchmark: odd.needy\n")
    done = call("jobs.submit", sweep, "--dry-run")
    assert done.returncode == 2
    why = f"benchmark 'odd.needy' cannot be imported: {cause} ({module}:{line})"
    assert done.stdout == f"{sweep}:2:12: {why}\n"


def test_a_retry_whose_benchmark_no_longer_imports_says_so(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    module = tmp_path / "odd" / "fading.py"
    toy = (ROOT / "tests" / "benchmarks" / "toy.py").read_text()
    module.write_text(toy.replace('"samples_ms"', "no_such_name"))
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("name: a\nbenchmark: odd.fading\nfixed: {size: 1}\n")
    environment = beside(tmp_path)
    out = tmp_path / "out"
    assert (
        run("jobs.submit", sweep, "--local", "--out", out, environment=environment).returncode == 1
    )
    module.write_text("1 / 0\n")
    (record,) = (out / "records").glob("*.jsonl")
    identity = json.loads(record.read_text())["run"]
    for command in (["retry", out], ["replay", identity, "--in", out]):
        done = run("jobs", *command, environment=environment)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
        assert "'odd.fading' cannot be imported: ZeroDivisionError" in done.stdout
