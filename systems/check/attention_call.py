"""An attention function and its random inputs, which the benchmark `attention` measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from systems.benchmark import Unsupported
from systems.check.attention_accuracy import (
    AttentionErrors,
    AttentionResult,
    call_once,
    check_attention,
    refill,
    take_gradients,
)
from systems.dtypes import TORCH_DTYPES
from systems.kernels.flash_attention.call import Call, Packing
from systems.kernels.flash_attention.naive import naive
from systems.kernels.flash_attention.reference import AttentionReference, attention_reference
from systems.measure.windows import during
from systems.training.attention_choice import attention_function


class AttentionParams(Protocol):
    """Parameters of the benchmark `attention`, which its class `Params` describes."""

    @property
    def implementation(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window_left(self) -> int | None: ...
    @property
    def window_right(self) -> int | None: ...
    @property
    def alignment(self) -> str: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def packed(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def lengths(self) -> list[tuple[int, int]]: ...
    @property
    def shapes(self) -> list[tuple[int, ...]]: ...


class AttentionCall:
    """An attention function and its random inputs, with a method for each measured phase.

    Call `new_graph` before each `backward`: it runs forward and keeps the autograd graph.

    Raises:
        Unsupported: if the implementation does not support this dtype, shape or device.
    """

    def __init__(self, params: AttentionParams, device: torch.device):
        generator = torch.Generator(device).manual_seed(params.seed)
        dtype = TORCH_DTYPES[params.dtype]
        q, k, v, self.dout = (
            torch.randn(shape, generator=generator, device=device).to(dtype)
            for shape in params.shapes
        )
        if params.packed:  # (heads, rows, head_dim), with the heads of a row together in memory
            q, k, v, self.dout = (x.transpose(0, 1) for x in (q, k, v, self.dout))
        self.inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.params, self.causal = params, params.causal
        self.call = Call(
            self.causal, None, params.window_left, params.window_right,
            params.alignment == "lower_right", params.softcap,
            _packing(params.lengths, device) if params.packed else None,
        )  # fmt: skip
        self.function = _implementation(params, *self.inputs, self.call)
        self._seed = params.seed
        self.out: Tensor | None = None
        self.timed: AttentionResult | None = None  # results of a timed call, in host memory

    def forward(self) -> Tensor:
        return self.function(*self.inputs, is_causal=self.causal)

    def reference(self) -> AttentionReference:
        """Return the float64 result for the present values in the buffers."""
        sequences = [(self.inputs, self.dout)]
        if self.call.packing is not None:
            lengths_q, lengths_k = map(list, zip(*self.params.lengths, strict=True))
            sides = lengths_q, lengths_k, lengths_k, lengths_q
            parts = (x.split(n, -2) for x, n in zip((*self.inputs, self.dout), sides, strict=True))
            sequences = [(tensors[:3], tensors[3]) for tensors in zip(*parts, strict=True)]
        results = [
            attention_reference(*inputs, dout, self.call._replace(packing=None))
            for inputs, dout in sequences
        ]
        if len(results) == 1:
            return results[0]
        columns = zip(AttentionReference._fields, zip(*results, strict=True), strict=True)
        return AttentionReference(
            *(torch.cat(parts, -1 if name == "lse" else -2) for name, parts in columns)
        )

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.dout)

    def forward_backward(self) -> None:
        self.forward().backward(self.dout)

    def phases(self) -> dict[str, tuple[Callable[[], object], Callable[[], None]]]:
        """Return, for each phase, the function to time and the function to call before it."""
        return {
            "forward": (self.forward, self.clear_gradients),
            "backward": (self.backward, self.new_graph),
            "forward_backward": (self.forward_backward, self.clear_gradients),
        }

    def output_and_gradients(self) -> AttentionResult:
        """Run forward and backward without setting `grad` of the inputs."""
        out = self.forward()
        return AttentionResult(out, *torch.autograd.grad(out, self.inputs, self.dout))

    def refill(self, some_rows: bool = False) -> None:
        """Write new values into q, k, v and dout; with some_rows only into some rows."""
        self.out = None
        self.clear_gradients()
        self._seed += 1
        refill((*self.inputs, self.dout), self._seed, some_rows)

    def check(
        self,
        when: str = "",
        result: AttentionResult | None = None,
        exact: AttentionReference | None = None,
    ) -> AttentionErrors:
        """Compare output and gradients with float64, for the present values in the buffers.

        `result` and `exact`, its float64 values, are computed if they are None.

        Raises:
            WrongOutput: if the output or a gradient is not accurate enough.
        """
        result = result or call_once(self.forward, self.inputs, self.dout)
        exact = exact or self.reference()
        names = self.params.implementation, self.params.dtype
        return check_attention(result, self.inputs, self.dout, self.causal, *names, when, exact)

    def compile(self) -> float | None:
        """Call a compiled implementation once; return the seconds. None if it is not compiled."""
        name, device = self.params.implementation, self.dout.device
        compiles = name in ("naive_compiled", "flex")
        if not compiles and not (name == "flash_pytorch" and device.type == "cuda"):
            return None
        started = time.perf_counter()
        self.first(keep=False)
        return time.perf_counter() - started

    def first(self, keep: bool) -> AttentionResult | None:
        """Run forward and backward once, so that the function compiles and allocates what it needs.

        With keep, the results are returned in host memory, because they must not take GPU memory
        during the measurement.
        """
        if keep:
            return call_once(self.forward, self.inputs, self.dout, on_host=True)
        with during("forward"):
            out = self.forward()
        with during("backward"):
            out.backward(self.dout)
        self.clear_gradients()
        return None

    def keep_timed(self) -> None:
        """Keep the results of the last call of `backward`, and of the forward before it."""
        assert self.out is not None
        out = self.out.detach().to("cpu", copy=True)
        self.timed = AttentionResult(out, *take_gradients(self.inputs, on_host=True))

    def clear_gradients(self) -> None:
        for tensor in self.inputs:
            tensor.grad = None

    def new_graph(self) -> None:
        self.out = None  # free the old graph before the new one allocates memory
        self.clear_gradients()
        self.out = self.forward()


def _implementation(
    params: AttentionParams, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> Callable[..., Tensor]:
    if params.implementation == "naive_compiled":
        if not call.is_plain:
            raise Unsupported("naive_compiled has only a causal mask, see `naive` for the others")
        return torch.compile(naive, fullgraph=True, dynamic=False)
    if params.implementation == "naive" and call.is_plain:
        return naive
    return attention_function(params.implementation, q, k, v, call)


def _packing(lengths: Sequence[tuple[int, int]], device: torch.device) -> Packing:
    queries, keys = zip(*lengths, strict=True)
    starts_q, starts_k = (
        torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (queries, keys)
    )
    return Packing(starts_q, starts_k, max(queries), max(keys))
