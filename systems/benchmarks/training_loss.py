"""Compare the losses of a training configuration with those of eager float32, step by step.

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
PRELOAD = ("torch._dynamo",)  # imported by a process's first optimizer


class Params(TransformerParams):
    """A TransformerLM trained on one fixed batch, compared with eager float32.

    Has all fields of `TransformerParams`.
    """

    steps: Annotated[int, Field(ge=2)] = 20  # training steps
    lr: Annotated[float, Field(gt=0)] = 1e-3  # learning rate


def run(params: Params) -> dict[str, Any]:
    """Train with the given parameters and as the reference; compare the losses.

    The reference is the same model with the same initial weights, in eager float32 with naive
    attention, torch's AdamW and no checkpointing.

    Facts:
        losses, reference_losses: loss of each step.
        worst_deviation_share: largest relative difference of the losses of a step.
        reference_fall: first reference loss divided by the last.
        last_loss, last_reference_loss: losses of the last step.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if a loss is not a positive finite number, so that it cannot be compared.
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
            if not 0 < loss < math.inf:  # true for NaN, too
                raise WrongOutput(
                    f"the {name}loss of step {step + 1} must be a positive finite number, got "
                    f"{loss} (lr {params.lr})"
                )
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
