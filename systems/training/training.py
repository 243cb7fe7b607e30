"""A Transformer in training, phase by phase, in every precision and mode: what the studies run.

training = make_training(params, device)
training.forward(); training.backward(); training.optimizer_step(); training.zero_grad()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from systems.benchmark import Unsupported
from systems.checkpointing import every_k_blocks, nested, selective
from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason
from systems.model import TransformerLM, cross_entropy
from systems.training.params import TransformerParams

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Steps before a capture: cuBLAS, autotuning and lazy loading allocate in the first.
_GRAPH_WARMUP = 2
BETAS = (0.9, 0.95)


class Training:
    """One fixed batch and the three phases of a step on it.

    Args:
        params: which model, and how it is trained.
        device: where.
        attention: instead of the one that params names.

    Raises:
        Unsupported: this device cannot do what is asked; the message says why.
    """

    def __init__(
        self,
        params: TransformerParams,
        device: torch.device,
        attention: Callable[..., Tensor] | None = None,
    ):
        _check_device(params, device)
        self.params, self.device = params, device
        torch.backends.cuda.matmul.allow_tf32 = params.precision == "tf32"
        attention = attention or ATTENTIONS[params.attention]
        self.model, master = _model(params, device, attention)
        self.tokens, self.targets = batch(params, device)
        self.optimizer = _optimizer(params, self.model, master)
        self.scaler = torch.amp.GradScaler(device.type, enabled=params.precision == "fp16")
        self.loss = torch.zeros((), device=device)
        self.preparing_seconds = 0.0  # spent on compiling and capturing before the first step
        self._loss_fn = _compiled(params, self.model)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What forward runs in."""
        dtype = _AUTOCAST.get(self.params.precision)
        if dtype is None:
            return contextlib.nullcontext()
        # A cast that the cache took from outside of a capture would not be replayed.
        cached = not self.params.cuda_graph
        return torch.autocast(self.device.type, dtype, cache_enabled=cached)

    def forward(self) -> None:
        """Compute the loss, and what backward needs."""
        with self.autocast():
            self.loss = self._loss_fn(self.tokens, self.targets)

    def backward(self) -> None:
        """Compute the gradients of the last forward."""
        self.scaler.scale(self.loss).backward()

    def optimizer_step(self) -> None:
        """Move the weights along the gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Let the gradients go, and the graph of a forward that had no backward."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.loss.detach()

    def step(self) -> None:
        """All of it."""
        self.forward()
        self.backward()
        self.optimizer_step()
        self.zero_grad()


class GraphedTraining(Training):
    """The same as three CUDA graphs that share one pool of memory: a phase is one launch.

    Gradients keep their addresses: each replay of backward writes them anew.
    """

    def __init__(self, params: TransformerParams, device: torch.device, **kwargs: Any):
        super().__init__(params, device, **kwargs)
        started = time.perf_counter()
        self._warm_up()
        pool = torch.cuda.graph_pool_handle()
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        with torch.cuda.graph(self._graphs[0], pool=pool):
            super().forward()
        with torch.cuda.graph(self._graphs[1], pool=pool):
            super().backward()
        if params.optimizer == "fused":
            self.optimizer.prepare()
        with torch.cuda.graph(self._graphs[2], pool=pool):
            super().optimizer_step()
        self.preparing_seconds = time.perf_counter() - started

    def _warm_up(self) -> None:
        """Run what will be captured, on a stream of its own, and leave weights, state and the
        scale of the loss as they were at the start."""
        scale = self.scaler.state_dict()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_GRAPH_WARMUP):
                super().forward()
                super().backward()
                if self.params.optimizer == "torch":
                    self._create_state()
                # With the loss's graph go the nodes that accumulate gradients, and this stream.
                super().zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        self.scaler.load_state_dict(scale)  # in place: the graphs read its tensors
        torch.cuda.synchronize()

    def _create_state(self) -> None:
        """A step that moves nothing: torch's optimizer makes its state in the first."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        super().optimizer_step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def forward(self) -> None:
        self._graphs[0].replay()

    def backward(self) -> None:
        self._graphs[1].replay()

    def optimizer_step(self) -> None:
        self._graphs[2].replay()

    def zero_grad(self) -> None:
        pass


