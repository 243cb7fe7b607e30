"""Check a parallel training against one process that trains on the batches of all ranks."""

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
# `gradient` is the worst parameter's relative error. `weights` is the root mean square of the
# difference, as a share of lr * steps, about the most that AdamW moves a weight: its first steps
# are the gradient's sign, which rounding turns where it is near zero, and how often it does grows
# with the rounding. Some ten times what was seen on a CPU; weights that are not trained are off by
# 0.6 to 1, gradients that are summed and not averaged by 1.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "weights": 5e-2},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "weights": 0.2},
    "bf16": {"loss": 5e-3, "gradient": 5e-2, "weights": 0.3},
    "bf16_master": {"loss": 1e-2, "gradient": 0.1, "weights": 0.3},
}
MAX_NAMES = 6  # in a message
GradientsOf = Callable[[ParallelTraining], Iterator[tuple[str, Tensor]]]
WeightsOf = Callable[[ParallelTraining], Mapping[str, Tensor]]


def local_gradients(training: ParallelTraining) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of a wrapper that does not shard them, by name."""
    for name, parameter in training.model.named_parameters():
        if parameter.grad is None:
            raise WrongOutput(f"no gradient: {name}")
        yield name, parameter.grad


def local_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Return the weights of a wrapper that does not shard them, by name."""
    return {name: p.detach() for name, p in training.model.named_parameters()}


def check_parallel(
    training: ParallelTraining,
    alone: ParallelTraining,
    gradients_of: GradientsOf = local_gradients,
    weights_of: WeightsOf = local_weights,
    expected_weights_of: WeightsOf = local_weights,
) -> dict[str, float]:
    """Train CHECK_STEPS and compare with `alone`, which trains on the batches of all ranks. Both
    must be at their first weights. A collective.

    Args:
        gradients_of: unsharded gradients by name in the model, after synchronize_gradients.
        weights_of: unsharded weights, likewise.
        expected_weights_of: the weights of `alone`.

    Returns:
        The worst errors of any step: loss, gradient and weights, as TOLERANCE has them.

    Raises:
        WrongOutput: on all ranks: an error is above TOLERANCE, or ranks differ in any bit of any
            weight.
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
    """Take one step of both; relative errors of this rank's loss and of the worst gradient."""
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
    """Return the larger one, or NaN if either is NaN: max() would lose it."""
    return worst if error <= worst or math.isnan(worst) else error


def _root_mean_square_difference(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> float:
    squares = [(weights[name] - e).double().square().sum() for name, e in expected.items()]
    count = sum(e.numel() for e in expected.values())
    return (torch.stack(squares).sum() / count).sqrt().item()


def _different(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of weights that differ in any bit from rank 0's. A collective."""
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
    """Raise WrongOutput on all ranks with the problems of each. A collective."""
    problems = []
    wrong = [
        f"{name} {error:.2e} (at most {limits[name]:.0e})"
        for name, error in errors.items()
        if not error <= limits[name]  # NaN is not
    ]
    if wrong:
        problems.append(f"against one process on all batches: {', '.join(wrong)}")
    if different:
        left = len(different) - MAX_NAMES
        more = f", and {left} more" if left > 0 else ""
        problems.append(f"not the same on all ranks: {', '.join(different[:MAX_NAMES])}{more}")
    by_rank = all_gather_objects(problems)
    if any(by_rank):
        raise WrongOutput("; ".join(f"rank {r}: {p}" for r, ps in enumerate(by_rank) for p in ps))
