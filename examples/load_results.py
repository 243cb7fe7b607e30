r"""Load the results of attention runs into pandas, and compute how time grows with seq_len.

`load` returns a DataFrame with a row for each run and phase. Among its columns are the parameters
of the runs, the phase, the status and the median time, see docs/results_folders.md.

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

import numpy as np

from jobs.report import load


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python load_results.py RESULTS_FOLDER, such as logs/growth")
    try:
        results = load(sys.argv[1])
    except FileNotFoundError as error:
        sys.exit(str(error))
    chosen = results[results["phase"] == "forward_backward"]
    times = chosen.pivot_table(index="seq_len", columns="implementation", values="median_ms")
    print("Median time of forward and backward in milliseconds", times.round(3), sep="\n")
    ratios = times.pct_change() + 1  # to the row above
    lengths = times.index.to_series().pct_change() + 1
    exponents = ratios.map(np.log).div(lengths.map(np.log), axis="index")
    print("\nExponent of the growth", exponents[1:].round(2), sep="\n")


if __name__ == "__main__":
    main()
