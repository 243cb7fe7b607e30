"""Check the loss and gradients of a training against float64 with the same weights.

Let g be the gradient of a matrix and e its float64 gradient. Two errors are computed, in which |e|
has a minimum, see `_LEAST_SHARE`:

    gradient    |g - e| / |e|. It detects any kind of error.
    slope       |<g - e, e>| / <e, e>, the relative error of g in the direction of e. Rounding
                hardly changes it. So it detects, even in bfloat16, a gradient that is a few percent
                too large or too small.

Float64 gradients are computed block by block, so that only one block at a time is in float64.

The check uses the initial weights. After several steps on the same batch, a gradient is a small
difference of large terms. Then rounding alone can change it a lot. For example, after 15 steps of a
model with 48 blocks, rounding in bfloat16 changed a gradient by half of its norm.

Benchmarks run this check after their measurements. Some of them time the first step of a process,
so this check must not run earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from systems.benchmark import WrongOutput
from systems.check.problems import above, listed, named_gradients
from systems.kernels.flash_attention.naive import naive
from systems.model import TransformerLM, cross_entropy
from systems.training.training import Training, new_model

# Maximum relative errors by precision. They are about four times the error that rounding causes in
# the worst parameter of models with 3 to 48 blocks; for `slope`, about two times.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "slope": 1e-4},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "slope": 1e-2},
    "fp16": {"loss": 1e-3, "gradient": 2e-2, "slope": 1e-2},
    "bf16": {"loss": 5e-3, "gradient": 1e-1, "slope": 4e-2},
    "bf16_pure": {"loss": 1e-2, "gradient": 2e-1, "slope": 4e-2},
    "bf16_master": {"loss": 1e-2, "gradient": 2e-1, "slope": 4e-2},
}
# Parameters that consist of several stacked matrices. Each matrix is checked separately, because
# its gradient can be much smaller than the gradient of the whole parameter.
_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
# The error of a matrix is divided by the norm of its gradient e, but at least by this share of the
# norm of the whole parameter's gradient. Without this minimum, the division could be by zero: with
# a single token the gradients of q and k are zero.
_LEAST_SHARE = 0.03


def check_training(training: Training) -> dict[str, float]:
    """Check the loss and the gradients at the initial weights against float64.

    Resets the weights to their initial values and clears the optimizer state. Then runs forward and
    backward once.

    Returns:
        The relative error of the loss, and the largest errors of a gradient as defined above, with
        the keys loss, gradient and slope.

    Raises:
        WrongOutput: if an error is above TOLERANCE, if a parameter has no gradient, or if
            `training.loss` is not finite when the function is called.
    """
    last = training.loss.item()
    if not math.isfinite(last):
        raise WrongOutput(f"the loss of the last forward must be finite, got {last}")
    training.zero_grad()
    training.optimizer.state.clear()
    _load_first_weights(training)
    training.forward()
    training.backward()
    named_gradients(training.model)  # raises if one is missing
    loss = training.loss.item()
    training.loss = training.loss.detach()
    scale = training.scaler.get_scale() if training.scaler.is_enabled() else 1.0
    errors: dict[str, float] = {}
    for name, given, exact in _exact(training):
        if given is None:
            errors["loss"] = abs(loss / exact.item() - 1)
            continue
        least = _LEAST_SHARE * exact.norm()
        parts = _PARTS.get(name.rpartition(".")[0].rpartition(".")[2], ("",))
        count = len(parts)
        pieces = zip(parts, (given.double() / scale).chunk(count), exact.chunk(count), strict=True)
        for part, g, e in pieces:
            what = f"{name} {part}".rstrip()
            size = torch.maximum(e.norm(), least)
            errors[f"gradient of {what}"] = ((g - e).norm() / size).item()
            errors[f"slope of {what}"] = (((g - e) * e).sum() / size**2).abs().item()
    limits = TOLERANCE[training.params.precision]
    wrong = above(errors, {what: limits[what.partition(" ")[0]] for what in errors})
    if wrong:
        raise WrongOutput(
            f"relative error of {training.params.precision} training against float64 is too "
            f"large: {listed(wrong)}"
        )
    return {kind: max(e for what, e in errors.items() if what.startswith(kind)) for kind in limits}


@torch.no_grad()
def _load_first_weights(training: Training) -> None:
    first = new_model(training.params, training.device, naive)
    for weight, begin in zip(training.model.parameters(), first.parameters(), strict=True):
        weight.copy_(begin)  # in place, because CUDA graphs read the weights at this address


def _exact(training: Training) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield name, gradient and float64 gradient of each parameter, the last layer first.

    Before them, ("loss", None, float64 loss). The gradients of the training are already computed.
    """
    model = training.model
    one_block = training.params.model_copy(update={"num_layers": 1})
    exact: TransformerLM = new_model(one_block, torch.device("meta"), naive).double()
    exact.to_empty(device=training.device)
    block = exact.blocks[0]
    for name in ("token_embedding", "final_norm", "output_head"):
        exact.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())

    def pairs(prefix: str, mine: nn.Module) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        theirs = model.get_submodule(prefix).parameters()
        for (name, wanted), given in zip(mine.named_parameters(), theirs, strict=True):
            assert isinstance(wanted.grad, Tensor)
            yield f"{prefix}.{name}", given.grad, wanted.grad
            wanted.grad = None

    inputs: list[Tensor] = []
    with torch.no_grad():
        x = exact.token_embedding(training.tokens)
        for other in model.blocks:
            inputs.append(x)
            block.load_state_dict(other.state_dict())
            x = block(x)
    x.requires_grad_()
    loss = cross_entropy(exact.output_head(exact.final_norm(x)), training.targets)
    loss.backward()
    yield "loss", None, loss.detach()
    yield from pairs("output_head", exact.output_head)
    yield from pairs("final_norm", exact.final_norm)
    for i in reversed(range(len(inputs))):
        incoming = x.grad
        x = inputs.pop().requires_grad_()
        block.load_state_dict(model.blocks[i].state_dict())
        block(x).backward(incoming)
        yield from pairs(f"blocks.{i}", block)
    exact.token_embedding(training.tokens).backward(x.grad)
    yield from pairs("token_embedding", exact.token_embedding)
