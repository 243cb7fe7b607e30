"""Whether a training's loss and gradient are right: against the same weights in float64.

Take the direction u that goes along each parameter's own gradient g_p by the same length, and the
loss L in float64. Then

    (L(w + h u) - L(w - h u)) / 2h  =  sum_p |g_p|    for    u = sum_p g_p / |g_p|,

and the gradient of any parameter that points elsewhere, or is too long or too short, breaks it, for
every size of model at the price of two float64 forward passes. It comes after the timing: before
it, it would warm up what the study of warm-up wants cold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from systems.benchmarks.base import WrongOutput
from systems.benchmarks.training import Training, new_model
from systems.kernels.flash_attention import naive
from systems.model import cross_entropy

# Of loss and slope, relative. bf16 and fp16 round every activation, to 2^-9 and 2^-12.
TOLERANCE = {
    "fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 1e-2, "bf16_pure": 4e-2, "bf16_master": 4e-2,
}  # fmt: skip
_STEP = 1e-4  # h: each parameter, of Euclidean norm 10 to 10^3, moves by this


def check_training(training: Training) -> dict[str, float]:
    """Relative errors of loss and of slope at the present weights. Lets the optimizer's state go.

    Raises:
        WrongOutput: one is further off than the precision's tolerance, or a parameter has no
            gradient.
    """
    training.zero_grad()
    training.forward()
    training.backward()
    loss = training.loss.item()
    norms = _gradient_norms(training)
    training.optimizer.state.clear()  # makes room for the float64 weights on a full GPU
    exact_loss, exact_slope = _exact(training, norms)
    scale = training.scaler.get_scale() if training.scaler.is_enabled() else 1.0
    slope = sum(norms) / scale
    errors = {"loss": abs(loss / exact_loss - 1), "slope": abs(slope / exact_slope - 1)}
    limit = TOLERANCE[training.params.precision]
    wrong = [f"{name} {error:.2e}" for name, error in errors.items() if not error <= limit]
    if wrong:
        raise WrongOutput(
            f"relative error against float64 is {', '.join(wrong)}; "
            f"at most {limit:.0e} is right for {training.params.precision}"
        )
    return errors


def _gradient_norms(training: Training) -> list[float]:
    """Euclidean norm of each parameter's gradient, as it is, scaled or not."""
    named = list(training.model.named_parameters())
    without = [name for name, parameter in named if parameter.grad is None]
    if without:
        raise WrongOutput(f"no gradient: {', '.join(without)}")
    gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
    zero = [name for (name, _), norm in zip(named, norms.tolist(), strict=True) if not norm > 0]
    if zero:
        raise WrongOutput(f"a gradient of zero, or not a number: {', '.join(zero)}")
    return norms.tolist()


@torch.no_grad()
def _exact(training: Training, norms: list[float]) -> tuple[float, float]:
    """Loss and its slope along u, in float64, by a central difference."""
    exact = new_model(training.params, torch.device("meta"), naive).double()
    exact.to_empty(device=training.device)
    exact.load_state_dict(training.model.state_dict())
    losses: list[float] = []
    for move in (_STEP, -2 * _STEP):
        pairs = zip(exact.parameters(), training.model.parameters(), norms, strict=True)
        for weight, mine, norm in pairs:
            assert isinstance(mine.grad, Tensor)
            weight.add_(mine.grad.double(), alpha=move / norm)
        losses.append(cross_entropy(exact(training.tokens), training.targets).item())
    return sum(losses) / 2, (losses[0] - losses[1]) / (2 * _STEP)
