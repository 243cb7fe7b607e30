"""A Transformer in training on several ranks, each with a batch of its own; beside one that does
not communicate, which is what a step is timed against, and what its result is held to.

training = ParallelTraining(params, device, rank, wrap=NaiveDDP)
alone = ParallelTraining(params, device, rank)
errors = check_parallel(training, alone)
samples = alternating_rounds({"train_step": training, "alone": alone}, rounds=5, steps=10)
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from systems.benchmark import WrongOutput, artifacts_folder
from systems.measure.communication_timeline import STEP, StepTimeline, draw_steps, read_steps
from systems.measure.ranks import barrier
from systems.measure.timing import synchronize
from systems.model import cross_entropy
from systems.training.parallel_params import ParallelParams
from systems.training.profiling import step_profiler
from systems.training.training import Training, batch, optimizer_of

CHECK_STEPS = 3
PROFILED_STEPS = 3
# Against one process on the batches of all ranks: `gradient`, the worst parameter's relative error;
# `weights`, the root mean square of their difference, as a share of lr * steps, about the most that
# AdamW moves a weight: its first steps are the gradient's sign, which rounding turns where it is
# near zero, and how often it does grows with the rounding. Some ten times what was seen on a
# processor; weights that are not trained are off by 0.6 to 1, gradients summed by 1.
TOLERANCE = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "weights": 5e-2},
    "tf32": {"loss": 1e-3, "gradient": 2e-2, "weights": 0.2},
    "bf16": {"loss": 5e-3, "gradient": 5e-2, "weights": 0.3},
    "bf16_master": {"loss": 1e-2, "gradient": 0.1, "weights": 0.3},
}
Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[..., Any]  # (parameters) -> Optimizer
Gradients = Callable[["ParallelTraining"], Iterator[tuple[str, Tensor]]]
Weights = Callable[["ParallelTraining"], Mapping[str, Tensor]]


class ParallelTraining(Training):
    """A Training on one rank's batch. Every rank begins with the same weights.

    Args:
        rank: whose batch.
        wrap: what makes the model a parallel one; without it nothing is communicated.
        make_optimizer: of the wrapped model's parameters; the one that params names by default.
        autocasts: whether forward runs under the autocast that the precision asks for; not where
            the wrapper itself casts.
    """

    def __init__(
        self,
        params: ParallelParams,
        device: torch.device,
        rank: int,
        wrap: Wrap | None = None,
        make_optimizer: MakeOptimizer | None = None,
        autocasts: bool = True,
    ):
        super().__init__(params, device)
        self.params: ParallelParams = params
        self._autocasts = autocasts
        self.tokens, self.targets = rank_batch(params, device, rank)
        self.wrapper: nn.Module = self.model
        if wrap is not None:
            self.wrapper = wrap(self.model)
            optimizer_class, options = optimizer_of(params)
            make = make_optimizer or partial(optimizer_class, **options)
            self.optimizer = make(self.wrapper.parameters())
        self.cross_entropy = cross_entropy
        if params.mode == "compiled_blocks":
            self.cross_entropy = torch.compile(cross_entropy, fullgraph=True)
        self._finish = getattr(self.wrapper, "finish_gradient_synchronization", None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return super().autocast() if self._autocasts else contextlib.nullcontext()

    def forward(self) -> None:
        with self.matmul_precision(), self.autocast():
            self.loss = self.cross_entropy(self.wrapper(self.tokens), self.targets)

    def synchronize_gradients(self) -> None:
        """What this project's wrappers want between backward and the optimizer; torch's do it in
        backward."""
        if self._finish is not None:
            self._finish()

    def step_keeping_gradients(self) -> None:
        """All of a step but `zero_grad`."""
        self.forward()
        self.backward()
        self.synchronize_gradients()
        self.optimizer_step()

    def step(self) -> None:
        self.step_keeping_gradients()
        self.zero_grad()


def rank_batch(params: ParallelParams, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """`training.batch` of one rank."""
    return batch(params.model_copy(update={"seed": params.seed + 1 + rank}), device)


# ---- whether it is right -------------------------------------------------------------------------


def own_gradients(training: ParallelTraining) -> Iterator[tuple[str, Tensor]]:
    """Gradients of a wrapper that leaves all of them whole on every rank."""
    for name, parameter in training.model.named_parameters():
        if parameter.grad is None:
            raise WrongOutput(f"no gradient: {name}")
        yield name, parameter.grad


def own_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Weights of a wrapper that leaves all of them whole on every rank."""
    return {name: p.detach() for name, p in training.model.named_parameters()}


