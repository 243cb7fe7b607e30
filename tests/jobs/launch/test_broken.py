"""Broken results folders and benchmarks are named with what is wrong, without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.results.heartbeat import RunsHere
from jobs.results.manifest import Executor, write_handles
from jobs.results.slurm_job import SlurmJob
from tests.jobs.harness import (
    ROOT,
    call,
    records,
    run,
    run_as_nobody,
    write_submission,
    write_sweep,
)

# ---- a results folder ----------------------------------------------------------------------------


def spoil(path: Path, **changes: Any) -> None:
    """Change keys of a manifest. None removes a key."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    submission = write_submission(write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out")
    return submission.path / "manifest.json"


def ways_to_spoil(manifest: Path) -> list[tuple[Callable[[], Any], str]]:
    """Return functions that damage a manifest, each with what is then reported."""
    whole, data = manifest.read_bytes(), json.loads(manifest.read_text())
    job = data["jobs"][0]
    return [
        (lambda: manifest.write_bytes(whole[: len(whole) // 2]), "Invalid JSON: EOF"),
        (lambda: manifest.write_bytes(whole.replace(b"ok", b"\xff")), "Invalid JSON: invalid uni"),
        (lambda: manifest.write_bytes(b"[" * 100_000), "Invalid JSON: recursion limit"),
        (lambda: manifest.write_text("[]"), "Input should be an object"),
        (lambda: spoil(manifest, jobs=None), "the key 'jobs' is missing"),
        (lambda: spoil(manifest, jobs=[job | {"index": "x"}]), "jobs.0.index: Input should be"),
        (lambda: spoil(manifest, jobs=[job | {"tasks": [["x", 0]]}]), "one of the runs, got 'x'"),
        (lambda: spoil(manifest, shapes=[]), "'shapes', which has 0 entries, got 0"),
        (lambda: spoil(manifest, created_at="x"), "created_at: Input should be a valid number"),
        (lambda: spoil(manifest, sweep={"name": "a"}), "the key 'sweep.benchmark' is missing"),
        (lambda: spoil(manifest, sweep=data["sweep"] | {"repeats": 0}), "sweep.repeats: Input"),
        (lambda: (manifest.unlink(), manifest.mkdir()), "Is a directory"),
    ]


def test_a_folder_without_a_readable_manifest_is_an_error(manifest: Path) -> None:
    out, whole = manifest.parents[2], manifest.read_text()
    for spoiled, words in ways_to_spoil(manifest):
        manifest.write_text(whole)
        spoiled()
        done = call("jobs", "status", out)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
        assert f"{manifest} is not a manifest that this version can read: " in done.stdout
        assert words in done.stdout
    for command in (["aggregate", out], ["jobs", "logs", "0", "--in", out], ["jobs", "retry", out]):
        done = call(*command)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
    assert run("jobs", "status", out).stdout == call("jobs", "status", out).stdout
    again = call("jobs.submit", out.parent / "sweep.yaml", "--local", "--out", out)
    assert again.returncode == 2 and again.stdout.count("\n") == 1, again.stdout


def commands_on(out: Path, sweep: Path, identity: str) -> list[tuple[str | Path, ...]]:
    """Return commands that read a results folder and change nothing, as all runs are ok."""
    return [
        ("jobs", "status", out),
        ("jobs", "logs", identity, "--in", out),
        ("jobs", "cancel", out),
        ("jobs", "retry", out),
        ("aggregate", out),
        ("aggregate", "attempts", out),
        ("aggregate", "export", out),
        ("jobs.submit", sweep, "--local", "--out", out),
    ]


@pytest.mark.slow
def test_what_cannot_be_read_is_named_and_changes_nothing_else(tmp_path: Path) -> None:
    """Every command shows the other submissions, and exits as if the damaged one did not exist."""
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 0
    (record,) = records(out)
    commands = commands_on(out, sweep, record.run)
    before = [call(*command) for command in commands]
    assert [done.returncode for done in before] == [0] * len(commands)
    path = write_submission(sweep, out).path
    handles = path / "handles.json"
    damages: list[tuple[Path, str, str]] = [
        (path / "manifest.json", "{", "Invalid JSON"),
        (handles, '{"0": {}}', "job 0: the key 'pid' is missing; whether its jobs are queued or"),
        (handles, '{"0": {"slurm": "--me"}}', "job 0: slurm: String should match pattern"),
        (handles, '{"x": {"slurm": "7"}}', "the key must be the index of a job, got 'x'"),
        (handles, '{"0": [1]}', "job 0: Input should be a dictionary"),
        (handles, "[]", "Input should be an object"),
        (handles, "\udcff", "Invalid JSON"),
        (out / "records" / "x.jsonl", '{"run": "\udcff"}', "Invalid JSON: invalid unicode"),
        (out / "records" / "\udcff.jsonl", "{}", "the key 'run' is missing"),
    ]
    seen: set[Path] = set()  # all commands meet one damage of each file, the first meets all
    for file, text, words in damages:
        whole = file.read_bytes() if file.exists() else None
        file.write_bytes(os.fsencode(text))
        every = list(zip(commands, before, strict=True))
        for command, undamaged in every[:1] if file in seen else every:
            done = call(*command)
            shown = os.fsencode(file).decode(errors="replace")
            assert done.returncode == undamaged.returncode, done.stdout
            assert f"note: {shown}" in done.stdout and words in done.stdout, (command, done.stdout)
            assert done.stdout.count("note: ") == 1, done.stdout
        seen.add(file)
        file.unlink()
        if whole is not None:
            file.write_bytes(whole)


def test_files_on_the_state_of_jobs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    local = write_submission(sweep, out)
    with RunsHere(local):
        for text, words in (("[]", "an object"), ('{"deaths": 1}', "deaths: "), ("{", "JSON")):
            state = local.job_folder(0) / "state.json"
            state.write_text(text)
            done = call("jobs", "status", out)
            assert done.returncode == 0 and f"note: {state}: skipped: " in done.stdout
            assert words in done.stdout
    end = local.job_folder(0) / "worker_end.json"
    end.write_text("{}")
    done = call("jobs", "status", out)
    assert done.returncode == 1 and f"note: {end}: skipped: the key 'pid' is m" in done.stdout
    other = tmp_path / "slurm"
    slurm = write_submission(sweep, other, Executor.slurm)
    slurm.handles[0] = SlurmJob("1_0")
    write_handles(slurm)
    ended = slurm.path / "ended.json"
    for text in ("[]", '{"0": 1}', '{"0": ""}', "{"):
        ended.write_text(text)
        done = call("jobs", "status", other, environment={"PATH": ""})  # without Slurm
        assert done.returncode == 0 and f"note: {ended}: skipped: " in done.stdout, done.stdout
        assert "Slurm does not answer" in done.stdout


def test_a_damaged_folder_does_not_hide_the_others_in_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = write_sweep(tmp_path, [{"what": "ok"}])
    with RunsHere(write_submission(sweep, Path("logs/a"))):
        pass
    manifest = write_submission(sweep, Path("logs/b"))
    (manifest.path / "manifest.json").write_text("{")
    Path("logs/c").mkdir()
    Path("logs/c/submissions").touch()
    Path("logs/notes.txt").touch()
    identity = next(iter(manifest.runs))
    done = call("jobs", "status")
    assert done.returncode == 1 and "logs/a: sweep misbehave, 1 run" in done.stdout
    assert "logs/b/submissions/" in done.stdout and "manifest.json: skipped: Inv" in done.stdout
    assert "note: logs/c: skipped: logs/c/submissions cannot be read: Not a d" in done.stdout
    assert done.stdout.count("note: ") == 2, done.stdout
    assert call("jobs", "logs", identity).returncode == 0
    Path("logs").rename("moved")
    Path("logs").touch()
    done = call("jobs", "status")
    assert done.returncode == 2 and done.stdout == "logs cannot be read: Not a directory\n"


@pytest.mark.parametrize("name", ["records", "submissions"])
@pytest.mark.parametrize("what", ["file", "loop", "dangling link"])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, what: str) -> None:
    """Measured runs must not be shown as missing, or be measured again."""
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    submission = write_submission(sweep, out)
    (identity,) = submission.runs
    folder = out / name
    if folder.exists():
        folder.rename(tmp_path / "moved")
    if what == "file":
        folder.touch()
    else:
        folder.symlink_to(folder if what == "loop" else tmp_path / "unmounted")
    for command in commands_on(out, sweep, identity):
        done = call(*command)
        assert done.returncode == 2, done.stdout
        assert done.stdout.startswith(f"{folder} cannot be read: "), done.stdout
        assert done.stdout.count("\n") == 1, done.stdout


def test_a_folder_of_another_user_is_an_error(folder_of_all: Path) -> None:
    """Path.glob would find no records in it."""
    out = folder_of_all / "out"
    write_submission(write_sweep(folder_of_all, [{"what": "ok"}]), out)
    (out / "records").mkdir(mode=0o700)
    done = run_as_nobody("status", out)
    assert done.returncode == 2, done.stdout
    assert done.stdout == f"{out}/records cannot be read: Permission denied\n"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installed", "text"), [(True, "import torch"), (False, "from torch import nn")]
)
def test_a_benchmark_that_imports_torch_is_an_error_of_the_sweep(
    tmp_path: Path, no_torch: Path, text: str, installed: bool
) -> None:
    """The error is the same with and without torch, which is not imported."""
    (tmp_path / "odd").mkdir()
    if installed:
        text = f"try:\n    {text}\nexcept ImportError:\n    pass"
    (tmp_path / "odd" / "heavy.py").write_text(text)
    (tmp_path / "odd" / "light.py").write_text("from odd.heavy import x")
    code = "import sys; from jobs.cli.main import main\n"
    code += "try:\n    main('submit', 'submit')\nfinally:\n    print('torch' in sys.modules)"
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
    ("name", "words"),
    [
        ("strange.needs", "did you mean 'strange.needy'? (valid: strange.needy, strange.other)"),
        ("strange.needy.x", "'strange.needy' is not a package"),
        ("stranger.needy", "there is no package 'stranger'"),
        ("strange.needy", "it must define run(params) and Params"),
    ],
)
def test_a_module_that_is_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
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
    assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith(f"{sweep}:2:12: ") and words in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
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
