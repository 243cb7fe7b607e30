"""List the tensors that a forward pass saves for backward, with the source lines that save them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.measure.source_lines import Source, calling_frames, source_of
from systems.measure.state_memory import storage_address, storage_bytes

# Operations that allocate nothing. Their outputs are attributed to the operation before them.
_VIEWS = {
    "Alias", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "T",
    "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_CASTS = {"ToCopy"}
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class SavedTensor:
    """A storage that the autograd graph keeps for backward.

    Attributes:
        contributor: operation that created it, ignoring views; `input` for a leaf, `constant` for a
            tensor that requires no gradient.
        source: source line that saved it first.
        shape, dtype: of the tensor that was saved first.
        saved_bytes: size of the storage.
        weight_copy: True if it is a copy of a parameter in another dtype, as autocast makes.
    """

    contributor: str
    source: Source
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    weight_copy: bool


def saved_tensors(forward: Callable[[], object], excluded: Iterable[Tensor]) -> list[SavedTensor]:
    """Return the storages that `forward` saves for backward, in order, each once.

    Args:
        forward: function that runs a forward pass and keeps its autograd graph alive.
        excluded: tensors that are not counted, because they exist anyway, such as parameters and
            buffers.
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
        # Detach: an output that its own operation saves would be in a reference cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def block_report(
    forward: Callable[[Tensor], Tensor], block: torch.nn.Module, x: Tensor, top: int = 5
) -> dict[str, Any]:
    """Report the tensors that a block saves for backward, and the size of its gradients.

    Args:
        forward: function that applies the block as in training, for example under autocast.
        block: the block. Its parameters and buffers are not counted.
        x: input of the block, which requires a gradient. It is counted if it is saved.
        top: maximum number of contributors to list.

    Returns:
        block_saved_bytes: saved tensors without copies of weights.
        block_saved: the largest contributors to block_saved_bytes.
        block_weight_copies_bytes: copies of parameters that autocast makes in 16 bits.
        block_gradients_bytes: gradients of parameters and input.
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
    """Return the operation that created a tensor's storage, and its leaf or None.

    The leaf is the tensor of which this one is a view or a cast.
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
