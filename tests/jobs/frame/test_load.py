"""jobs.report.load: results folders as a DataFrame, its rows and its columns."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jobs.frame.flat import FIRST, LAST, MEASURED, typed
from jobs.processes import ProcessHandle
from jobs.report import load
from jobs.results.manifest import write_handles
from jobs.status import Status
from jobs.sweep.views import FACT
from tests.benchmarks import toy
from tests.jobs.results_folder import GRID, H200, TOY, ResultsFolder, failed, ok

SIZES = "grid: {size: [1, 2, 3]}\n"
BLOCKS = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 5, aa: false}\n"


def single(frame: pd.DataFrame, **values: Any) -> pd.Series[Any]:
    """Return the only row with these values."""
    chosen = frame
    for name, value in values.items():
        chosen = chosen[chosen[name] == value]
    assert len(chosen) == 1, chosen
    return chosen.iloc[0]


def checked(*folders: Path) -> pd.DataFrame:
    """Load folders, and check what holds for every frame."""
    frame = load(*folders)
    assert frame.columns.is_unique
    middle = [name for name in frame.columns if name not in FIRST | MEASURED | LAST]
    facts = [name for name in middle if name.startswith(FACT)]
    params = middle[: len(middle) - len(facts)]
    assert list(frame.columns) == [*FIRST, *params, *MEASURED, *facts, *LAST]
    for name, dtype in (FIRST | MEASURED | LAST).items():
        assert str(frame[name].dtype) == dtype, name
    assert {str(dtype) for dtype in frame.dtypes} <= {
        "string", "float64", "int64", "Int64", "bool", "boolean",
    }  # fmt: skip
    assert not frame.duplicated(["folder", "run", "device", "phase", "status"]).any()
    measured = frame["median_ms"].notna()
    assert (frame["status"][measured] == "ok").all()
    assert frame.loc[frame["status"] != "ok", ["phase", *list(MEASURED)[1:]]].isna().all(axis=None)
    return frame


# ---- rows ----------------------------------------------------------------------------------------


def test_a_row_is_a_run_and_phase(folder: ResultsFolder) -> None:
    git = {"commit": "4bb999b0123", "dirty": False}
    places = {"environment": {"host": "node7", "git": git, "loaded": {"torch": "2.11.0+cu130"}}}
    measurements = {
        "samples_ms": {"forward": [1.0, 2.0, 6.0], "backward": [4.0]},
        "flops": {"forward": 2e9},
        "bytes": {"backward": 8e6},
        "tokens": {"forward": 10},
        "peak_memory_bytes": {"forward": 12345678901, "optimizer": 7},
        "compiling_seconds": 2.5,
    }
    outcome = {"status": "ok", "measurements": measurements, "gpus": [{"uuid": "GPU-0123abcd"}]}
    folder.submit(TOY + GRID, outcome | places, H200)
    frame = checked(folder.path)
    assert len(frame) == 4 * 3
    forward = single(frame, size=1, mode="fast", phase="forward")
    expected = {
        "folder": str(folder.path), "sweep": "toy", "benchmark": "tests.benchmarks.toy",
        "device": H200, "status": "ok", "scale": 1, "label": "", "processes": 1, "samples": 3,
        "median_ms": 2.0, "mean_ms": 3.0, "min_ms": 1.0, "max_ms": 6.0, "tflops": 1.0,
        "tokens_per_second": 5000.0, "peak_memory_bytes": 12345678901, "compiling_seconds": 2.5,
        "commit": "4bb999b", "host": "node7", "gpu": "0123abcd",
        "torch": "2.11.0", "stale": False, "attempt": 1,
    }  # fmt: skip
    assert {name: forward[name] for name in expected} == expected
    assert forward["std_ms"] == pytest.approx(math.sqrt(7))
    missing = ["low_ms", "high_ms", "bandwidth", "mfu", "triton", "reason", "window"]
    assert forward[missing].isna().all()
    backward = single(frame, size=1, mode="fast", phase="backward")
    assert (backward["bandwidth"], backward["samples"], backward["std_ms"]) == (2.0, 1, 0.0)
    optimizer = single(frame, size=1, mode="fast", phase="optimizer")
    assert optimizer["peak_memory_bytes"] == 7 and optimizer[["median_ms", "samples"]].isna().all()
    assert str(frame["size"].dtype) == "int64" and str(frame["causal"].dtype) == "bool"


def test_every_status_has_a_row(folder: ResultsFolder) -> None:
    recorded = [status for status in Status if status.can_be_recorded]
    sweep = TOY + f"grid: {{size: {list(range(1, len(recorded) + 2))}}}\n"

    outcomes = {status: failed(status) for status in recorded}
    outcomes[Status.ok] = ok(1.0)
    outcomes[Status.oom] = failed("oom", memory="gpu", requested_bytes=2**30, phase="backward")
    folder.submit(sweep, [*outcomes.values(), None])
    frame = checked(folder.path)
    assert frame["status"].tolist() == [*recorded, "missing"]
    bad = frame[frame["status"] != "ok"]
    assert bad["reason"].notna().all() and bad["size"].notna().all()
    assert single(frame, status="error")["reason"] == "RuntimeError: as asked"
    oom = "OOM in backward (1.0 GiB): RuntimeError: as asked"
    assert single(frame, status="oom")["reason"] == oom
    missing = single(frame, status="missing")
    assert missing[["commit", "attempt", "stale", "phase", "device"]].isna().tolist() == [
        True, True, True, True, False,
    ]  # fmt: skip
    manifest = folder.submit(sweep, None)
    manifest.handles[0] = ProcessHandle.of_this_process()  # stands for a live job
    write_handles(manifest)
    live = checked(folder.path)
    # A run that is executed again has the status that tables show.
    assert live["status"].tolist() == [*recorded, "queued"]
    assert live["reason"][1:-1].tolist() == frame["reason"][1:-1].tolist()
    assert "the submission runs in process" in live["reason"].iloc[-1]


def test_repeats_share_a_row_and_failed_ones_have_their_own(folder: ResultsFolder) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        if params["size"] == 1 or repeat == 0:
            return ok(1.0 + repeat, 5.0 + repeat)
        return failed("timeout") if params["size"] == 2 else None

    folder.submit(TOY + SIZES + "repeats: 3\n", outcome)
    frame = checked(folder.path)
    assert frame.groupby("size")["status"].agg(list).tolist() == [
        ["ok"], ["ok", "timeout"], ["ok", "missing"],
    ]  # fmt: skip
    whole = single(frame, size=1)
    assert (whole["processes"], whole["samples"], whole["median_ms"]) == (3, 6, 4.0)
    assert single(frame, size=2, status="timeout")["processes"] == 2
    assert single(frame, size=3, status="missing")["processes"] == 2
    assert frame["low_ms"].isna().all()


def test_blocks_have_the_interval_over_processes(folder: ResultsFolder) -> None:
    times = [1.0, 1.02, 1.01, 1.05, 1.0]
    sweep = TOY + "grid: {size: [1], mode: [fast, exact]}\n" + BLOCKS
    folder.submit_rounds(
        sweep, lambda params, repeat: ok(0.9 * times[repeat], times[repeat], 3 * times[repeat])
    )
    folder.submit_rounds(sweep, None, rounds=[0])  # changes nothing
    frame = checked(folder.path)
    row = single(frame, mode="exact")
    low, high = stats.t.interval(0.95, 4, np.mean(times), stats.sem(times))
    assert (row["low_ms"], row["high_ms"]) == pytest.approx((low, high))
    assert (row["processes"], row["samples"], row["median_ms"]) == (5, 15, 1.01)
    assert (row["min_ms"], row["max_ms"]) == (0.9, 3 * 1.05)
    assert row["mean_ms"] == pytest.approx(4.9 / 3 * np.mean(times))


def test_runs_of_an_older_version_have_the_defaults_as_in_tables(folder: ResultsFolder) -> None:
    manifest = folder.submit(TOY + SIZES, ok(1.0))
    path = manifest.path / "manifest.json"
    path.write_text(path.read_text().replace('"ranks": 1', '"old": 1', 1))
    frame = checked(folder.path)
    assert frame["ranks"].tolist() == [1, 1, 1]
    text = path.read_text().replace("tests.benchmarks.toy", "tests.benchmarks.gone")
    path.write_text(text)
    with pytest.warns(UserWarning, match="that some runs of tests.benchmarks.gone lack"):
        frame = load(folder.path)
    assert frame["ranks"].isna().tolist() == [True, False, False]


def test_commits_and_hosts_of_repeats_are_listed(folder: ResultsFolder) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any]:
        return ok(1.0) | {
            "environment": {"host": f"n{repeat % 2}", "git": {"commit": "4bb999b"}},
            "source_hash": "old" if repeat == 1 else None,
        }

    folder.submit(TOY + "fixed: {size: 1}\nrepeats: 3\n", outcome)
    row = single(checked(folder.path))
    assert (row["host"], row["commit"], row["stale"]) == ("n0; n1", "4bb999b", True)
    assert pd.isna(row["gpu"])


def test_several_folders_and_one_given_twice(tmp_path: Path) -> None:
    folders = [ResultsFolder(tmp_path / name) for name in "ab"]
    for i, folder in enumerate(folders):
        folder.submit(TOY + SIZES, ok(i + 1.0))
    paths = [folder.path for folder in folders]
    frame = checked(*paths, tmp_path / "a" / ".." / "a")
    assert len(frame) == 6
    assert frame.groupby("folder")["median_ms"].first().tolist() == [1.0, 2.0]
    assert load(str(paths[0])).equals(load(paths[0]))


def test_a_folder_without_submissions_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no submission"):
        load(tmp_path)


def test_damaged_lines_are_warnings(folder: ResultsFolder) -> None:
    folder.submit(TOY + SIZES, ok(1.0))
    (folder.path / "records" / "damaged.jsonl").write_text("{\n")
    with pytest.warns(UserWarning, match="damaged.jsonl") as caught:
        frame = load(folder.path)
    assert len(frame) == 3 and len(caught) == 1 and caught[0].filename == __file__


def test_a_row_by_process_is_a_round_with_its_conditions(folder: ResultsFolder) -> None:
    hot = {"sm_clock_mhz": [1000, 1400, 1980], "power_w": [600, 690, 700], "throttle": {"cap": 1.0}}
    hot |= {"temperature_c": [50]}  # of another form
    folder.submit_rounds(
        TOY + "grid: {size: [1], mode: [fast, exact]}\n" + BLOCKS,
        lambda params, repeat: failed("oom") if repeat == 4 else ok(1.0 + repeat, 2.0 + repeat),
        conditions={"forward": hot},
    )
    frame = load(folder.path, by="process")
    exact = frame[frame["mode"] == "exact"]
    assert exact["round"].tolist() == exact["repeat"].tolist() == [0, 1, 2, 3, 4]
    assert exact["median_ms"].tolist()[:4] == [1.5, 2.5, 3.5, 4.5]
    assert exact["status"].tolist() == ["ok"] * 4 + ["oom"]
    first = exact.iloc[0]
    assert (first["sm_clock_mhz"], first["power_w"], first["throttle"]) == (1400, 690, "cap")
    assert pd.isna(first["temperature_c"]) and first["samples"] == 2 and first["source_hash"]
    assert exact.iloc[4][["phase", "median_ms", "sm_clock_mhz"]].isna().all()
    # The rows of a run are summarized as in the default frame.
    runs = load(folder.path)
    medians = frame[frame["status"] == "ok"].groupby("run")["median_ms"].median()
    assert medians.to_dict() == runs[runs["status"] == "ok"].set_index("run")["median_ms"].to_dict()
    with pytest.raises(ValueError, match="got 'row'"):
        load(folder.path, by="row")  # type: ignore[arg-type]


# ---- columns -------------------------------------------------------------------------------------


def test_facts_have_the_names_of_tables(folder: ResultsFolder) -> None:
    facts = [
        {"loss": {"first": 1, "last": 2.5}, "note": "a,b", "fast": True, "items": [1], "no": None},
        {"loss": {"first": 2}, "a.b": 3, "x": {"y": 4}, "x.y": 5, "deep": {"k.l": {"m": 6}}},
        {"note": 7, "huge": 10**30, "enormous": 10**400, "empty": {}},
    ]
    folder.submit(TOY + SIZES, lambda params, repeat: ok(1.0, facts=facts[params["size"] - 1]))
    frame = checked(folder.path).filter(like=FACT)
    expected: dict[str, list[Any]] = {
        "fact.loss.first": [1, 2, None], "fact.loss.last": [2.5, None, None],
        "fact.note": ["a,b", None, "7"], "fact.fast": [True, None, None],
        "fact.a.b": [None, 3, None], "fact.x.y": [None, 4, None],
        "fact.deep.k.l.m": [None, 6, None], "fact.huge": [None, None, 1e30],
        "fact.enormous": [None, None, str(10**400)],
    }  # fmt: skip
    assert set(frame.columns) == set(expected)
    for name, values in expected.items():
        column = frame[name]
        assert [None if pd.isna(v) else v for v in column] == values, name
    dtypes = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert dtypes["fact.loss.first"] == "Int64" and dtypes["fact.fast"] == "boolean"
    assert dtypes["fact.note"] == "string" and dtypes["fact.huge"] == "float64"


def test_facts_of_repeats(folder: ResultsFolder) -> None:
    facts = [
        {"a": 1, "b": 1, "c": "u", "d": True, "e": 1},
        {"a": 1, "b": 2, "c": "v", "d": False, "e": "w"},
        {"a": 1, "b": 6, "c": "u", "d": True},
    ]
    folder.submit(
        TOY + "fixed: {size: 1}\nrepeats: 3\n", lambda params, repeat: ok(1.0, facts=facts[repeat])
    )
    row = single(checked(folder.path))
    assert [row[f"fact.{name}"] for name in "abcde"] == [1, 2.0, "u; v", 1.0, 1.0]


def test_a_run_with_only_facts_has_one_row(folder: ResultsFolder) -> None:
    outcome = {"status": "ok", "measurements": {"facts": {"loss": 1.5}, "compiling_seconds": 2.0}}
    folder.submit(TOY + "fixed: {size: 1}\n", outcome)
    row = single(checked(folder.path))
    assert (row["fact.loss"], row["compiling_seconds"], row["processes"]) == (1.5, 2.0, 1)
    assert row[["phase", "median_ms", "samples"]].isna().all()


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1, None], "Int64", [1, None]),
        ([2**53 + 1, None], "Int64", [2**53 + 1, None]),
        ([2**63, 1], "float64", [2.0**63, 1.0]),
        ([1, 0.5, None], "float64", [1.0, 0.5, None]),
        ([True, False], "bool", [True, False]),
        ([True, None], "boolean", [True, None]),
        ([True, 3], "float64", [1.0, 3.0]),
        (["a", None, ""], "string", ["a", None, ""]),
        (["a", 1, 0.5, True, None], "string", ["a", "1", "0.5", "true", None]),
        (["\ud800"], "string", ["?"]),
        ([[1, 2], {"a": 1}], "string", ["[1, 2]", "{'a': 1}"]),
        ([None, None], "float64", [None, None]),
        ([], "float64", []),
    ],
)
def test_a_column_has_one_dtype(values: list[Any], dtype: str, expected: list[Any]) -> None:
    series = pd.Series(typed(values))
    assert str(series.dtype) == dtype
    assert [None if pd.isna(value) else value for value in series] == expected


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@pytest.mark.slow
@given(st.lists(scalars | st.text(st.characters(codec=None))))
def test_every_column_can_be_written(values: list[Any]) -> None:
    frame = pd.DataFrame({"a": typed(values)})
    assert str(frame["a"].dtype) in ("string", "float64", "int64", "Int64", "bool", "boolean")
    assert (frame["a"].isna() == [value is None for value in values]).all()
    file = io.BytesIO()
    frame.to_parquet(file, engine="pyarrow")
    frame.to_csv(io.BytesIO())


def test_a_parameter_may_have_the_name_of_a_column(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Params(toy.Params):
        host: str = "h"

    monkeypatch.setattr(toy, "Params", Params)
    folder.submit(TOY + SIZES, ok(1.0))
    frame = checked(folder.path)
    assert frame["param.host"].tolist() == ["h"] * 3 and frame["host"].isna().all()
