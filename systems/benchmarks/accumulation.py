"""Measure the rounding error of a long sum, for several dtypes of the sum and of its terms.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/mixed_precision.yaml --local
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from systems.benchmark import BenchmarkParams

VERSION = 1
FLOAT16_MAX = 65_504
# Ways to compute the sum: (dtype of the sum, dtype of each term, whether each term is cast to the
# dtype of the sum before the addition). Additions are in place, so the sum keeps its dtype.
WAYS = (
    ("float32", "float32", False),
    ("float16", "float16", False),
    ("float32", "float16", False),
    ("float32", "float16", True),
    ("bfloat16", "bfloat16", False),
    ("float32", "bfloat16", False),
)


class Params(BenchmarkParams):
    """Parameters of a sum: it adds the same number several times.

    The exact sum `terms * addend` must be at most 65,504, the largest finite float16 number.
    """

    terms: Annotated[int, Field(ge=1)] = 1000  # number of terms
    addend: Annotated[float, Field(gt=0)] = 0.01  # value of each term

    @model_validator(mode="after")
    def _fits_float16(self) -> Self:
        exact = self.terms * self.addend
        if exact > FLOAT16_MAX:
            raise ValueError(
                f"terms * addend must be at most {FLOAT16_MAX:,}, the largest float16 number, got "
                f"{self.terms} * {self.addend} = {exact:g}"
            )
        return self


def run(params: Params) -> dict[str, Any]:
    """Compute the sum for several dtypes of the sum and of its terms.

    Facts:
        ways: for each combination of dtypes a dict with the dtype of the sum (sum), the dtype of
            the terms and whether they are cast to that of the sum (term), the computed sum (result)
            and its relative error (error_share).
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = params.terms * params.addend
    ways = []
    for sum_dtype, term_dtype, cast in WAYS:
        total = torch.tensor(0.0, dtype=getattr(torch, sum_dtype), device=device)
        term = torch.tensor(params.addend, dtype=getattr(torch, term_dtype), device=device)
        for _ in range(params.terms):
            total += term.to(total.dtype) if cast else term
        ways.append(
            {
                "sum": sum_dtype,
                "term": term_dtype + (f", cast to {sum_dtype}" if cast else ""),
                "result": f"{total.item():.4f}",
                "error_share": total.item() / exact - 1,
            }
        )
    return {"facts": {"ways": ways}}
