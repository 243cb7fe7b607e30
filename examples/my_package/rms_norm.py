"""A benchmark in a package outside the repository: the bandwidth of RMSNorm.

A sweep file names a benchmark as Python imports it: `benchmark: my_package.rms_norm`. The module
defines the parameters (`Params`) and the measurement (`run`). torch is imported in `run`, because
`Params` is also read on login nodes. For the same reason, `run` imports `norms`, another module of
the package, which imports torch.

Run these commands in the folder `examples/`. No GPU is needed:

    python -m jobs.submit my_package/rms_norm.yaml --local
    python -m aggregate logs/rms_norm

The table shows the bandwidth in GB/s. It counts one read of the input and one write of the output.
The small tensors stay in the cache of a CPU, so their bandwidth is higher. On a GPU, `fused` is a
single kernel and much faster than `step_by_step`, which reads and writes the tensor several times.
`docs/new_benchmark.md` lists what else a benchmark can define and return.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import BenchmarkParams, WrongOutput

VERSION = 1


class Params(BenchmarkParams):
    """Parameters of RMSNorm of float32 rows."""

    implementation: Literal["step_by_step", "fused"]  # key of `norms.NORMS`
    rows: Annotated[int, Field(ge=1)]
    columns: Annotated[int, Field(ge=1)] = 1024


def run(params: Params) -> dict[str, Any]:
    """Check the implementation against float64, then measure its time."""
    import torch

    from systems.measure.timing import time_ms

    from .norms import NORMS, step_by_step

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(params.rows, params.columns, device=device)
    weight = torch.randn(params.columns, device=device)
    norm = NORMS[params.implementation]

    exact = step_by_step(x.double(), weight.double())
    error = ((norm(x, weight) - exact).norm() / exact.norm()).item()
    if not error < 1e-5:  # also true for NaN, unlike "error >= 1e-5"
        raise WrongOutput(f"relative error must be less than 1e-5, got {error:.2e}")
    return {
        "samples_ms": {"forward": time_ms(lambda: norm(x, weight), device)},
        "bytes": {"forward": 2 * x.nbytes},
        "facts": {"relative_error": error},
    }
