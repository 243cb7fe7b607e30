"""Check a training's loss and gradients against the same weights in float64.

Each matrix's gradient g is compared with the exact e by two numbers: `gradient`, |g - e| / |e|,
which finds any error, and `slope`, |<g - e, e>| / <e, e>, which rounding hardly changes, so that a
gradient a few percent too long or too short shows even in bfloat16. Exact gradients are computed
one block at a time: no more than one block is in float64 at once.

The check uses the initial weights: after some steps on one batch the gradient is a small difference
of large terms, and rounding alone can change its direction (48 blocks in bfloat16 after 15 steps:
by half its length). It comes after the timing, which must see a cold start where warm-up is
studied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from systems.benchmark import WrongOutput
from systems.kernels.flash_attention import naive
from systems.model import TransformerLM, cross_entropy
from systems.training.training import Training, new_model

# About four times the rounding error of the worst parameter of 3 to 48 blocks (slope: two). 2.7b on
# an H200 reaches a twentieth of it in float32, and a tenth with bf16 copies of master weights.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "slope": 1e-4},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "slope": 1e-2},
    "fp16": {"loss": 1e-3, "gradient": 2e-2, "slope": 1e-2},
    "bf16": {"loss": 5e-3, "gradient": 1e-1, "slope": 4e-2},
    "bf16_pure": {"loss": 1e-2, "gradient": 2e-1, "slope": 4e-2},
    "bf16_master": {"loss": 1e-2, "gradient": 2e-1, "slope": 4e-2},
}
# Matrices stacked in one parameter are checked separately: q's share of the gradient can be small.
_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
# A part with less than this share of its parameter's gradient is compared with this share of it:
# the gradients of q and k are zero for a single token.
_LEAST_SHARE = 0.03


def check_training(training: Training) -> dict[str, float]:
    """Return relative errors at the initial weights: of the loss, and the worst parameter's
    gradient and slope. Resets the weights and clears the optimizer's state.

    Raises:
        WrongOutput: an error is above the precision's tolerance, a parameter has no
            gradient, or the training's last loss is not a number.
    """
    last = training.loss.item()
    if not math.isfinite(last):
        raise WrongOutput(f"the last loss is {last}")
    training.zero_grad()
    training.optimizer.state.clear()
    _load_first_weights(training)
    training.forward()
    training.backward()
    missing = [name for name, p in training.model.named_parameters() if p.grad is None]
    if missing:
        raise WrongOutput(f"no gradient: {', '.join(missing)}")
    loss = training.loss.item()
    training.loss = training.loss.detach()
    scale = training.scaler.get_scale() if training.scaler.is_enabled() else 1.0
    limits = TOLERANCE[training.params.precision]
    worst = {"loss": 0.0, "gradient": 0.0, "slope": 0.0}
    wrong: list[str] = []

    def hold(name: str, what: str, error: float) -> None:
        if not error <= limits[name]:  # NaN is not
            wrong.append(f"{what} {error:.2e} (at most {limits[name]:.0e})")
        worst[name] = max(worst[name], error)

    for name, given, exact in _exact(training):
        if given is None:
            hold("loss", "loss", abs(loss / exact.item() - 1))
            continue
        least = _LEAST_SHARE * exact.norm()
        parts = _PARTS.get(name.rpartition(".")[0].rpartition(".")[2], ("",))
        for part, g, e in zip(
            parts,
            (given.double() / scale).chunk(len(parts)),
            exact.chunk(len(parts)),
            strict=True,
        ):
            what = f"{name} {part}".rstrip()
            size = torch.maximum(e.norm(), least)
            hold("gradient", f"gradient of {what}", ((g - e).norm() / size).item())
            hold("slope", f"slope of {what}", (((g - e) * e).sum() / size**2).abs().item())
    if wrong:
        more = f", and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise WrongOutput(
            f"relative error of {training.params.precision} against float64: "
            f"{', '.join(wrong[:6])}{more}"
        )
    return worst


@torch.no_grad()
def _load_first_weights(training: Training) -> None:
    first = new_model(training.params, training.device, naive)
    for weight, begin in zip(training.model.parameters(), first.parameters(), strict=True):
        weight.copy_(begin)  # in place: CUDA graphs read this address


def _exact(training: Training) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield ("loss", None, the exact loss), then (name, given gradient, exact gradient) of each
    parameter, from the last to the first."""
    model = training.model
    one_block = training.params.model_copy(update={"num_layers": 1})
    exact: TransformerLM = new_model(one_block, torch.device("meta"), naive).double()
    exact.to_empty(device=training.device)
    block = exact.blocks[0]
    ends = {"token_embedding", "final_norm", "output_head"}
    for name in ends:
        exact.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())

    def pairs(prefix: str, mine: nn.Module) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        for (name, wanted), given in zip(mine.named_parameters(), theirs(prefix), strict=True):
            assert isinstance(wanted.grad, Tensor)
            yield f"{prefix}.{name}", given.grad, wanted.grad
            wanted.grad = None

    def theirs(prefix: str) -> Iterator[nn.Parameter]:
        return model.get_submodule(prefix).parameters()

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
