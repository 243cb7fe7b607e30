"""List what a forward pass saves for backward: each storage once, with the line that saved it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.measure.source_lines import Source, calling_frames, source_of
from systems.measure.state_memory import storage_address, storage_bytes

# Operations that allocate nothing: their outputs are named after their inputs.
_VIEWS = {
    "Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
    "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_CASTS = {"ToCopy"}
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class SavedTensor:
    """A storage that the autograd graph keeps.

    Attributes:
        contributor: the operation that made it, views passed over; `input` for a leaf, `constant`
            for what needs no gradient.
        source: the line that saved it first.
        weight_copy: True if it is a parameter in another dtype, as autocast makes them.
    """

    contributor: str
    source: Source
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    weight_copy: bool


def saved_tensors(forward: Callable[[], object], excluded: Iterable[Tensor]) -> list[SavedTensor]:
    """Return what `forward` saves, in order.

    Args:
        forward: builds a graph, and keeps it.
        excluded: tensors that exist anyway (parameters, buffers, inputs) and are not counted.
    """
    existing = list(excluded)
    seen = {storage_address(tensor) for tensor in existing}
    weights = {
        storage_address(tensor) for tensor in existing if isinstance(tensor, torch.nn.Parameter)
    }
    saved: list[SavedTensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if storage_address(tensor) not in seen:
            seen.add(storage_address(tensor))
            contributor, leaf = _origin(tensor)
            saved.append(
                SavedTensor(
                    contributor,
                    source_of(calling_frames()),
                    tuple(tensor.shape),
                    str(tensor.dtype).removeprefix("torch."),
                    tensor.untyped_storage().nbytes(),
                    leaf is not None and storage_address(leaf) in weights,
                )
            )
        # Not with its history: an output that its own operation saves would keep itself alive.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def block_report(
    forward: Callable[[Tensor], Tensor], block: torch.nn.Module, x: Tensor, top: int = 5
) -> dict[str, Any]:
    """Report what one block saves for backward, and the bytes of its gradients.

    Args:
        forward: applies the block as in training, under autocast say.
        block: its parameters and buffers are not counted.
        x: its input, which is counted if it is saved.
        top: how many contributors to list.

    Returns:
        block_saved_bytes, and the largest of it in `block_saved`; block_weight_copies_bytes, the
        parameters that autocast keeps in 16 bits; block_gradients_bytes, of parameters and input.
    """
    outputs: list[Tensor] = []
    parameters = list(block.parameters())
    saved = saved_tensors(lambda: outputs.append(forward(x)), [*parameters, *block.buffers()])
    own = [tensor for tensor in saved if not tensor.weight_copy]
    total = sum(tensor.saved_bytes for tensor in own)
    gradients = torch.autograd.grad(outputs, [x, *parameters], [torch.ones_like(outputs[0])])
    return {
        "block_saved_bytes": total,
        "block_saved": [
            {
                "contributor": tensor.contributor,
                "source": tensor.source.source,
                "code": tensor.source.code,
                "called_at": tensor.source.called_at,
                "shape": "x".join(map(str, tensor.shape)),
                "dtype": tensor.dtype,
                "saved_bytes": tensor.saved_bytes,
                "share": tensor.saved_bytes / total,
            }
            for tensor in sorted(own, key=lambda tensor: -tensor.saved_bytes)[:top]
        ],
        "block_weight_copies_bytes": sum(t.saved_bytes for t in saved if t.weight_copy),
        "block_gradients_bytes": storage_bytes(gradients),
    }


def _origin(tensor: Tensor) -> tuple[str, Tensor | None]:
    """Return the operation that made the bytes, and the leaf they are a view or cast of, if any."""
    node: Any = tensor.grad_fn
    if node is None:
        return "input" if tensor.requires_grad else "constant", None
    made_by = ""
    while node is not None and node.name() != _LEAF:
        name = re.sub(r"Backward\d+$", "", node.name())
        if name not in _VIEWS:
            made_by = made_by or name
            if name not in _CASTS:
                return made_by, None
        node = node.next_functions[0][0]
    return made_by or "input", None if node is None else node.variable
