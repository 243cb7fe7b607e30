"""List the tensors that a forward pass saves for backward, with the source lines that save them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.measure.memory.source_lines import Source, calling_frames, source_of
from systems.measure.memory.state_memory import storage_address, storage_bytes

# Operations that return views. A saved view is attributed to the operation that made its storage.
_VIEWS = {
    "Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
    "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_CASTS = {"ToCopy"}
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class SavedTensor:
    """Storage of a tensor that a forward pass saves for backward.

    Attributes:
        contributor: autograd operation that created the storage. `input` if the saved tensor is a
            leaf or a view of a leaf. `constant` if the saved tensor does not require a gradient.
        source: source line that saved the storage first.
        shape, dtype: of the tensor for which the storage was first saved.
        saved_bytes: size of the storage in bytes.
        weight_copy: whether the tensor is a copy of a parameter in another dtype, by autocast.
    """

    contributor: str
    source: Source
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    weight_copy: bool


def saved_tensors(forward: Callable[[], object], excluded: Iterable[Tensor]) -> list[SavedTensor]:
    """Run a forward pass; return the storages that it saves for backward, each once, in order.

    `forward` must keep its autograd graph alive. Excluded tensors, such as parameters and buffers,
    are not listed: saving them uses no additional memory.
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
        # Detach the tensor, because an operation that saves its output would otherwise create a
        # reference cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def block_report(
    forward: Callable[[Tensor], Tensor], block: torch.nn.Module, x: Tensor, top: int = 5
) -> dict[str, Any]:
    """Measure the tensors that a block saves for backward, and the gradients of the block.

    `forward` applies the block as in training, for example under autocast. Its input x must require
    a gradient, and counts as a saved tensor if the block saves it. Parameters and buffers of the
    block do not.

    Returns:
        block_saved_bytes: bytes of the saved tensors without copies of parameters.
        block_saved: list of the largest of these.
        block_weight_copies_bytes: bytes of saved copies of parameters in another dtype, which
            autocast makes.
        block_gradients_bytes: bytes of the gradients of the parameters and the input.
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
    """Return the autograd operation that created the storage of a tensor, and a leaf or None.

    The leaf is one from which the tensor was made by views and casts only. A leaf itself has None.
    """
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
