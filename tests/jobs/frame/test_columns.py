"""jobs.report.load: names, dtypes and texts of the columns."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.frame.flat import typed
from jobs.sweep.views import FACT
from tests.jobs.frames import SIZES, checked, single
from tests.jobs.results_folder import TOY, ResultsFolder, ok


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


def test_a_parameter_may_have_the_name_of_a_column(folder: ResultsFolder) -> None:
    manifest = folder.submit(TOY + SIZES, ok(1.0))
    path = manifest.path / "manifest.json"
    extra = '"host": "h", "fact.a": 1, "param.host": 2, "reason": null, "size": '
    path.write_text(path.read_text().replace('"params": {"size": ', '"params": {' + extra))
    frame = checked(folder.path)
    assert frame["param.host"].tolist() == ["h"] * 3 and frame["host"].isna().all()
    assert frame["param.fact.a"].tolist() == [1] * 3
    assert frame["param.param.host"].tolist() == [2] * 3
    assert "param.reason" in frame and frame["size"].tolist() == [1, 2, 3]
