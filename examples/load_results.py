r"""Load the results of attention runs into pandas, and compute how time grows with seq_len.

`observe` reads a results folder and returns the state of each run with its latest successful
record. `slowest_rank` returns the samples of a phase in milliseconds. `load` makes a row for each
run and phase. Its columns are the parameters of the run, the phase and the median time.

Run these commands in the folder `examples/`. The first command measures what the second one loads:

    python -m jobs.submit sweeps/quickstart.yaml --local --out logs/growth \
        'implementation=[naive, sdpa_flash]' 'seq_len=[256, 512, 1024]'
    python load_results.py logs/growth

The script prints the exponent e of time ~ seq_len^e between consecutive values of seq_len. It
approaches 2 for long sequences, because the matmuls of attention take seq_len^2 operations. It is
below 2 where launch overhead dominates, and above 2 where the scores no longer fit in a cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from jobs.report.metrics import slowest_rank
from jobs.results.run_states import observe


def load(folder: Path) -> pd.DataFrame:
    """Return a row for each run and phase of a results folder. Failed runs have no rows."""
    rows = []
    for task in observe(folder).tasks:
        measured = task.record.measurements if task.record else None
        if measured is None:
            continue
        for phase in measured.samples_ms:
            ms = float(np.median(slowest_rank(measured, phase)))
            rows.append({**task.run.params, "phase": phase, "ms": ms})
    return pd.DataFrame(rows)


def main() -> None:
    results = load(Path(sys.argv[1]))
    chosen = results[results["phase"] == "forward_backward"]
    times = chosen.pivot_table(index="seq_len", columns="implementation", values="ms")
    print("Median time of forward and backward in milliseconds", times.round(3), sep="\n")
    ratios = times.pct_change() + 1  # to the row above
    lengths = times.index.to_series().pct_change() + 1
    exponents = ratios.map(np.log).div(lengths.map(np.log), axis="index")
    print("\nExponent of the growth", exponents[1:].round(2), sep="\n")


if __name__ == "__main__":
    main()
