"""Predictions of a benchmark in the cells of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.errors import TableError
from tests.benchmarks import toy
from tests.jobs.results_folder import (
    GIB,
    GRID,
    TOY,
    Outcome,
    ResultsFolder,
    failed,
    load,
    ok,
    table,
)


def test_what_was_predicted_is_shown_whatever_became_of_the_run(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(params: toy.Params) -> dict[str, Any]:
        step_ms = 2.5 if params.size < 3 else None
        return {"peak_memory_bytes": {"step": params.size * GIB}, "step_ms": step_ms}

    monkeypatch.setattr(toy, "predict", predict, raising=False)
    values = "[peak_memory, predicted.peak_memory_bytes.step, predicted.step_ms, predicted.x]"
    text = f"grid: {{size: [1, 2, 3]}}\ntables: [{{name: t, value: {values}, unit: GiB}}]\n"
    fates: dict[int, Outcome] = {
        1: ok(1.0, peak_memory_bytes={"forward": GIB // 2}),
        2: failed("oom", memory="gpu"),
        3: None,
    }
    loaded = load(tmp_path, TOY + text)
    folder.submit(loaded, lambda params, repeat: fates[params["size"]])
    view = loaded.sweep.tables[0].model_dump(exclude={"name"}, by_alias=True)
    rows = table(folder, **view)
    assert [tuple(row.values()) for row in rows] == [
        ("1", "0.5000", "1.000", "2.500", "–"),
        ("2", "OOM", "2.000", "2.500", "–"),
        ("3", "missing", "3.000", "–", "–"),
    ]
    assert list(rows[0]) == [
        "size", "peak memory (GiB)", "predicted peak memory step (GiB)", "predicted step (ms)",
        "predicted x",
    ]  # fmt: skip


def test_a_prediction_that_raises_is_an_error_that_names_the_run(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "predict", lambda p: {"x": 1 // (p.size - 2)}, raising=False)
    folder.submit(TOY + GRID, ok(1.0))
    with pytest.raises(TableError, match=r"size=2,.*raised ZeroDivisionError"):
        table(folder, value="predicted.x")
