"""Check a data-parallel training against a single process that uses the batches of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from systems.benchmark import WrongOutput
from systems.measure.ranks import all_gather_objects
from systems.training.parallel_training import ParallelTraining, rank_batch

CHECK_STEPS = 3
# Maximum errors, about ten times those seen on a CPU. `loss` and `gradient` are relative errors,
# `gradient` that of the worst parameter.
# `weights` is the root mean square of the difference, divided by lr * CHECK_STEPS, which is about
# the largest change that AdamW can make to a weight. The first steps of AdamW are close to lr times
# the sign of the gradient, and rounding can flip the sign of a gradient near zero. So this error is
# large, and it grows with the rounding error. For comparison: weights that are not updated have an
# error of 0.6 to 1, and gradients that two ranks sum instead of average have an error of 1.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "weights": 5e-2},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "weights": 0.2},
    "bf16": {"loss": 5e-3, "gradient": 5e-2, "weights": 0.3},
    "bf16_master": {"loss": 1e-2, "gradient": 0.1, "weights": 0.3},
}
MAX_NAMES = 6  # most names listed in a message
GradientsOf = Callable[[ParallelTraining], Iterator[tuple[str, Tensor]]]
WeightsOf = Callable[[ParallelTraining], Mapping[str, Tensor]]


def local_gradients(training: ParallelTraining) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, gradient) of a wrapper that does not shard gradients.

    Raises:
        WrongOutput: if a parameter has no gradient.
    """
    for name, parameter in training.model.named_parameters():
        if parameter.grad is None:
            raise WrongOutput(f"backward computed no gradient for {name}")
        yield name, parameter.grad


def local_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Return the weights by name, of a wrapper that does not shard them."""
    return {name: p.detach() for name, p in training.model.named_parameters()}


def check_parallel(
    training: ParallelTraining,
    alone: ParallelTraining,
    gradients_of: GradientsOf = local_gradients,
    weights_of: WeightsOf = local_weights,
    expected_weights_of: WeightsOf = local_weights,
) -> dict[str, float]:
    """Train both for CHECK_STEPS steps and compare them. A collective.

    Args:
        training: the data-parallel training, with its initial weights.
        alone: the same training without communication, with its initial weights. It trains on the
            batches of all ranks.
        gradients_of: function that yields the unsharded gradients of `training` with their names in
            the model. It is called after synchronize_gradients.
        weights_of: function that returns the unsharded weights of `training` by name.
        expected_weights_of: function that returns the weights of `alone` by name.

    Returns:
        The errors described at TOLERANCE: the largest `loss` and `gradient` of all steps on this
        rank, and `weights` after the last step.

    Raises:
        WrongOutput: on all ranks, if an error is above TOLERANCE on any rank, or if any weight
            differs from that of rank 0 in any bit.
    """
    params = alone.params
    rank_tokens = alone.tokens, alone.targets
    worst = dict.fromkeys(("loss", "gradient"), 0.0)
    for _ in range(CHECK_STEPS):
        for name, error in _step_errors(training, alone, gradients_of).items():
            worst[name] = _worse(worst[name], error)
    alone.tokens, alone.targets = rank_tokens
    weights = weights_of(training)
    difference = _root_mean_square_difference(weights, expected_weights_of(alone))
    worst["weights"] = difference / (params.lr * CHECK_STEPS)
    _raise_problems(worst, TOLERANCE[params.precision], _different(weights))
    return worst


def _step_errors(
    training: ParallelTraining, alone: ParallelTraining, gradients_of: GradientsOf
) -> dict[str, float]:
    """Take one step of both; return the relative errors of this rank's loss and worst gradient."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    expected_loss = 0.0
    for other in range(world_size):
        alone.tokens, alone.targets = rank_batch(alone.params, alone.device, other)
        alone.forward()
        if other == rank:
            expected_loss = alone.loss.item()
        alone.backward()
    expected = dict(local_gradients(alone))
    torch._foreach_div_(list(expected.values()), world_size)
    training.forward()
    errors = {"loss": abs(training.loss.item() / expected_loss - 1), "gradient": 0.0}
    training.backward()
    training.synchronize_gradients()
    for name, gradient in gradients_of(training):
        norm = expected[name].norm().clamp_min(1e-20)
        error = (gradient - expected[name]).norm() / norm
        errors["gradient"] = _worse(errors["gradient"], error.item())
    for either in (training, alone):
        either.optimizer_step()
        either.zero_grad()
    return errors


def _worse(worst: float, error: float) -> float:
    """Return the larger error, or NaN if one of them is NaN, which max() could drop."""
    return worst if error <= worst or math.isnan(worst) else error


def _root_mean_square_difference(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> float:
    squares = [(weights[name] - e).double().square().sum() for name, e in expected.items()]
    count = sum(e.numel() for e in expected.values())
    return (torch.stack(squares).sum() / count).sqrt().item()


def _different(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that differ from rank 0 in any bit. A collective."""
    different = []
    for name, tensor in weights.items():
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            different.append(name)
    return different


def _raise_problems(
    errors: Mapping[str, float], limits: Mapping[str, float], different: list[str]
) -> None:
    """Raise WrongOutput on all ranks if any rank has a problem. A collective.

    The message lists the problems of all ranks.
    """
    problems = []
    wrong = [
        f"{name} {error:.2e} (at most {limits[name]:.0e})"
        for name, error in errors.items()
        if not error <= limits[name]  # true for NaN, too
    ]
    if wrong:
        problems.append(f"error against one process on all batches: {', '.join(wrong)}")
    if different:
        left = len(different) - MAX_NAMES
        more = f", and {left} more" if left > 0 else ""
        problems.append(f"weights differ from rank 0: {', '.join(different[:MAX_NAMES])}{more}")
    by_rank = all_gather_objects(problems)
    if any(by_rank):
        raise WrongOutput("; ".join(f"rank {r}: {p}" for r, ps in enumerate(by_rank) for p in ps))
