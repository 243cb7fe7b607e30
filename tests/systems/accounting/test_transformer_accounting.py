"""FLOPs and memory of the Transformer agree with hand-computed cases and with torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from systems import accounting
from systems.accounting import TransformerSize
from systems.dtypes import TORCH_DTYPES
from systems.model import TransformerLM, cross_entropy
from systems.training.attention_choice import implementation

SIZE = TransformerSize(24, 40, 3, 3, vocab_size=50)
BATCH, CONTEXT = 2, 14
HAND = TransformerSize(4, 3, 64, 2, vocab_size=10)  # for hand-computed cases


# ---- hand-computed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # layers * (4 d^2 + 3 d d_ff + 2 d) + 2 * 10,000 d + d
        ("small", 12 * (2_359_296 + 7_077_888 + 1_536) + 15_360_000 + 768),
        ("medium", 24 * (4_194_304 + 12_582_912 + 2_048) + 20_480_000 + 1_024),
        ("large", 36 * (6_553_600 + 19_660_800 + 2_560) + 25_600_000 + 1_280),
        ("xl", 1_998_235_200),
        ("2.7b", 3_406_809_600),
    ],
)
def test_parameters_of_the_five_sizes(name, count):
    size = accounting.MODEL_SIZES[name]
    assert accounting.transformer_parameters(size) == count
    model = TransformerLM(
        size.vocab_size, 16, size.d_model, size.num_layers, size.num_heads, size.d_ff, device="meta"
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    block = {"attention": 0, "feed_forward": 0, "norms": 0}
    for part, parameter in model.blocks[0].named_parameters():
        stem = part.partition(".")[0]
        block["norms" if stem.endswith("norm") else stem] += parameter.numel()
    assert block == accounting.block_parameters(size)


def test_flops_by_hand():
    # T = 2 * 5 tokens. A block: weights 2 T (4 * 16 + 3 * 4 * 3) = 2000, QK^T and PV
    # 4 * T * 5 * 4 = 800. 64 blocks: 179,200. Output head: 2 T * 4 * 10 = 800.
    forward = 180_000
    phases = ("forward", "backward", "forward_backward", "train_step")
    counted = [accounting.transformer_flops(phase, HAND, 2, 5) for phase in phases]
    assert counted == [forward, 2 * forward, 3 * forward, 3 * forward]


def test_state_bytes_by_hand():
    gains = (64 * 2 + 1) * 4  # of norms
    matrices = 64 * (64 + 36) + 2 * 40
    n = matrices + gains
    assert accounting.transformer_parameters(HAND) == n
    # weights, gradients, AdamW's two moments (and the master weights)
    bytes_each = {
        "fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16": (4, 4, 8), "fp16": (4, 4, 8),
        "bf16_pure": (2, 2, 4), "bf16_master": (2, 2, 4 + 4 + 4),
    }  # fmt: skip
    for precision, each in bytes_each.items():
        # With master weights, gains are float32 and have no master weights.
        of_gains = (4, 4, 8) if precision == "bf16_master" else each
        state = accounting.model_state_bytes(HAND, precision)
        by_hand = tuple(matrices * a + gains * b for a, b in zip(each, of_gains, strict=True))
        assert tuple(state.values()) == by_hand, precision
        of_block = 64 + 36, 2 * 4
        assert accounting.block_gradient_bytes(HAND, precision) == (
            of_block[0] * each[1] + of_block[1] * of_gains[1]
        )
    # Without master weights a step reads p, g, m, v and writes p, m, v. With master weights w, it
    # reads g, w, m, v and writes w, m, v, p. Both are 28 bytes per parameter.
    moved = {"fp32": 7 * 4, "bf16": 7 * 4, "bf16_pure": 7 * 2, "bf16_master": 2 + 12 + 12 + 2}
    for precision, each in moved.items():
        assert accounting.optimizer_step_bytes(HAND, precision) == n * each, precision


def test_residual_stream_by_hand():
    width = {"fp32": 4, "tf32": 4, "bf16": 4, "fp16": 4, "bf16_pure": 2, "bf16_master": 2}
    for precision, each in width.items():
        assert accounting.residual_stream_bytes(HAND, 3, 5, precision) == 3 * 5 * 4 * each


def activations(precision: str, every: int, size: TransformerSize = HAND) -> int:
    """Return the bytes of activations of 5 tokens, with fused attention."""
    return accounting.activation_bytes(size, 1, 5, precision, "fused", every)


def test_activations_by_hand():
    # Fused: 256 bytes per token and block; final norm 36, its output 16, loss 10 * 4
    assert activations("fp32", 0) == 5 * (64 * 256 + 36 + 16 + 40)
    # The input of every k-th block takes 16 bytes per token. When backward has recomputed its first
    # segment, all inputs are in memory; the 256 bytes of the segment's first block include one.
    assert activations("fp32", 1) == 5 * (63 * 16 + 256)
    # The peak is at the last of 21 segments of 3 blocks; the segment after it has only one block.
    assert activations("fp32", 3) == 5 * (20 * 16 + 3 * 256)
    assert activations("fp32", 100) == 5 * 64 * 256


def test_activations_in_16_bits_by_hand():
    # Fused, per token: norms 72 and log-sum-exp 8 as in fp32, half of the other 176 bytes, and the
    # attention output a second time, 8, are 176. Final norm 36, its output 8, loss 40: 84.
    assert activations("bf16_pure", 0) == 5 * (64 * 176 + 84)
    # An input takes 8 bytes per token. The first norm of a segment has a float32 copy of it.
    assert activations("bf16_pure", 1) == 5 * (64 * 8 + 176)
    assert activations("bf16_pure", 3) == 5 * (21 * 8 + 3 * 176)
    # Autocast copies weights, 64 + 36 of a block and 40 of the head. Inputs are float32.
    assert activations("bf16", 0) == 5 * (64 * 176 + 84) + 2 * (64 * 100 + 40)
    assert activations("bf16", 1) == 5 * (63 * 16 + 176) + 2 * 100
    assert activations("bf16", 3) == 5 * (20 * 16 + 3 * 176) + 2 * 3 * 100
    # If forward ends with more: 64 inputs of 8 bytes; final norm 36, its output 8, loss 1000 * 4
    wide = TransformerSize(4, 3, 64, 2, vocab_size=1000)
    assert activations("bf16_pure", 1, wide) == 5 * (64 * 8 + 36 + 8 + 4000)


def test_best_checkpoint_interval_by_hand():
    # A block saves 256 bytes per token and its input has 16. (64 / k) * 16 + k * 256 is smallest at
    # k = sqrt(64 * 16 / 256) = 2.
    assert accounting.best_checkpoint_interval(HAND, 1, 5, "fp32", "fused") == 2
    one = TransformerSize(4, 3, 1, 2, vocab_size=10)
    assert accounting.best_checkpoint_interval(one, 1, 5, "fp32", "fused") == 1


def peak(phase: str, tokens: int, every: int = 0) -> int:
    return accounting.peak_memory_bytes(phase, HAND, 1, tokens, "fp32", "fused", every)


def test_peak_by_hand():
    n = accounting.transformer_parameters(HAND)
    saved = 5 * (64 * 256 + 92)
    assert peak("forward", 5) == 4 * n + saved
    assert saved > 4 * n  # activations are larger than gradients
    assert peak("forward_backward", 5) == 4 * n + saved
    assert peak("train_step", 5) == 4 * n + 8 * n + saved
    # with one token, activations are smaller than gradients
    assert peak("train_step", 1) == 4 * n + 8 * n + 4 * n
    assert peak("forward_backward", 1) == 4 * n + 4 * n


def test_peak_with_checkpoints_by_hand():
    # Forward ends with 64 inputs. With 20 tokens and k = 1, the peak of backward has the remaining
    # inputs, one recomputed block, and gradients: 40 + 4 of the head and 108 per finished block.
    n = accounting.transformer_parameters(HAND)
    assert peak("forward", 20, 1) == 4 * n + 20 * (64 * 16 + 92)
    done = [20 * ((64 - i) * 16 - 16 + 256) + 4 * (44 + 108 * i) for i in range(64)]
    assert max(done) == done[63] > 20 * (64 * 16 + 92)
    assert peak("forward_backward", 20, 1) == 4 * n + max(done)
    assert peak("train_step", 20, 1) == 12 * n + max(done)


def test_a_phase_without_a_peak_is_an_error():
    with pytest.raises(ValueError, match=r"must be one of forward, forward_b.*, got 'backward'"):
        peak("backward", 1)


# ---- against torch -------------------------------------------------------------------------------


def test_torch_and_accounting_give_a_dtype_the_same_size():
    sizes = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
    assert sizes == accounting.DTYPE_BYTES
    assert set(accounting.MATMUL_DTYPE.values()) == set(accounting.DTYPE_BYTES)


def test_flops_are_those_that_torch_counts():
    model = TransformerLM(
        SIZE.vocab_size, CONTEXT, SIZE.d_model, SIZE.num_layers, SIZE.num_heads, SIZE.d_ff,
        attention=implementation("naive"),
    )  # fmt: skip
    tokens, targets = torch.randint(SIZE.vocab_size, (2, BATCH, CONTEXT))
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(tokens), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    point = (SIZE, BATCH, CONTEXT)
    assert forward.get_total_flops() == accounting.transformer_flops("forward", *point)
    assert backward.get_total_flops() == accounting.transformer_flops("backward", *point)
