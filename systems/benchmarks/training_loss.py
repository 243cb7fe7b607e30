"""Compare the losses of a training, step by step, with those of a reference in eager float32.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/training_loss.yaml --local
"""

from __future__ import annotations

import gc
import math
from typing import Annotated, Any

from pydantic import Field

from systems import implementation_sources
from systems.benchmark import Sources, WrongOutput
from systems.training.params import TransformerParams

VERSION = 1
PRELOAD = ("torch._dynamo",)


class Params(TransformerParams):
    """Parameters of the training that is compared. Has all fields of `TransformerParams`."""

    steps: Annotated[int, Field(ge=2)] = 20  # number of training steps
    lr: Annotated[float, Field(gt=0)] = 1e-3  # learning rate


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer)


def run(params: Params) -> dict[str, Any]:
    """Train the model twice and compare the losses.

    The first training uses the given parameters. The reference uses eager float32, naive attention,
    torch's AdamW and no activation checkpointing. Both start with the same weights and use the same
    batch in every step.

    Facts:
        losses, reference_losses: loss of each step.
        worst_deviation_share: |loss / reference loss - 1| in the step in which it is largest.
        reference_fall: first reference loss, divided by the last reference loss.
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
