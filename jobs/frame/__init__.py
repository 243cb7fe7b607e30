"""The results as rows, and their numbers. Tables, plots and exports are queries of them.

`jobs.report.load` gives them to users of pandas.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(folder: str | Path, *more: str | Path) -> pd.DataFrame:
    """Return the results in one or several results folders as a DataFrame.

    A row is a run on one kind of device, in one phase such as forward. It summarizes all repeats
    or rounds of the run that tables show, and has the numbers of tables. A run that failed or is
    missing has one row, without a phase and without numbers. If only some repeats of a run failed,
    these have a row of their own.

    The columns are, see docs/results_folders.md:

    - `folder`, `sweep`, `benchmark`, `run`, `device`, `phase`, `status`;
    - the parameters of the runs. One with the name of another column is `param.NAME`;
    - `processes`, `samples`: how many of them the row summarizes;
    - `median_ms`, `mean_ms`, `std_ms`, `min_ms`, `max_ms`: times of the samples in milliseconds;
    - `low_ms`, `high_ms`: ends of the 95% interval of runs in blocks, in milliseconds;
    - `tflops` in TFLOP/s, `bandwidth` and `bus_bandwidth` in GB/s, `mfu` in percent,
      `tokens_per_second`, `peak_memory_bytes`, `compiling_seconds`: medians;
    - `fact.NAME`: other values that the benchmark returned, such as `fact.relative_error.out`;
    - `commit`, `host`, `gpu`, `stale` (from older code), `attempt`, `reason` (of a failure).

    A missing value is NaN or NA. Text has the dtype `string`. Problems in the folders, such as
    damaged lines, are warnings.

    Args:
        folder: a results folder, such as logs/flash.
        more: further results folders. A folder that is given twice is read once.

    Raises:
        FileNotFoundError: if a folder does not contain submissions.
        UnreadableResults: if a folder cannot be read.
    """
    from jobs.frame.flat import read_frame  # imports pandas, which other modules do not need

    frame, notes = read_frame([Path(folder), *map(Path, more)])
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return frame