def check_parallel(
    training: ParallelTraining,
    alone: ParallelTraining,
    gradients: Gradients = own_gradients,
    weights: Weights = own_weights,
    expected_weights: Weights = own_weights,
) -> dict[str, float]:
    """Train CHECK_STEPS, `alone` on the batches of all ranks; both are at their first weights. A
    collective.

    Args:
        gradients: the whole gradients, after synchronize_gradients, by their names in the model.
        weights: the whole weights, likewise.
        expected_weights: those that `alone` has come to.

    Returns:
        The worst errors of any step: loss, gradient and weights, as TOLERANCE has them.

    Raises:
        WrongOutput: on every rank alike: one is above TOLERANCE, or ranks differ in any bit of any
            weight.
    """
    params, device = alone.params, alone.device
    size, rank = dist.get_world_size(), dist.get_rank()
    own = alone.tokens, alone.targets
    worst = dict.fromkeys(("loss", "gradient", "weights"), 0.0)
    for _ in range(CHECK_STEPS):
        exact = 0.0
        for other in range(size):
            alone.tokens, alone.targets = rank_batch(params, device, other)
            alone.forward()
            if other == rank:
                exact = alone.loss.item()
            alone.backward()
        expected = dict(own_gradients(alone))
        torch._foreach_div_(list(expected.values()), size)
        training.forward()
        worst["loss"] = max(worst["loss"], _relative(training.loss.item(), exact))
        training.backward()
        training.synchronize_gradients()
        for name, given in gradients(training):
            wanted = expected[name]
            error = (given - wanted).norm() / wanted.norm().clamp_min(1e-20)
            worst["gradient"] = _worse(worst["gradient"], error.item())
        for each in (training, alone):
            each.optimizer_step()
            each.zero_grad()
        del expected
    alone.tokens, alone.targets = own
    whole = weights(training)
    squares, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for name, wanted in expected_weights(alone).items():
        squares += (whole[name] - wanted).double().square().sum()
        count += wanted.numel()
    worst["weights"] = (squares / count).sqrt().item() / (params.lr * CHECK_STEPS)
    problems = [
        f"{name} {error:.2e} (at most {TOLERANCE[params.precision][name]:.0e})"
        for name, error in worst.items()
        if not error <= TOLERANCE[params.precision][name]  # NaN is not
    ]
    if problems:
        problems = [f"against one process on all batches: {', '.join(problems)}"]
    different = _different(whole)
    if different:
        more = f", and {len(different) - 6} more" if len(different) > 6 else ""
        problems.append(f"not the same on all ranks: {', '.join(different[:6])}{more}")
    told: list[Any] = [None] * size
    dist.all_gather_object(told, problems)
    if any(told):
        raise WrongOutput("; ".join(f"rank {r}: {p}" for r, ps in enumerate(told) for p in ps))
    return worst


def _relative(given: float, exact: float) -> float:
    return abs(given / exact - 1)


def _worse(worst: float, error: float) -> float:
    """The larger one; NaN stays."""
    return worst if error <= worst else error


def _different(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of those that differ in any bit from rank 0's."""
    different = []
    for name, tensor in weights.items():
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            different.append(name)
    return different


# ---- how long it takes ---------------------------------------------------------------------------


def alternating_rounds(
    trainings: Mapping[str, ParallelTraining], rounds: int, steps: int, warmup_steps: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of a step, one sample a round, of trainings that take turns.

    A round is `steps` steps that follow on, by Python's clock: all ranks begin together, and it
    ends when this rank's GPU has done all of it.
    """
    samples: dict[str, list[float]] = {name: [] for name in trainings}
    for training in trainings.values():
        for _ in range(warmup_steps):
            training.step()
    for _ in range(rounds):
        for name, training in trainings.items():
            barrier(training.device)
            start = time.perf_counter()
            for _ in range(steps):
                training.step()
            synchronize(training.device)
            samples[name].append(round((time.perf_counter() - start) * 1e3 / steps, 6))
    return samples


def profiled_steps(training: ParallelTraining) -> list[StepTimeline]:
    """PROFILED_STEPS as the profiler saw them."""
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "synchronize": training.synchronize_gradients,
        "optimizer": training.optimizer_step,
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with step_profiler(training.device, trace, PROFILED_STEPS) as profiler:
            for _ in range(1 + PROFILED_STEPS):
                barrier(training.device)
                with record_function(STEP):
                    for name, phase in phases.items():
                        with record_function(name):
                            phase()
                    synchronize(training.device)
                training.zero_grad()
                profiler.step()
        return read_steps(trace)


def draw_timeline(
    panels: Mapping[str, Sequence[StepTimeline]], params: ParallelParams, device: torch.device
) -> None:
    """Rank 0 draws steps of all ranks into timeline.png among the run's artifacts."""
    if dist.get_rank() != 0:
        return
    where = torch.cuda.get_device_name() if device.type == "cuda" else "processors, Gloo"
    size = f"{params.size}, batch {params.batch_size} a rank, {params.precision}"
    path = artifacts_folder() / "timeline.png"
    draw_steps(panels, f"A training step of {size}; {where}", path)


def step_facts(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Of one rank's samples of train_step, alone, communication and exposed: medians in
    milliseconds.

    overlap_share: of communication that the profiler saw, the part beside computation.
    """
    middle = {name: statistics.median(of) for name, of in samples.items()}
    facts = {
        "train_step_ms": middle["train_step"],
        "alone_ms": middle["alone"],
        "profiled_communication_ms": middle["communication"],
        "profiled_exposed_ms": middle["exposed"],
    }
    if middle["communication"]:
        facts["overlap_share"] = 1 - middle["exposed"] / middle["communication"]
    return facts


def exposed_facts(facts: Mapping[str, float]) -> dict[str, float]:
    """Of `step_facts` where a step alone computes all that the other one does.

    exposed_ms: a step less one alone; communication_share: of the step, that is.
    """
    exposed = facts["train_step_ms"] - facts["alone_ms"]
    return {"exposed_ms": exposed, "communication_share": exposed / facts["train_step_ms"]}