def make_training(params: TransformerParams, device: torch.device, **kwargs: Any) -> Training:
    """A Training, with CUDA graphs where they are asked for."""
    return (GraphedTraining if params.cuda_graph else Training)(params, device, **kwargs)


def batch(params: TransformerParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random token ids and their targets, each (batch_size, context_length)."""
    generator = torch.Generator(device).manual_seed(params.seed)
    shape = (2, params.batch_size, params.context_length)
    ids = torch.randint(params.vocab_size, shape, device=device, generator=generator)
    return ids[0], ids[1]


def _check_device(params: TransformerParams, device: torch.device) -> None:
    if device.type != "cuda":
        if params.cuda_graph:
            raise Unsupported("CUDA graphs need an NVIDIA GPU")
        if params.precision == "tf32":
            raise Unsupported("TF32 is a format of NVIDIA's tensor cores; this is a CPU")
    size = params.model_size
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(params.precision.split("_")[0], torch.float32)
    shape = (1, size.num_heads, params.context_length, size.d_model // size.num_heads)
    probe = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    reason = unsupported_reason(probe, probe, probe, True, params.attention)
    if reason:
        raise Unsupported(reason)


def new_model(
    params: TransformerParams,
    device: torch.device,
    attention: Callable[..., Tensor],
) -> TransformerLM:
    """The model with its first weights, in float32: the same for every precision and mode."""
    size = params.model_size
    torch.manual_seed(params.seed)
    return TransformerLM(
        size.vocab_size,
        params.context_length,
        size.d_model,
        size.num_layers,
        size.num_heads,
        size.d_ff,
        attention=attention,
        device=device,
    )


def _model(
    params: TransformerParams, device: torch.device, attention: Callable[..., Tensor]
) -> tuple[TransformerLM, dict[nn.Parameter, Tensor]]:
    """The model, and the float32 master weights where the model's own are bf16 copies of them."""
    model = new_model(params, device, attention)
    master: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        if params.precision == "bf16_master" and parameter.ndim > 1:
            master[parameter] = parameter.detach()
        elif params.precision != "bf16_pure":
            # With master weights a norm's gains stay float32: they begin at 1, where bf16 moves in
            # steps of 2^-8, and all of a copy's would wait for many updates and then move at once.
            continue
        parameter.data = parameter.data.bfloat16()
    policies = {
        "every_k": lambda: every_k_blocks(params.checkpoint_every),
        "nested": nested,
        "selective": selective,
    }
    if params.checkpointing != "none":
        model.apply_blocks = policies[params.checkpointing]()
    return model, master


def optimizer_of(params: TransformerParams) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer that params names, and what it takes beside parameters."""
    rates: dict[str, Any] = {"lr": params.lr, "betas": BETAS, "weight_decay": 0.01}
    if params.optimizer == "torch":
        return torch.optim.AdamW, {"fused": True, "capturable": params.cuda_graph, **rates}
    from systems.kernels.adamw import FusedAdamW

    state_dtype = torch.bfloat16 if params.precision == "bf16_pure" else torch.float32
    return FusedAdamW, {"state_dtype": state_dtype, **rates}


def _optimizer(
    params: TransformerParams, model: nn.Module, master: dict[nn.Parameter, Tensor]
) -> Any:
    optimizer_class, options = optimizer_of(params)
    optimizer = optimizer_class(model.parameters(), **options)
    if master:
        optimizer.load_master(master)
    return optimizer


def _compiled(
    params: TransformerParams, model: TransformerLM
) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens, targets) -> loss, compiled as far as the mode says."""

    def loss_fn(tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(tokens), targets)

    if params.mode == "compiled":
        return torch.compile(loss_fn, fullgraph=params.checkpointing != "selective")
    if params.mode == "compiled_blocks":
        for block in model.blocks:
            block.compile(fullgraph=True)
        model.final_norm.compile(fullgraph=True)
        compiled_cross_entropy = torch.compile(cross_entropy, fullgraph=True)
        return lambda tokens, targets: compiled_cross_entropy(model(tokens), targets)
    return loss_fn
