"""Compare the losses of a faster way to train with those of eager float32, step by step.

python -m jobs.submit sweeps/training_loss.yaml --local
"""

from __future__ import annotations

import gc
import math
from typing import Annotated, Any

from pydantic import Field

from systems.benchmark import WrongOutput
from systems.training.params import TransformerParams

VERSION = 1
PRELOAD = ("torch._dynamo",)  # a first optimizer imports it


class Params(TransformerParams):
    """Trained on one fixed batch for `steps` steps, and likewise in eager float32."""

    steps: Annotated[int, Field(ge=2)] = 20
    lr: Annotated[float, Field(gt=0)] = 1e-3


def run(params: Params) -> dict[str, Any]:
    """Return facts: `losses` and `reference_losses` by step; `worst_deviation_share`, the largest
    relative difference of any step; `reference_fall`, the first reference loss over the last.

    The reference is the same model from the same initial weights, eager, in float32 with
    materialised attention and torch's AdamW.

    Raises:
        Unsupported: this machine cannot do what is asked.
        WrongOutput: a loss is not a positive number: there is nothing to compare.
    """
    import torch

    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = {
        "precision": "fp32", "mode": "eager", "cuda_graph": False, "attention": "naive",
        "optimizer": "torch", "checkpointing": "none",
    }  # fmt: skip
    losses: list[list[float]] = []
    for name, one in (("", params), ("reference ", params.model_copy(update=plain))):
        training = make_training(one, device)
        losses.append([])
        for step in range(params.steps):
            training.step()
            loss = training.loss.item()
            if not 0 < loss < math.inf:  # NaN is not
                raise WrongOutput(f"the {name}loss of step {step + 1} is {loss}, lr {params.lr}")
            losses[-1].append(loss)
        del training
        gc.collect()
    mine, reference = losses
    deviations = [abs(a / b - 1) for a, b in zip(mine, reference, strict=True)]
    return {
        "facts": {
            "losses": mine,
            "reference_losses": reference,
            "worst_deviation_share": max(deviations),
            "reference_fall": reference[0] / reference[-1],
            "last_loss": mine[-1],
            "last_reference_loss": reference[-1],
        }
    }
