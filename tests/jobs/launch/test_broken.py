"""Broken manifests and benchmarks give a one-line error with the position, not a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
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


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all installed packages but torch."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name != "torch":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.parametrize("text", ["import torch", "from torch import nn"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_benchmark_that_imports_torch_is_an_error_of_the_sweep(
    tmp_path: Path, no_torch: Path, text: str, installed: bool
) -> None:
    """The error is the same with and without torch, which is not imported."""
    (tmp_path / "odd").mkdir()
    if installed:
        text = f"try:\n    {text}\nexcept ImportError:\n    pass"
    (tmp_path / "odd" / "heavy.py").write_text(text)
    (tmp_path / "odd" / "light.py").write_text("from odd.heavy import x")
    code = "import sys; from jobs.submit import app\n"
    code += "try:\n    app()\nfinally:\n    print('torch' in sys.modules)"
    paths = [str(tmp_path), str(ROOT), *([] if installed else [str(no_torch)])]
    sweep = tmp_path / "sweep.yaml"
    for name, file, line in (("odd.heavy", "heavy", 1 + installed), ("odd.light", "light", 1)):
        sweep.write_text(f"name: a\nbenchmark: {name}\n")
        done = subprocess.run(
            # -S leaves out the installed packages
            [sys.executable, *([] if installed else ["-S"]), "-c", code, str(sweep)],
            env=os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stdout == "False\n", done.stderr
        where = f"{tmp_path}/odd/{file}.py:{line}"
        assert done.stderr == (
            f"{sweep}:2:12: benchmark {name!r} imports torch at the top of {where}: import torch "
            "inside run(), so that machines without torch can read its parameters\n"
        )


def test_a_benchmark_may_look_for_torch(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    toy = (ROOT / "tests" / "benchmarks" / "toy.py").read_text()
    look = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    (tmp_path / "odd" / "looking.py").write_text(
        toy.replace("from typing", look + "from typing", 1)
    )
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("name: a\nbenchmark: odd.looking\nfixed: {size: 1}\n")
    done = run("jobs.submit", sweep, "--dry-run", environment=beside(tmp_path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "strange.needs",
            "there is no benchmark 'strange.needs'; did you mean 'strange.needy'? "
            "(valid: strange.needy, strange.other)",
        ),
        (
            "strange.needy.x",
            "there is no benchmark 'strange.needy.x': 'strange.needy' is not a package",
        ),
        (
            "stranger.needy",
            "there is no benchmark 'stranger.needy': there is no package 'stranger', neither in "
            f"'{os.getcwd()}' nor installed",
        ),
        (
            "strange.needy",
            "strange.needy is not a benchmark: it must define run(params) and Params, a pydantic "
            "model",
        ),
    ],
)
def test_a_module_that_is_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """The hint names modules of the user's package, not the benchmarks of this project."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in [module for module in sys.modules if module.startswith("strange")]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "needy.py").write_text("x = 1\n")
    (tmp_path / "strange" / "other.py").write_text("1 / 0\n")  # is not imported
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"name: a\nbenchmark: {name}\n")
    done = call("jobs.submit", sweep, "--local", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, f"{sweep}:2:12: {message}\n")
    assert not (tmp_path / "out").exists()


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
