"""Measure fully sharded training, with this project's FSDP wrapper or with torch's FSDP2.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/fsdp.yaml --local

Each rank measures the time of a training step, its peak memory, and how many all-gathers
computation does not wait for. Rank 0 keeps one profiled step of every rank in the file
timeline.plot.json, see the benchmark `data_parallel`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import model_validator

from systems import accounting, implementation_sources
from systems.benchmark import Sources, Unsupported, round_options
from systems.external.parameter import Implementation
from systems.external.reference import is_reference
from systems.training.parallel_params import ParallelParams

if TYPE_CHECKING:
    import torch
    from torch import nn

    from systems.measure.profiler.communication_timeline import StepTimeline
    from systems.training.parallel_training import ParallelTraining

VERSION = 1
WARMUP_STEPS = 2  # number of steps before the step whose peak memory is measured
STRATEGIES = ("layers", "blocks", "peer", "fsdp2", "fsdp2_prefetch")


class Params(ParallelParams):
    """Parameters of fully sharded training. Has all fields of `ParallelParams`."""

    # How weights are sharded and gathered:
    #   layers           `systems.parallel.FullyShardedDataParallel`. Each module with weights is
    #                    gathered separately.
    #   blocks           `systems.parallel.FullyShardedDataParallel`. Each Transformer block is
    #                    gathered as a whole.
    #   peer             as blocks, but the ranks of a host copy through each other's memory
    #   fsdp2            torch's fully_shard, applied to each block and to the model
    #   fsdp2_prefetch   as fsdp2, with explicit prefetch of the next two blocks
    #   FILE.py:NAME     a wrapper of your own, see `systems.training.external_wrappers`
    strategy: Annotated[str, Implementation("fsdp", STRATEGIES)]
    # fp32 and tf32 have the same meaning as in `TransformerParams`. With bf16_master, weights are
    # gathered and gradients are reduced in bf16, and torch's AdamW updates float32 shards. The
    # sharded training is compared with a training without sharding, which has bf16 weights and
    # float32 master weights. Only `FusedAdamW` supports master weights, so bf16_master needs
    # optimizer: fused.
    precision: Literal["fp32", "tf32", "bf16_master"] = "fp32"

    @model_validator(mode="after")
    def _compiled_blocks_are_layers(self) -> Self:
        if self.strategy == "layers" and self.mode != "eager":
            raise ValueError(
                f"`strategy: layers` needs `mode: eager`, got `mode: {self.mode}`; use "
                "`strategy: blocks`, which gathers each compiled block as a whole"
            )
        if self.checkpointing == "half_blocks" and self.strategy != "layers":
            raise ValueError(
                "`checkpointing: half_blocks` calls the halves of a block, so hooks of the block "
                "do not gather its weights; use every_k, nested or selective, or `strategy: layers`"
            )
        return self


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer, "fsdp")


def predict(params: Params) -> dict[str, Any]:
    """Predict the bytes that a rank keeps after a step, sends in a step, and uses at the peak.

    The predicted peak is the sum of:

    - the shards of weights and of optimizer state,
    - either the activations or the shards of gradients, whichever take more memory,
    - four times the size of the largest layer, for the gathered weights of three layers and the
      unsharded gradients of one layer.

    Activations and the peak are predicted only without activation checkpointing.
    """
    size, precision, n = params.model_size, params.precision, params.world_size
    shards = accounting.rank_state_bytes("zero3", accounting.model_state_bytes(size, "fp32"), n)
    width = accounting.DTYPE_BYTES[accounting.MATMUL_DTYPE[precision]]
    full = accounting.transformer_parameters(size) * width
    sent = accounting.step_sent_bytes("zero3", {"weights": full, "gradients": full}, n)
    # With bf16_master everything is computed in bf16, so activations are as large as with
    # bf16_pure.
    computed: accounting.Precision = "bf16_pure" if precision == "bf16_master" else precision
    point = (params.batch_size, params.context_length, computed, params.attention_kind)
    activations = accounting.activation_bytes(size, *point)
    d_model = size.d_model
    matrices = [2 * size.d_ff * d_model, size.vocab_size * d_model]
    if params.strategy in ("blocks", "peer", "fsdp2", "fsdp2_prefetch"):
        matrices.append(sum(accounting.block_parameters(size).values()))
    layer = max(matrices) * width
    predicted: dict[str, Any] = {f"{part}_bytes": count for part, count in shards.items()}
    predicted["sent_bytes"] = sum(sent.values())
    if params.checkpointing == "none":
        predicted["activations_bytes"] = activations
        predicted["peak_memory_bytes"] = (
            shards["weights"]
            + shards["optimizer_state"]
            + max(activations, shards["gradients"])
            + 4 * layer
        )
    return predicted


def run(params: Params) -> dict[str, Any]:
    """Check the fully sharded training and measure its steps on this rank.

    Rounds, phases and blocks are those of the benchmark `data_parallel`. train_step is a fully
    sharded step, and alone is a step without sharding and communication. On a GPU the peak memory
    of train_step is measured, too, while no other training is in memory.

    Facts:
        train_step_ms, alone_ms, over_alone, profiled_communication_ms, profiled_exposed_ms,
            overlap_share, error, graph_error: as in the benchmark `data_parallel`.
        gathers, gathers_in_time, gather_wait_ms: see `gather_facts`. They are those of the rank
            with the largest gather_wait_ms. Missing for peer.
        forward_gathers, forward_gathers_in_time, forward_gather_wait_ms: the same of forward.
            Missing with cuda_graph.
        weights_bytes, gradients_bytes, optimizer_state_bytes: memory at the end of a step, each the
            maximum over all ranks.

    Raises:
        Unsupported, WrongOutput, RuntimeError: as in the benchmark `data_parallel`.
    """
    from systems.measure.ranks import rank_process_group

    with rank_process_group(params.backend, params.world_size) as device:
        return measure(params, device)


def measure(params: Params, device: torch.device) -> dict[str, Any]:
    """Check and measure like `run`, in the default process group."""
    import torch.distributed as dist

    from systems.check.parallel_training import (
        check_again,
        check_and_capture,
        check_own_attention,
    )
    from systems.check.sharded_training import gathered
    from systems.measure.ranks import all_gather_objects
    from systems.measure.windows import during
    from systems.training.parallel_timing import (
        alternating_rounds,
        keep_timeline,
        profiled_steps,
        step_facts,
    )
    from systems.training.parallel_training import ParallelTraining, require_peer_memory

    check = round_options().check
    with during("init"):
        check_own_attention(params, device)
        if params.strategy == "peer":
            require_peer_memory(device)
    state, peaks = _memory(params, device)
    gc.collect()
    with during("init"):
        training = sharded_training(params, device)
        alone = ParallelTraining(params, device, dist.get_rank())
    with during("check"):
        errors = check_and_capture(training, alone, gathered(training, alone))
    both = {"train_step": training, "alone": alone}
    samples = alternating_rounds(both, params.rounds, params.steps, params.warmup_steps)
    gathers_of_rank: dict[str, float] = {}
    if check:
        with during("profile"):
            steps = profiled_steps(training)
            samples["communication"] = [step.communication_ms for step in steps]
            samples["exposed"] = [step.exposed_ms for step in steps]
            keep_timeline({params.strategy: all_gather_objects(steps[-1])}, params, device)
        if params.strategy != "peer":  # a trace does not tell which copies gather weights
            gathers_of_rank = gather_facts(steps)
    for either in (training, alone):
        either.drop_graphs()
    if check:
        with during("check"):
            check_again(training, alone, gathered(training, alone))
    states = all_gather_objects(state)
    gathers: list[dict[str, float]] = all_gather_objects(gathers_of_rank)
    waiting = max(gathers, key=lambda of_rank: of_rank.get("gather_wait_ms", 0.0))
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.step_counts(),
        "facts": {
            **step_facts(all_gather_objects(samples)),
            **waiting,
            **{part: max(rank[part] for rank in states) for part in state},
            **errors,
        },
    }


def gather_facts(steps: list[StepTimeline]) -> dict[str, float]:
    """Summarize the all-gathers in the profiled steps of one rank.

    An all-gather is in time if it ends while computation is running. Otherwise computation may have
    waited for it.

    Returns:
        gathers: number of all-gathers per step.
        gathers_in_time: share of them that is in time. Missing if there are none.
        gather_wait_ms: mean waiting time per step, in milliseconds, see `StepTimeline.waits_ms`.
        forward_gathers, forward_gathers_in_time, forward_gather_wait_ms: the same of the
            all-gathers that start in forward. Missing if the steps have no phases.
    """
    facts = {}
    for prefix, phase in (("", None), ("forward_", "forward")):
        if phase is None or all(phase in step.computation for step in steps):
            waits = [wait for step in steps for wait in step.waits_ms("all_gather", phase)]
            facts[f"{prefix}gathers"] = len(waits) / len(steps)
            facts[f"{prefix}gather_wait_ms"] = sum(waits) / len(steps)
            if waits:
                facts[f"{prefix}gathers_in_time"] = waits.count(0) / len(waits)
    return facts


def _memory(params: Params, device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that this rank keeps after a step, and on a GPU the peak of a step."""
    from systems.measure.memory.state_memory import state_bytes
    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.windows import during
    from systems.parallel.peer_memory import live_bytes

    with during("init"):
        training = sharded_training(params, device)
    with during("train_step"):
        for _ in range(WARMUP_STEPS):
            training.step()
    gc.collect()
    peaks = peak_memory_by_phase({"train_step": training.step_keeping_gradients}, training.device)
    peaks = {phase: peak + live_bytes() for phase, peak in peaks.items()}
    return state_bytes(training.wrapper.parameters(), training.optimizer), peaks


