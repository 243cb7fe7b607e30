"""What tests of `jobs.report.load` share: checks of a frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from jobs.frame.flat import FIRST, LAST, MEASURED
from jobs.report import load
from jobs.sweep.views import FACT

SIZES = "grid: {size: [1, 2, 3]}\n"


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
