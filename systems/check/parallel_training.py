"""Check a data-parallel training against a single process that trains on the batches of all ranks.

A few steps of both trainings are run. Losses and gradients are compared in each step. Weights are
compared after the last step. The weights must also be equal on all ranks.

Both trainings are in memory at the same time, so the check must need little memory beyond that: the
single process recomputes its blocks in backward, and its gradients exist only after backward of the
data-parallel training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from systems.benchmark import WrongOutput, round_options
from systems.check.attention_accuracy import check_attention
from systems.check.problems import above, listed, named_gradients, named_parameters
from systems.checkpointing import every_k_blocks
from systems.dtypes import TORCH_DTYPES
from systems.external.attention import PROBE_LENGTH
from systems.external.reference import is_reference
from systems.measure.ranks import all_gather_objects
from systems.training.parallel_params import ParallelParams
from systems.training.parallel_training import ParallelTraining, rank_batch
from systems.training.training import WEIGHT_DECAY, model_attention

CHECK_STEPS = 3  # number of compared steps
# Maximum errors by precision. They are about ten times the errors that were measured on a CPU.
#
# loss        Relative error of the loss of a rank. Largest error of all steps.
# gradient    Relative error of a parameter's gradient. Largest error of all parameters and steps.
#             If two ranks sum their gradients instead of averaging them, the error is 1.
# weights     Root mean square of the difference of all weights after the last step, divided by
#             lr * CHECK_STEPS, which is about the largest change that AdamW can make to a weight.
#             If weights are not updated, the error is 0.6 to 1.
#
# The limits of `weights` are high for this reason: the first updates of AdamW are about lr times
# the sign of the gradient, and rounding can flip the sign of a gradient near zero.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "weights": 5e-2},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "weights": 0.2},
    "bf16": {"loss": 5e-3, "gradient": 5e-2, "weights": 0.3},
    "bf16_master": {"loss": 1e-2, "gradient": 0.1, "weights": 0.3},
}
STEPS_TO_FORGET = 100  # weight of older gradients in AdamW's averages: 0.95^100 = 0.6 %
NEW_SEED = 1_000_000  # added to the seed of the batches that are compared after timing
WeightsOf = Callable[[ParallelTraining], Mapping[str, Tensor]]


def check_own_attention(params: ParallelParams, device: torch.device) -> None:
    """Compare causal attention of the user with float64 on small random inputs.

    Two trainings with the same attention are compared below, which does not show its errors. The
    inputs have the dtype, heads and head_dim of the model. Other attention than the user's is not
    checked.

    Raises:
        Unsupported: if the attention does not support these inputs on this machine.
        WrongOutput: if the output or a gradient is not accurate enough.
    """
    if not is_reference(params.attention):
        return
    attention, like = model_attention(params, device)
    _, heads, seq_len, head_dim = like.shape
    shape = (2, heads, min(seq_len, PROBE_LENGTH), head_dim)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device).to(like.dtype) for _ in range(4)
    )
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    forward = partial(attention, *inputs, is_causal=True)
    dtype = next(key for key, value in TORCH_DTYPES.items() if value == like.dtype)
    check_attention(forward, inputs, dout, True, params.attention, dtype)


def local_gradients(training: ParallelTraining) -> Iterable[tuple[str, Tensor]]:
    """Return names and gradients of a training, as this rank has them."""
    return named_gradients(training.model).items()


def local_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Return the weights of a training by name, as this rank has them."""
    return {name: p.detach() for name, p in named_parameters(training.model).items()}


class Whole(NamedTuple):
    """Functions of a training that return its whole gradients and weights by name, not shards."""

    # Those of the data-parallel training, one at a time, after they are averaged
    gradients: Callable[[ParallelTraining], Iterable[tuple[str, Tensor]]]
    weights: WeightsOf  # of the data-parallel training
    expected_weights: WeightsOf = local_weights  # of the single process


LOCAL = Whole(local_gradients, local_weights)  # for trainings without shards


def check_parallel(
    training: ParallelTraining, alone: ParallelTraining, whole: Whole = LOCAL
) -> dict[str, float]:
    """Compare a data-parallel training with a training on one process.

    Runs a few steps of both, which must still have their initial weights. All ranks must call this
    function. In each step, `alone` trains on the batches of all ranks, without communication.

    Returns:
        The errors of this rank: loss, gradient and weights, see TOLERANCE.

    Raises:
        WrongOutput: on all ranks, if an error of any rank is above TOLERANCE, or if a weight of any
            rank is not bitwise equal to that of rank 0.
    """
    params = alone.params
    rank_tokens = alone.tokens, alone.targets
    worst: dict[str, float] = {}
    for _ in range(CHECK_STEPS):
        for name, error in _step_errors(training, alone, whole, params).items():
            worst[name] = _worse(worst.get(name, 0.0), error)
        for either in (training, alone):
            either.optimizer_step()
            either.zero_grad()
    alone.tokens, alone.targets = rank_tokens
    worst["weights"] = _weights_error(training, alone, whole, CHECK_STEPS)
    _raise_problems(worst, TOLERANCE[params.precision], whole.weights(training))
    return worst


