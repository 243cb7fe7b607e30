"""Train a Transformer phase by phase, in any precision and mode, on one fixed batch.

training = make_training(params, device)
training.forward(); training.backward(); training.optimizer_step(); training.zero_grad()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from systems.accounting import MATMUL_DTYPE
from systems.benchmark import Unsupported
from systems.checkpointing import every_k_blocks, nested, selective
from systems.dtypes import TORCH_DTYPES
from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason
from systems.model import TransformerLM, cross_entropy
from systems.training.params import TransformerParams

_AUTOCAST = ("bf16", "fp16")  # the precisions that run under autocast
# Steps before a capture: cuBLAS, autotuning and lazy loading allocate in the first.
_GRAPH_WARMUP = 2
BETAS = (0.9, 0.95)


@contextlib.contextmanager
def tf32_matmuls(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in float32 matmuls on CUDA; the former setting is restored at the end.

    torch.compile guards on the setting, and a CUDA graph keeps the kernels that were chosen under
    it: enter this around tracing and capture as well as around what runs.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Training:
    """One fixed batch and the three phases of a step on it.

    Args:
        params: the model, and how it is trained.
        device: where.
        attention: used instead of the one that params names.

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
        attention = attention or ATTENTIONS[params.attention]
        self.model, master = _prepared_model(params, device, attention)
        self.tokens, self.targets = batch(params, device)
        self.optimizer = _optimizer(params, self.model, master)
        self.scaler = torch.amp.GradScaler(device.type, enabled=params.precision == "fp16")
        self.loss = torch.zeros((), device=device)
        self.preparing_seconds = 0.0  # compiling and capturing, before the first step
        self._loss_fn = _loss_function(params, self.model)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of forward; a null context if the precision needs none."""
        precision = self.params.precision
        if precision not in _AUTOCAST:
            return contextlib.nullcontext()
        # A graph would not replay a cast that was cached before the capture.
        cached = not self.params.cuda_graph
        return torch.autocast(self.device.type, TORCH_DTYPES[precision], cache_enabled=cached)

    def matmul_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of forward and backward: TF32 only if the precision says so."""
        return tf32_matmuls(self.params.precision == "tf32")

    def forward(self) -> None:
        """Compute the loss and save what backward needs."""
        with self.matmul_precision(), self.autocast():
            self.loss = self._loss_fn(self.tokens, self.targets)

    def backward(self) -> None:
        """Compute the gradients of the last forward."""
        with self.matmul_precision():
            self.scaler.scale(self.loss).backward()

    def optimizer_step(self) -> None:
        """Update the weights."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Free the gradients, and the graph of a forward without backward."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.loss.detach()

    def step(self) -> None:
        """Run one whole step."""
        self.forward()
        self.backward()
        self.optimizer_step()
        self.zero_grad()


class GraphedTraining(Training):
    """A Training whose phases are three CUDA graphs with a shared memory pool, one launch each.

    Gradients keep their addresses: each replay of backward overwrites them.
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
        """Run on a side stream what will be captured; at the end weights, optimizer state and loss
        scale are as before."""
        scale = self.scaler.state_dict()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_GRAPH_WARMUP):
                super().forward()
                super().backward()
                if self.params.optimizer == "torch":
                    self._create_state()
                # Frees the nodes that accumulate gradients, which remember this stream.
                super().zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        self.scaler.load_state_dict(scale)  # in place: the graphs read its tensors
        torch.cuda.synchronize()

    def _create_state(self) -> None:
        """Take a step with a learning rate of 0: torch's optimizer makes its state in the first."""
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
    """Return a Training, or a GraphedTraining if params ask for CUDA graphs."""
    return (GraphedTraining if params.cuda_graph else Training)(params, device, **kwargs)


def batch(params: TransformerParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random token ids and targets, each (batch_size, context_length)."""
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
    dtype = TORCH_DTYPES[MATMUL_DTYPE[params.precision]]
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
    """Return the model with its initial float32 weights, the same for all precisions and modes."""
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


def _prepared_model(
    params: TransformerParams, device: torch.device, attention: Callable[..., Tensor]
) -> tuple[TransformerLM, dict[nn.Parameter, Tensor]]:
    """Return the model, and float32 master weights of the parameters that are bf16 copies."""
    model = new_model(params, device, attention)
    master: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        if params.precision == "bf16_master" and parameter.ndim > 1:
            master[parameter] = parameter.detach()
        elif params.precision != "bf16_pure":
            # With master weights a norm's gains stay float32: they start at 1, where bf16 has steps
            # of 2^-8, so a copy would stay for many updates and then all gains would jump at once.
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


def optimizer_class_and_options(params: TransformerParams) -> tuple[Any, dict[str, Any]]:
    """Return the class of the optimizer that params names, and its keyword arguments."""
    options: dict[str, Any] = {"lr": params.lr, "betas": BETAS, "weight_decay": 0.01}
    if params.optimizer == "torch":
        return torch.optim.AdamW, {"fused": True, "capturable": params.cuda_graph, **options}
    from systems.kernels.adamw import FusedAdamW

    state_dtype = torch.bfloat16 if params.precision == "bf16_pure" else torch.float32
    return FusedAdamW, {"state_dtype": state_dtype, **options}


def _optimizer(
    params: TransformerParams, model: nn.Module, master: dict[nn.Parameter, Tensor]
) -> Any:
    optimizer_class, options = optimizer_class_and_options(params)
    optimizer = optimizer_class(model.parameters(), **options)
    if master:
        optimizer.load_master(master)
    return optimizer


def _loss_function(
    params: TransformerParams, model: TransformerLM
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (tokens, targets) -> loss, compiled as the mode says."""

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
