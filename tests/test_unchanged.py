"""What decides that CI skips an expensive test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import unchanged
from tests.unchanged import ROOT, Recorder, sources


def test_a_test_depends_on_what_it_and_its_fixtures_import() -> None:
    files = sources(ROOT / "tests/systems/kernels/test_flash_hopper_machine_code.py")
    kernels = ROOT / "systems" / "kernels" / "flash_attention" / "hopper"
    assert set(kernels.rglob("*.py")) <= files
    assert {ROOT / "tests/conftest.py", ROOT / "tests/systems/conftest.py"} <= files
    assert ROOT / "jobs/launch/submission.py" not in files


@pytest.mark.parametrize(
    ("exit_code", "options", "kept"),
    [
        (0, {}, {"passed.py": "new", "unselected.py": "old"}),
        (1, {}, {"passed.py": "new", "unselected.py": "old"}),
        (0, {"keyword": "some"}, None),
        (0, {"markexpr": "not slow"}, None),
        (0, {"deselect": ["one"]}, None),
        (2, {}, None),
    ],
)
def test_only_files_whose_tests_all_passed_are_recorded(
    exit_code: int,
    options: dict[str, object],
    kept: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("passed", "failed", "crashed", "skipped", "unselected")
    before = {f"{name}.py": "old" for name in names} | {"removed.py": "old"}
    for name in names:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setattr(unchanged, "PASSED", tmp_path / "unchanged.json")
    unchanged.PASSED.write_text(json.dumps(before))

    recorder = Recorder()
    marked = [("depends", "new")]
    for name, outcome, properties in [
        ("passed", "passed", marked),
        ("failed", "passed", marked),
        ("failed", "failed", marked),
        ("crashed", "passed", marked),
        ("crashed", "failed", []),
        ("skipped", "skipped", marked),
    ]:
        report = pytest.TestReport(
            f"{name}.py::test", ("", 0, ""), {}, outcome, None, "call", user_properties=properties
        )
        recorder.pytest_runtest_logreport(report)
    options = {"markexpr": "depends", "keyword": "", "deselect": None} | options
    config = SimpleNamespace(getoption=options.get, args=["tests"])
    session = SimpleNamespace(shouldstop=False, config=config)
    recorder.pytest_sessionfinish(session, exit_code)  # type: ignore[arg-type]
    assert json.loads(unchanged.PASSED.read_text()) == (before if kept is None else kept)