def check_captured(
    training: ParallelTraining, alone: ParallelTraining, whole: Whole = LOCAL
) -> dict[str, float]:
    """Capture the step of a training, and compare replayed steps with one process.

    Call it after `check_parallel`, which it continues: `alone` takes the steps that are replayed,
    without a graph. Result and exceptions are those of `check_parallel`, without the gradients, and
    those of `ParallelTraining.capture`.
    """
    params, rank_tokens = alone.params, (alone.tokens, alone.targets)
    expected = []
    for _ in range(CHECK_STEPS):
        expected.append(_mean_gradients(alone, params))
        alone.optimizer_step()
        alone.zero_grad()
    alone.tokens, alone.targets = rank_tokens
    # Steps amplify rounding: after 17 of them, correct losses of xl in bf16 differ by 2 %. So the
    # many steps before the capture of torch's DDP must not change the weights.
    training.warm_up(update=False)
    training.capture()
    worst = {"loss": 0.0}
    for loss in expected:
        training.step()
        worst["loss"] = _worse(worst["loss"], abs(training.loss.item() / loss - 1))
    worst["weights"] = _weights_error(training, alone, whole, 2 * CHECK_STEPS)
    weights = whole.weights(training)
    _raise_problems(worst, TOLERANCE[params.precision], weights, when="as a CUDA graph: ")
    return worst


def check_and_capture(
    training: ParallelTraining, alone: ParallelTraining, whole: Whole = LOCAL
) -> dict[str, Any]:
    """Check a training if the round asks for it, and capture both if the parameters ask for it.

    Returns the facts error and graph_error.
    """
    check, graphed, facts = round_options().check, alone.params.cuda_graph, dict[str, Any]()
    if graphed:
        alone.warm_up(update=not check)  # the check compares weights
    if check:
        facts["error"] = check_parallel(training, alone, whole)
    if graphed and check:
        facts["graph_error"] = check_captured(training, alone, whole)
    elif graphed:
        training.capture()
    if graphed:
        alone.capture(training.pool)
    return facts


def _weights_error(
    training: ParallelTraining, alone: ParallelTraining, whole: Whole, steps: int
) -> float:
    """Return the error of the weights after so many steps, see TOLERANCE."""
    weights, expected = whole.weights(training), whole.expected_weights(alone)
    squares = [(weights[name] - e).double().square().sum() for name, e in expected.items()]
    count = sum(e.numel() for e in expected.values())
    difference = (torch.stack(squares).sum() / count).sqrt().item()
    return difference / (alone.params.lr * steps)


def check_again(training: ParallelTraining, alone: ParallelTraining, whole: Whole = LOCAL) -> None:
    """Compare a data-parallel training with a training on one process, after it was timed.

    This detects a wrapper that communicates only in its first steps. The single process gets the
    present weights, and all ranks get new batches in the buffers of the old ones. Then the loss and
    the gradients of one step are compared. All ranks must call this function.

    The optimizer of the single process has another state, so updated weights are not compared with
    it. They must differ from the weights before the step and be equal on all ranks.

    Raises:
        WrongOutput: on all ranks, as `check_parallel`.
    """
    new = alone.params.model_copy(update={"seed": alone.params.seed + NEW_SEED})
    before = _copied_weights(whole.weights(training), alone)
    with torch.no_grad():
        mine = rank_batch(new, training.device, dist.get_rank())
        for buffer, values in zip((training.tokens, training.targets), mine, strict=True):
            buffer.copy_(values)
    errors = _step_errors(training, alone, whole, new)
    alone.zero_grad()
    training.optimizer_step()
    training.zero_grad()
    after = whole.weights(training)
    same = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    _raise_problems(errors, TOLERANCE[new.precision], after, same, "after timing: ")


