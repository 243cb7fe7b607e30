"""Activation checkpointing: same results, what is kept, and the number of runs of each block."""

from __future__ import annotations

import math
from collections import Counter
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from systems.checkpointing import ApplyBlocks, every_k_blocks, half_blocks, nested, selective
from systems.model import TransformerLM, cross_entropy
from systems.training.attention_choice import implementation

LAYERS = (1, 2, 5, 8)
VOCAB, CONTEXT, D_MODEL, HEADS, D_FF = 11, 9, 12, 2, 20


class CountedOps(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func] += 1
        return func(*args, **(kwargs or {}))


def _model(num_layers: int, policy: ApplyBlocks | None, attention: str = "naive") -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(
        VOCAB, CONTEXT, D_MODEL, num_layers, HEADS, D_FF, attention=implementation(attention)
    )
    if policy is not None:
        model.apply_blocks = policy
    return model


def _step(model: TransformerLM) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, 2, CONTEXT), generator=generator)
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach()


def _calls(num_layers: int, policy: ApplyBlocks) -> list[int]:
    model = _model(num_layers, policy)
    calls: Counter[int] = Counter()
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    _step(model)
    return [calls[i] for i in range(num_layers)]


def _policies(num_layers: int) -> dict[str, ApplyBlocks]:
    every = {f"every {k}": every_k_blocks(k) for k in range(1, num_layers + 2)}
    return {**every, "nested": nested(), "half_blocks": half_blocks(), "selective": selective()}


@pytest.mark.parametrize(
    ("num_layers", "attention", "autocast"),
    [*zip(LAYERS, cycle(["naive", "sdpa_flash"]), cycle([False])), (3, "naive", True)],
)
def test_loss_and_gradients_are_the_same_bit_for_bit(num_layers, attention, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = _model(num_layers, None, attention)
        loss = _step(plain)
        for name, policy in _policies(num_layers).items():
            model = _model(num_layers, policy, attention)
            assert torch.equal(_step(model), loss), name
            for (part, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad), f"{name}: {part}"


@pytest.mark.parametrize("num_layers", LAYERS)
def test_every_k_computes_each_block_twice(num_layers):
    for k in range(1, num_layers + 2):
        assert _calls(num_layers, every_k_blocks(k)) == [2] * num_layers


@pytest.mark.parametrize("num_layers", [*LAYERS, 16])
def test_nested_computes_a_block_again_for_every_first_half_that_it_is_in(num_layers):
    """Recomputation of a segment stops when the input of its second half is ready.

    So it calls only the blocks of the first half. Then each half is recomputed in the same way.
    """

    def again(blocks: int) -> list[int]:
        if blocks == 1:
            return [1]
        first, second = again(math.ceil(blocks / 2)), again(blocks // 2)
        return [1 + calls for calls in first] + second

    halves = again(math.ceil(num_layers / 2)) + again(num_layers // 2) if num_layers > 1 else [1]
    assert _calls(num_layers, nested()) == [1 + calls for calls in halves]
    assert max(halves) <= max(1, math.ceil(math.log2(num_layers)))


@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
def test_selective_multiplies_by_no_weight_twice(attention):
    def ops(policy: ApplyBlocks | None) -> Counter[Any]:
        with CountedOps() as counted:
            _step(_model(4, policy, attention))
        return counted.ops

    aten = torch.ops.aten
    plain, chosen, all_again = ops(None), ops(selective()), ops(every_k_blocks(1))
    assert chosen[aten.mm.default] == plain[aten.mm.default]
    # 4 matmuls per block; the last one is not recomputed, because backward does not need its output
    assert all_again[aten.mm.default] == plain[aten.mm.default] + 4 * 3
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert chosen[fused] == plain[fused] == (4 if attention == "sdpa_flash" else 0)
    for cheap, in_block in ((aten.rsqrt.default, 2), (aten.silu.default, 1)):
        assert chosen[cheap] == plain[cheap] + 4 * in_block
    assert plain[aten.silu.default] == 4


def _saved_after_forward(policy: ApplyBlocks | None, num_layers: int) -> int:
    model = _model(num_layers, policy)
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(VOCAB, (2, CONTEXT))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = model.apply_blocks(model.blocks, model.token_embedding(tokens))
    assert x.requires_grad
    return sum(s.nbytes() for s in storages.values()) - tokens.nbytes


@pytest.mark.parametrize("num_layers", LAYERS)
def test_forward_keeps_one_input_a_checkpoint(num_layers):
    residual = 2 * CONTEXT * D_MODEL * 4
    for k in range(1, num_layers + 2):
        kept = _saved_after_forward(every_k_blocks(k), num_layers)
        assert kept == math.ceil(num_layers / k) * residual
    assert _saved_after_forward(nested(), num_layers) == min(num_layers, 2) * residual
    assert _saved_after_forward(half_blocks(), num_layers) == 2 * num_layers * residual
    assert _saved_after_forward(None, num_layers) > num_layers * 10 * residual


@pytest.mark.parametrize("k", [0, -3])
def test_k_below_one_is_an_error(k):
    with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
        every_k_blocks(k)
