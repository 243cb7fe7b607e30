"""aggregate.py export: results folders as CSV and Parquet files."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs.frame.file import write_frame
from jobs.report import load
from tests.jobs.harness import ROOT
from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import TOY, ResultsFolder, failed, ok
from tests.jobs.small_disk import small_disk

HOSTILE = ["a,b", 'c"d', "e\nf", "g\rh", "=1+1", "'", "NA", "nan", "ß€\u2028", "x\0y", "-2", "\t"]
STUDIES = [ROOT / "logs" / "h200" / name for name in ("all_reduce", "flash_leaderboard")]


@pytest.fixture
def filled(folder: ResultsFolder) -> ResultsFolder:
    """A folder with hostile texts, a failure and a missing run."""
    texts = [ok(1 / 3, 0.1, facts={"text": text, "n": i}) for i, text in enumerate(HOSTILE)]
    outcomes = [*texts, failed("error", message='a,"b"\nc'), None]
    folder.submit(TOY + f"grid: {{size: {list(range(1, len(outcomes) + 1))}}}\n", outcomes)
    return folder


def read_csv(text: str, like: pd.DataFrame) -> pd.DataFrame:
    """Read CSV with the dtypes of a frame."""
    dtypes: Any = like.dtypes.to_dict()
    return pd.read_csv(io.StringIO(text), dtype=dtypes, keep_default_na=False, na_values=[""])


def test_a_file_has_every_value(filled: ResultsFolder, tmp_path: Path) -> None:
    """Parquet has every dtype, too. In CSV, an empty text is a missing one."""
    frame = load(filled.path, *STUDIES)
    assert frame["fact.text"][: len(HOSTILE)].tolist() == HOSTILE
    parquet, as_csv = tmp_path / "results.parquet", tmp_path / "results.CSV"
    for out in (parquet, as_csv):
        assert cli("export", filled.path, *STUDIES, "--out", out) == (0, "", "")
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), frame)
    texts = frame.select_dtypes("string").columns
    frame[texts] = frame[texts].replace("", pd.NA)
    pd.testing.assert_frame_equal(read_csv(as_csv.read_bytes().decode(), frame), frame)


def test_csv_is_printed_without_a_file(filled: ResultsFolder) -> None:
    code, out, err = cli("export", filled.path)
    assert (code, err) == (0, "")
    assert cli("export", filled.path, "--out", "-") == (0, out, "")
    assert cli("export", filled.path.parent)[1] == out  # a folder that contains it
    assert out.startswith('"folder","sweep","benchmark","run","device","phase","status","size"')
    assert read_csv(out, load(filled.path))["size"].tolist() == list(range(1, len(HOSTILE) + 3))


def test_notes_are_told(filled: ResultsFolder, tmp_path: Path) -> None:
    (filled.path / "records" / "damaged.jsonl").write_text("{\n")
    code, out, err = cli("export", filled.path, "--out", tmp_path / "a.csv")
    assert (code, out) == (0, "") and err.startswith("note: ") and "damaged.jsonl" in err


def test_parquet_without_pyarrow(
    filled: ResultsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = cli("export", filled.path, "--out", tmp_path / "a.parquet")
    assert (code, out) == (2, "") and "run pip install pyarrow, or write a .csv" in err


def test_a_pipe_is_not_replaced(filled: ResultsFolder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    code, _, err = cli("export", filled.path, "--out", tmp_path / "a.csv")
    assert code == 2 and "must be a regular file" in err


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_an_existing_file_is_replaced_whole(
    filled: ResultsFolder, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "files" / name
    path.parent.mkdir()
    path.write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_frame(load(filled.path), path)
    assert path.read_text() == "old" and os.listdir(path.parent) == [name]
    assert cli("export", filled.path, "--out", path)[0] == 0
    assert path.read_bytes()[:4] in (b"PAR1", b'"fol') and os.listdir(path.parent) == [name]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_full_disk(filled: ResultsFolder, tmp_path: Path, name: str) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        code, out, err = cli("export", filled.path, "--out", disk / name)
        assert (code, out) == (2, "")
        assert err == f"--out: '{disk / name}' cannot be written: No space left on device\n"
        assert os.listdir(disk) == []