def check_optimizer_again(training: ParallelTraining) -> None:
    """Check the updates of a sharded optimizer after it was timed, without knowing its state.

    All gradients are set to 1 or -1, for a number of steps after which AdamW has forgotten all
    other gradients. Then a step must change each weight w by -lr * (gradient + weight_decay * w).
    All ranks must call this function. The weights of the training are useless afterwards.

    Raises:
        WrongOutput: on all ranks, if an update differs too much or weights differ between ranks.
    """
    lr = training.params.lr
    generator = torch.Generator(training.device).manual_seed(NEW_SEED)
    parameters = list(training.wrapper.parameters())
    signs = [
        torch.randint(0, 2, p.shape, generator=generator, device=p.device, dtype=torch.int8) * 2 - 1
        for p in parameters
    ]
    before: Mapping[str, Tensor] = {}
    for step in range(STEPS_TO_FORGET):
        if step == STEPS_TO_FORGET - 1:
            before = {name: tensor.clone() for name, tensor in local_weights(training).items()}
        for parameter, sign in zip(parameters, signs, strict=True):
            parameter.grad = sign.to(parameter.dtype)
        training.optimizer_step()
    after = local_weights(training)
    names = {id(p): name for name, p in named_parameters(training.model).items()}
    worst = 0.0
    for parameter, sign in zip(parameters, signs, strict=True):
        name = names[id(parameter)]
        update = (after[name] - before[name]).double() / lr
        expected = -(sign + WEIGHT_DECAY * before[name].double())
        worst = _worse(worst, _relative_error(update, expected))
    training.zero_grad()
    _raise_problems({"update": worst}, {"update": 0.1}, after, when="after timing: ")


def _step_errors(
    training: ParallelTraining, alone: ParallelTraining, whole: Whole, params: ParallelParams
) -> dict[str, float]:
    """Run forward and backward of both trainings, and return the errors of this rank.

    The data-parallel training is first, so that the single process has no gradients during its
    forward. The gradients are read after the single process has computed. Communication that the
    wrapper did not wait for can end in this time: `systems.check.late_gradients` finds this.
    """
    training.forward()
    training.backward()
    training.synchronize_gradients()
    expected_loss = _mean_gradients(alone, params)
    expected = dict(local_gradients(alone))
    errors = {"loss": abs(training.loss.item() / expected_loss - 1), "gradient": 0.0}
    for name, gradient in whole.gradients(training):
        errors["gradient"] = _worse(errors["gradient"], _relative_error(gradient, expected[name]))
    return errors


def _mean_gradients(alone: ParallelTraining, params: ParallelParams) -> float:
    """Compute the mean gradients of the batches of all ranks. Return the loss of this rank."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    loss = 0.0
    # Save only the inputs of the blocks in forward.
    policy, alone.model.apply_blocks = alone.model.apply_blocks, every_k_blocks(1)
    for other in range(world_size):
        alone.tokens, alone.targets = rank_batch(params, alone.device, other)
        alone.forward()
        if other == rank:
            loss = alone.loss.item()
        alone.backward()
    alone.model.apply_blocks = policy
    torch._foreach_div_([gradient for _, gradient in local_gradients(alone)], world_size)
    return loss


def _relative_error(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm().clamp_min(1e-20)).item()


def _copied_weights(weights: Mapping[str, Tensor], alone: ParallelTraining) -> dict[str, Tensor]:
    """Copy weights by name into a training without communication, and return the copies.

    A parameter of `alone` with the dtype of the weight is the copy, so that no more memory is
    needed. Copies are valid until `alone` is updated.
    """
    copies = {}
    with torch.no_grad():
        for name, parameter in alone.model.named_parameters():
            parameter.copy_(weights[name])
            is_exact = parameter.dtype == weights[name].dtype
            copies[name] = parameter.detach() if is_exact else weights[name].clone()
    return copies


def _worse(worst: float, error: float) -> float:
    """Return the larger of two errors, or NaN if one is NaN, unlike max()."""
    return worst if error <= worst or math.isnan(worst) else error


def _different(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that differ from rank 0, bitwise. All ranks must call it."""
    different = []
    for name, tensor in weights.items():
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            different.append(name)
    return different


def _raise_problems(
    errors: Mapping[str, float],
    limits: Mapping[str, float],
    weights: Mapping[str, Tensor],
    unchanged: Sequence[str] = (),
    when: str = "",
) -> None:
    """Raise WrongOutput with the problems of all ranks, on all ranks, which must all call it.

    A problem is an error above its limit, a weight that differs from rank 0, or one that a step did
    not change.
    """
    found = {
        "error against one process that trains on all batches is too large": above(errors, limits),
        "weights differ from rank 0": _different(weights),
        "a step did not change weights": unchanged,
    }
    problems = [f"{what}: {listed(names)}" for what, names in found.items() if names]
    by_rank = all_gather_objects(problems)
    if any(by_rank):
        told = "; ".join(f"rank {r}: {p}" for r, ps in enumerate(by_rank) for p in ps)
        raise WrongOutput(f"{when}{told}")
