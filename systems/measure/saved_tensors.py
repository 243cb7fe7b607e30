"""What a forward pass saves for backward: each storage once, with the line that saved it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.measure.source_lines import Source, calling_frames, source_of
from systems.measure.state_memory import storage_address, storage_bytes

# Operations that make no bytes of their own: what they return is named after what they were given.
_VIEWS = {
    "Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
    "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_CASTS = {"ToCopy"}
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class SavedTensor:
    """A storage that the graph keeps.

    Attributes:
        contributor: the operation that made it, views passed over; `input` for a leaf, `constant`
            for what needs no gradient.
        source: the line that saved it first.
        weight_copy: whether it is a parameter in another dtype, as autocast makes them.
    """

    contributor: str
    source: Source
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    weight_copy: bool


def saved_tensors(forward: Callable[[], object], apart: Iterable[Tensor]) -> list[SavedTensor]:
    """What `forward` saves, in the order in which it did.

    Args:
        forward: builds a graph, and keeps it.
        apart: tensors that are there anyway (parameters, buffers, inputs): not counted.
    """
    there = list(apart)
    seen = {storage_address(tensor) for tensor in there}
    weights = {
        storage_address(tensor) for tensor in there if isinstance(tensor, torch.nn.Parameter)
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
        # With its history, an output that its own operation saves would keep itself alive.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def block_report(
    forward: Callable[[Tensor], Tensor], block: torch.nn.Module, x: Tensor, top: int = 5
) -> dict[str, Any]:
    """What one block saves for backward, and the gradients that it emits.

    Args:
        forward: the block as it is trained, under autocast say.
        block: whose parameters and buffers are not counted.
        x: its input, which is counted where it is saved: no one else keeps it.
        top: how many contributors are listed.

    Returns:
        block_saved_bytes, and the largest of it in `block_saved`; block_weight_copies_bytes, the
        parameters that autocast keeps in 16 bits; block_gradients_bytes, of parameters and input.
    """
    outputs: list[Tensor] = []
    parameters = list(block.parameters())
    kept = saved_tensors(lambda: outputs.append(forward(x)), [*parameters, *block.buffers()])
    own = [tensor for tensor in kept if not tensor.weight_copy]
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
        "block_weight_copies_bytes": sum(t.saved_bytes for t in kept if t.weight_copy),
        "block_gradients_bytes": storage_bytes(gradients),
    }


def _origin(tensor: Tensor) -> tuple[str, Tensor | None]:
    """The operation that made the bytes, and the leaf that they are a view or a cast of, if any."""
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
