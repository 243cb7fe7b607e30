"""The Transformer's arithmetic: cases worked by hand, and what torch counts and saves itself."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from systems import accounting
from systems.accounting import TransformerSize
from systems.kernels.flash_attention import ATTENTIONS
from systems.model import TransformerLM, cross_entropy

SIZE = TransformerSize(24, 40, 3, 3, vocab_size=50)
BATCH, CONTEXT = 2, 14
TOKENS = BATCH * CONTEXT
HAND = TransformerSize(4, 3, 64, 2, vocab_size=10)  # worked by hand below


# ---- by hand -------------------------------------------------------------------------------------


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
    assert accounting.transformer_parameters(accounting.MODEL_SIZES[name]) == count


def test_flops_by_hand():
    # T = 2 * 5. A block: 2 T (4 * 16 + 3 * 4 * 3) = 2000, QK^T and PV 4 * T * 5 * 4 = 800; 64 of
    # them 179,200; the head 2 T * 4 * 10 = 800.
    forward = 180_000
    by_phase = {
        phase: accounting.transformer_flops(phase, HAND, 2, 5)
        for phase in ("forward", "backward", "forward_backward", "train_step")
    }
    assert by_phase == {
        "forward": forward,
        "backward": 2 * forward,
        "forward_backward": 3 * forward,
        "train_step": 3 * forward,
    }


def test_state_bytes_by_hand():
    n = 64 * (64 + 36 + 8) + 2 * 40 + 4
    assert accounting.transformer_parameters(HAND) == n
    # weights, gradients, AdamW's two moments (and the master weights)
    bytes_each = {
        "fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16": (4, 4, 8), "fp16": (4, 4, 8),
        "bf16_pure": (2, 2, 4), "bf16_master": (2, 2, 4 + 4 + 4),
    }  # fmt: skip
    for precision, each in bytes_each.items():
        state = accounting.model_state_bytes(HAND, precision)
        assert tuple(state.values()) == tuple(n * one for one in each), precision
    # read p, g, m, v and write p, m, v; with masters: read g, w, m, v and write w, m, v, p
    moved = {"fp32": 7 * 4, "bf16": 7 * 4, "bf16_pure": 7 * 2, "bf16_master": 2 + 12 + 12 + 2}
    for precision, each in moved.items():
        assert accounting.optimizer_step_bytes(HAND, precision) == n * each, precision


def test_residual_stream_by_hand():
    width = {"fp32": 4, "tf32": 4, "bf16": 4, "fp16": 4, "bf16_pure": 2, "bf16_master": 2}
    for precision, each in width.items():
        assert accounting.residual_stream_bytes(HAND, 3, 5, precision) == 3 * 5 * 4 * each


def test_saved_bytes_of_a_block_by_hand():
    # One token in fp32, fused: norms 2 (2 * 16 + 4), their outputs 2 * 16, attention's output 16,
    # gate, up, silu, product 4 * 12, q and k 32, q, k and v before RoPE 48, log-sum-exp 2 * 4.
    fused = accounting.block_saved_bytes(HAND, 1, 1, "fp32", "fused")
    assert sum(fused.values()) == 72 + 32 + 16 + 48 + 32 + 48 + 8 == 256
    # Materialised, 3 tokens: instead of the last three, q, k, v 3 * 48, softmax 2 * 9 * 4, mask 9.
    naive = accounting.block_saved_bytes(HAND, 1, 3, "fp32", "materialised")
    assert sum(naive.values()) == 3 * (72 + 32 + 16 + 48) + 144 + 72 + 9
    # bf16: norms as before, the rest half; autocast has the softmax in float32 and in bf16.
    pure = accounting.block_saved_bytes(HAND, 1, 3, "bf16_pure", "materialised")
    assert sum(pure.values()) == 3 * (72 + 16 + 8 + 24) + 72 + 36 + 9
    cast = accounting.block_saved_bytes(HAND, 1, 3, "bf16", "materialised")
    assert sum(cast.values()) == sum(pure.values()) + 72


def test_activations_by_hand():
    # 5 tokens, fused, 256 a token and block; final norm 36 and its output 16, loss 10 * 4
    def activations(every: int) -> int:
        return accounting.activation_bytes(HAND, 1, 5, "fp32", "fused", every)

    end = 5 * (36 + 16 + 40)
    assert activations(0) == 64 * 5 * 256 + end
    # an input of 16 a token in front of every k-th block, and k blocks at once
    assert activations(1) == 5 * (64 * 16 + 256) + end
    assert activations(3) == 5 * (22 * 16 + 3 * 256) + end
    assert activations(100) == 5 * (16 + 64 * 256) + end


def test_best_checkpoint_interval_by_hand():
    # A block saves 256 bytes a token and its input has 16: (64 / k) * 16 + k * 256 is least where
    # k = sqrt(64 * 16 / 256) = 2.
    assert accounting.best_checkpoint_interval(HAND, 1, 5, "fp32", "fused") == 2
    one = TransformerSize(4, 3, 1, 2, vocab_size=10)
    assert accounting.best_checkpoint_interval(one, 1, 5, "fp32", "fused") == 1


@pytest.mark.parametrize("name", ["small", "xl", "2.7b"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("attention", ["materialised", "fused"])
def test_best_checkpoint_interval_by_brute_force(name, precision, attention):
    """Walk through backward segment by segment, summing what is alive in each."""
    size = accounting.MODEL_SIZES[name]
    point = (size, 4, 512, precision)
    block = sum(accounting.block_saved_bytes(*point, attention).values())
    if precision == "bf16":  # autocast's copies of the block's weights
        block += 2 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff)
    residual = accounting.residual_stream_bytes(*point)
    peaks = {}
    for k in range(1, size.num_layers + 1):
        starts = range(0, size.num_layers, k)
        alive = []
        for i, start in enumerate(starts):
            in_segment = min(k, size.num_layers - start)
            alive.append((i + 1) * residual + in_segment * block)
        peaks[k] = max(alive)
    best = accounting.best_checkpoint_interval(*point, attention)
    # The formula adds a full segment to all inputs, which a short last segment does not reach.
    assert peaks[best] <= min(peaks.values()) + residual
    least = {k: accounting.activation_bytes(*point, attention, k) for k in peaks}
    assert least[best] == min(least.values())
    assert all(least[k] > least[best] for k in range(1, best))  # the smallest of equals


@pytest.mark.parametrize(
    ("context_length", "precision", "published_gib", "within"),
    [
        (128, "fp32", 51.44, 0.02),
        (128, "bf16", 51.44, 0.02),
        (256, "fp32", 51.44, 0.02),
        (256, "bf16", 52.09, 0.03),
        # temporaries of backward, which are left out, grow with the context
        (512, "bf16", 62.69, 0.05),
    ],
)
def test_peak_of_a_training_step_is_near_what_others_published(
    context_length, precision, published_gib, within
):
    """docs/published/peak_memory.csv: the 2.7b model, batch 4, on one NVIDIA H800."""
    peak = accounting.peak_memory_bytes(
        "train_step", accounting.MODEL_SIZES["2.7b"], 4, context_length, precision, "materialised"
    )
    assert peak / 2**30 == pytest.approx(published_gib, rel=within)
    assert peak / 2**30 < published_gib  # what stays is less than all


def test_peak_by_hand():
    n = accounting.transformer_parameters(HAND)

    def peak(phase: str, batch_size: int) -> int:
        return accounting.peak_memory_bytes(phase, HAND, batch_size, 5, "fp32", "fused")

    activations = 5 * (64 * 256 + 92)
    assert peak("forward", 1) == 4 * n + activations
    assert activations > 4 * n  # more than the gradients take
    assert peak("train_step", 1) == 4 * n + 8 * n + activations
    one = accounting.peak_memory_bytes("train_step", HAND, 1, 1, "fp32", "fused")
    assert one == 4 * n + 8 * n + 4 * n  # one token saves less than the gradients take


def test_a_phase_without_a_peak_is_an_error():
    with pytest.raises(ValueError, match="phase: given 'backward', valid are forward and train"):
        accounting.peak_memory_bytes("backward", HAND, 1, 1, "fp32", "fused")


# ---- against torch -------------------------------------------------------------------------------


def _model(attention: str, precision: str = "fp32") -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(
        SIZE.vocab_size, CONTEXT, SIZE.d_model, SIZE.num_layers, SIZE.num_heads, SIZE.d_ff,
        attention=ATTENTIONS[attention],
    )  # fmt: skip
    if precision == "bf16_pure":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model


def _batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(SIZE.vocab_size, (2, BATCH, CONTEXT))
    return ids[0], ids[1]


def test_flops_are_those_that_torch_counts():
    model = _model("naive")
    tokens, targets = _batch()
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(tokens), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    point = (SIZE, BATCH, CONTEXT)
    assert forward.get_total_flops() == accounting.transformer_flops("forward", *point)
    assert backward.get_total_flops() == accounting.transformer_flops("backward", *point)
    with FlopCounterMode(display=False) as both:
        cross_entropy(model(tokens), targets).backward()
    assert both.get_total_flops() == accounting.transformer_flops("train_step", *point)


def _saved_bytes(fn, weights) -> int:
    """Bytes of the storages that autograd keeps of `fn`, each once, `weights` apart."""
    apart = {tensor.untyped_storage().data_ptr() for tensor in weights}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage  # keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fn()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def _autocast(precision: str):
    if precision == "bf16":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


# What a CPU does otherwise than a GPU, in bytes of a block.
SCORES = BATCH * SIZE.num_heads * CONTEXT**2
CPU_DIFFERENCE = {
    ("fp32", "naive"): 0,
    ("bf16_pure", "naive"): 0,
    # autocast leaves the softmax in bf16
    ("bf16", "naive"): -4 * SCORES,
    # in float32 too the output is laid out by head, so the product with `out` copies it
    ("fp32", "sdpa_flash"): 4 * TOKENS * SIZE.d_model,
    ("bf16_pure", "sdpa_flash"): 0,
    ("bf16", "sdpa_flash"): 0,
}
CASTS = 2 * (4 * SIZE.d_model**2 + 3 * SIZE.d_model * SIZE.d_ff)  # autocast's copies of weights


@pytest.mark.parametrize(("precision", "attention"), CPU_DIFFERENCE)
def test_saved_bytes_of_a_block_are_what_autograd_saves(precision, attention):
    model = _model(attention, precision)
    dtype = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    x = torch.randn(BATCH, CONTEXT, SIZE.d_model, dtype=dtype, requires_grad=True)
    with _autocast(precision):
        saved = _saved_bytes(lambda: model.blocks[0](x), [*model.parameters(), *model.buffers()])
    kind = "materialised" if attention == "naive" else "fused"
    counted = accounting.block_saved_bytes(SIZE, BATCH, CONTEXT, precision, kind)
    casts = CASTS if precision == "bf16" else 0
    assert saved == sum(counted.values()) + casts + CPU_DIFFERENCE[precision, attention]


@pytest.mark.parametrize(("precision", "attention"), CPU_DIFFERENCE)
def test_activations_of_the_model_are_what_autograd_saves(precision, attention):
    model = _model(attention, precision)
    tokens, targets = _batch()
    with _autocast(precision):
        saved = _saved_bytes(
            lambda: cross_entropy(model(tokens), targets),
            [*model.parameters(), *model.buffers(), tokens],  # targets share its storage
        )
    kind = "materialised" if attention == "naive" else "fused"
    counted = accounting.activation_bytes(SIZE, BATCH, CONTEXT, precision, kind)
    weight_of_the_loss = 4
    difference = SIZE.num_layers * CPU_DIFFERENCE[precision, attention]
    assert saved == counted + difference + weight_of_the_loss


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_state_is_what_adamw_keeps(precision):
    model = _model("naive", precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, targets = _batch()
    cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    state = accounting.model_state_bytes(SIZE, precision)
    assert sum(p.nbytes for p in model.parameters()) == state["weights"]
    assert (
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == (state["gradients"])
    )
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    assert sum(moment.nbytes for moment in moments) == state["optimizer_state"]


def test_flops_of_the_published_convention():
    """PaLM, appendix B: 6N + 12 LHQT for a token, N without the embedding and the norms."""
    size = accounting.MODEL_SIZES["xl"]
    norms = (2 * size.num_layers + 1) * size.d_model
    weights = accounting.transformer_parameters(size) - norms - size.vocab_size * size.d_model
    a_token = 6 * weights + 12 * size.num_layers * size.d_model * 512
    assert accounting.transformer_flops("train_step", size, 4, 512) == a_token * 4 * 512
    assert math.isclose(a_token, 6 * 1.98e9 + 12 * 48 * 1600 * 512, rel_tol=0.01)