def sharded_training(params: Params, device: torch.device) -> ParallelTraining:
    """Return the training of this rank in the wrapper that `params.strategy` selects."""
    import torch
    import torch.distributed as dist

    from systems.model import TransformerBlock, cross_entropy
    from systems.parallel import FullyShardedDataParallel
    from systems.training.external_wrappers import wrap_fsdp
    from systems.training.parallel_training import ParallelTraining

    dtype = None
    updates: dict[str, Any] = {"optimizer": "torch"}
    if params.precision == "bf16_master":  # the wrapper casts its float32 shards to bf16
        dtype, updates["precision"] = torch.bfloat16, "bf16"
    compiled = params.mode == "compiled_blocks"

    def wrap(module: nn.Module) -> nn.Module:
        if is_reference(params.strategy):
            try:
                return wrap_fsdp(params.strategy, module, dtype)
            except NotImplementedError as error:
                raise Unsupported(str(error)) from error
        classes = () if params.strategy == "layers" else (TransformerBlock,)
        peer = params.strategy == "peer"
        return FullyShardedDataParallel(module, dtype, layers=classes, peer_memory=peer)

    if params.strategy in ("layers", "blocks", "peer") or is_reference(params.strategy):
        given = params.model_copy(update=updates)
        return ParallelTraining(given, device, dist.get_rank(), wrap, autocasts=False)
    # The hooks of fully_shard must stay outside of compiled code. So `_fully_shard` wraps each
    # block with torch.compile(block), instead of compiling the block in place with block.compile().
    training = ParallelTraining(
        params.model_copy(update={**updates, "mode": "eager"}),
        device,
        dist.get_rank(),
        lambda module: _fully_shard(module, dtype, device, compiled, params.strategy),
        autocasts=False,
    )
    if compiled:
        training.model.final_norm.compile(fullgraph=True)
        training.cross_entropy = torch.compile(cross_entropy, fullgraph=True)
    return training


def _fully_shard(
    module: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    compiled: bool,
    strategy: str,
) -> nn.Module:
    """Apply torch's FSDP2 to each block and to the model.

    It communicates and computes in `dtype`. None: in that of the weights.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from systems.parallel.fsdp import PREFETCH_LAYERS

    blocks: Any = module.blocks
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for i, block in enumerate(blocks):
        if compiled:
            blocks[i] = block = torch.compile(block, fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    if strategy == "fsdp2_prefetch":
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 1 + PREFETCH_LAYERS]))
            block.set_modules_to_backward_prefetch(
                list(blocks[max(0, i - PREFETCH_LAYERS) : i])[::-1]
            )
    return module
