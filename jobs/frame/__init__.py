"""The results as rows, and their numbers. Tables, plots and exports are queries of them.

`jobs.report.load` gives them to users of pandas.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(
    folder: str | Path, *more: str | Path, by: Literal["run", "process"] = "run"
) -> pd.DataFrame:
    """Return the results in one or several results folders as a DataFrame.

    A row is a run on one kind of device, in one phase such as forward. It summarizes all repeats
    or rounds of the run that tables show, and has the numbers of tables. A run that failed or is
    missing has one row, without a phase and without numbers. If only some repeats of a run failed,
    these have a row for each status.

    The columns are, see docs/results_folders.md:

    - `folder`, `sweep`, `benchmark`, `run`, `device`, `phase`, `status`;
    - the parameters of the runs. One with the name of another column is `param.NAME`;
    - `processes`, `samples`: how many of them the row summarizes;
    - `median_ms`, `mean_ms`, `std_ms`, `min_ms`, `max_ms`: times of the samples in milliseconds;
    - `low_ms`, `high_ms`: ends of the 95% interval that tables and plots show with `median_ms` for
      runs in blocks, in milliseconds. `mean_ms` may lie outside;
    - `tflops` in TFLOP/s, `bandwidth` and `bus_bandwidth` in GB/s, `mfu` in percent,
      `tokens_per_second`, `peak_memory_bytes`, `compiling_seconds`: medians;
    - `fact.NAME`: other values that the benchmark returned, such as `fact.relative_error.out`;
    - `commit`, `host`, `gpu`, `threads`, `torch`, `triton`, `stale` (from older code),
      `attempt`, `reason` (of a failure).

    A missing value is NaN or NA. Text has the dtype `string`. Problems in the folders, such as
    damaged lines, are warnings.

    Args:
        folder: a results folder, such as logs/flash.
        more: further results folders. A folder that is given twice is read once.
        by: "process" gives each repeat or round a row of its own, with the columns `repeat`,
            `round`, `source_hash`, `started_at` (Unix time), and the median conditions of the GPUs
            during the phase: `sm_clock_mhz`, `power_w`, `temperature_c`, and `throttle`.

    Raises:
        ValueError: if `by` is neither "run" nor "process".
        FileNotFoundError: if a folder does not contain submissions.
        UnreadableResults: if a folder cannot be read.
    """
    from jobs.frame.flat import read_frame  # imports pandas, which other modules do not need

    if by not in ("run", "process"):
        raise ValueError(f"by must be 'run' or 'process', got {by!r}")
    frame, notes = read_frame([Path(folder), *map(Path, more)], by == "process")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return frame
