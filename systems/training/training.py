"""Train a Transformer on one fixed batch, with a separate method for each phase of a step.

One training step:

    training = make_training(params, device)
    training.forward()
    training.backward()
    training.optimizer_step()
    training.zero_grad()

`training.step()` runs these four methods.
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
from systems.checkpointing import every_k_blocks, half_blocks, nested, selective
from systems.dtypes import TORCH_DTYPES
from systems.kernels.flash_attention.call import Call
from systems.model import TransformerLM, cross_entropy
from systems.training.attention_choice import attention_function
from systems.training.params import TransformerParams

_AUTOCAST = ("bf16", "fp16")  # precisions that run under autocast
# Number of forward and backward passes before CUDA graphs are captured. In the first pass, cuBLAS,
# autotuning and lazy loading allocate memory, which is not allowed during the capture.
_GRAPH_WARMUP = 2
BETAS = (0.9, 0.95)  # betas of AdamW
WEIGHT_DECAY = 0.01  # weight decay of AdamW


@contextlib.contextmanager
def tf32_matmuls(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in float32 matmuls on CUDA, in a `with` block.

    The block must also contain the compilation of the matmuls, because torch.compile compiles again
    if the setting changes, and their capture, because a CUDA graph keeps the kernels of the
    capture.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Training:
    """A model, its optimizer and one fixed batch, with a method for each phase of a step.

    Without `attention`, `params.attention` selects the function.

    Raises:
        Unsupported: if the device does not support the parameters.
    """

    def __init__(
        self,
        params: TransformerParams,
        device: torch.device,
        attention: Callable[..., Tensor] | None = None,
    ):
        _check_device(params, device)
        self.params, self.device = params, device
        attention = attention or model_attention(params, device)[0]
        self.model, master = _prepared_model(params, device, attention)
        self.tokens, self.targets = batch(params, device)
        self.optimizer = _optimizer(params, self.model, master)
        self.scaler = torch.amp.GradScaler(device.type, enabled=params.precision == "fp16")
        self.loss = torch.zeros((), device=device)
        self.preparing_seconds = 0.0  # duration of warm-up and CUDA graph capture, in seconds
        self._loss_fn = _loss_function(params, self.model)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward: autocast for the precisions bf16 and fp16, else none."""
        precision = self.params.precision
        if precision not in _AUTOCAST:
            return contextlib.nullcontext()
        # A cast that autocast has cached before the capture would be missing in the CUDA graph.
        cached = not self.params.cuda_graph
        return torch.autocast(self.device.type, TORCH_DTYPES[precision], cache_enabled=cached)

    def matmul_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward and backward: only precision tf32 allows TF32 in matmuls."""
        return tf32_matmuls(self.params.precision == "tf32")

    def forward(self) -> None:
        """Compute the loss and save the tensors that backward needs."""
        with self.matmul_precision(), self.autocast():
            self.loss = self._loss_fn(self.tokens, self.targets)

    def backward(self) -> None:
        """Compute the gradients of the loss that the last forward computed."""
        with self.matmul_precision():
            self.scaler.scale(self.loss).backward()

    def optimizer_step(self) -> None:
        """Let the optimizer update the weights."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Free the gradients. If forward ran without backward, also free the autograd graph."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.loss.detach()

    def step(self) -> None:
        """Run forward, backward and the optimizer's update, then free the gradients."""
        self.forward()
        self.backward()
        self.optimizer_step()
        self.zero_grad()


class GraphedTraining(Training):
    """A `Training` that captures forward, backward and update as CUDA graphs and replays them.

    The three graphs share a memory pool. Gradients are never freed. Each replay of backward
    overwrites them at the same addresses.
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
        """Run forward and backward on a side stream, before CUDA graphs are captured.

        The optimizer of torch also allocates its state. Weights and loss scale do not change.
        """
        scale = self.scaler.state_dict()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_GRAPH_WARMUP):
                super().forward()
                super().backward()
                if self.params.optimizer == "torch":
                    self._create_state()
                # Free the AccumulateGrad nodes, which would otherwise keep using this stream.
                super().zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        self.scaler.load_state_dict(scale)  # in place, because the CUDA graphs read its tensors
        torch.cuda.synchronize()

    def _create_state(self) -> None:
        """Let torch's optimizer allocate its state in an update with learning rate 0; zero it."""
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
    """Return a `GraphedTraining` if `params.cuda_graph` is true, else a `Training`."""
    return (GraphedTraining if params.cuda_graph else Training)(params, device, **kwargs)


def batch(params: TransformerParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets, each of shape (batch_size, context_length).

    On the same kind of device, the same `params` give the same values.
    """
    generator = torch.Generator(device).manual_seed(params.seed)
    shape = (2, params.batch_size, params.context_length)
    ids = torch.randint(params.vocab_size, shape, device=device, generator=generator)
    return ids[0], ids[1]


def _check_device(params: TransformerParams, device: torch.device) -> None:
    if device.type != "cuda":
        if params.cuda_graph:
            raise Unsupported("CUDA graphs need an NVIDIA GPU; this is a CPU")
        if params.precision == "tf32":
            raise Unsupported("TF32 needs the tensor cores of an NVIDIA GPU; this is a CPU")


def model_attention(
    params: TransformerParams, device: torch.device
) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the attention function of the model, and an uninitialized tensor like its inputs.

    The tensor is (1, heads, context_length, head_dim).

    Raises:
        Unsupported: if the attention does not support these inputs on this machine.
    """
    size = params.model_size
    dtype = TORCH_DTYPES[MATMUL_DTYPE[params.precision]]
    shape = (1, size.num_heads, params.context_length, size.d_model // size.num_heads)
    probe = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    return attention_function(params.attention, probe, probe, probe, Call(True)), probe


def new_model(
    params: TransformerParams,
    device: torch.device,
    attention: Callable[..., Tensor],
) -> TransformerLM:
    """Return a new TransformerLM with its initial float32 weights.

    On the same kind of device, they depend only on the model size and the seed.
    """
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
    """Create the model with the dtypes and the activation checkpointing that `params` selects.

    The second result has the float32 master weight of each bf16 parameter. It is empty unless
    `params.precision` is "bf16_master".
    """
    model = new_model(params, device, attention)
    master: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        if params.precision == "bf16_master" and parameter.ndim > 1:
            master[parameter] = parameter.detach()
        elif params.precision != "bf16_pure":
            # With bf16_master the weights of norms stay in float32. They start at 1, and the next
            # smaller bf16 number is 1 - 2^-8. Many small updates would not change a bf16 weight at
            # all. Then all weights of norms would change by 2^-8 at about the same time.
            continue
        parameter.data = parameter.data.bfloat16()
    policies = {
        "every_k": lambda: every_k_blocks(params.checkpoint_every),
        "half_blocks": half_blocks,
        "nested": nested,
        "selective": selective,
    }
    if params.checkpointing != "none":
        model.apply_blocks = policies[params.checkpointing]()
    return model, master


def optimizer_class_and_options(params: TransformerParams) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer class that `params.optimizer` selects, and its keyword arguments."""
    options: dict[str, Any] = {"lr": params.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
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
    """Return a function (tokens, targets) -> loss, compiled as `params.mode` says."""

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
