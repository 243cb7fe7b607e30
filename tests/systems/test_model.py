"""The Transformer agrees with a composition of torch modules, and rejects invalid input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from systems.model import RMSNorm, TransformerLM, cross_entropy
from systems.training.attention_choice import implementation

# Limits of the relative L2 error of outputs and gradients, for 3 blocks.
F32 = torch.float32
TOLERANCE = {torch.float64: 1e-12, F32: 5e-6}
# Unit roundoff: limit of the relative error of one rounding.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# vocab_size, context_length, d_model, num_layers, num_heads, d_ff
SIZES = [(37, 19, 48, 3, 3, 40), (7, 5, 6, 1, 3, 1), (1, 1, 2, 2, 1, 3), (53, 33, 30, 3, 5, 77)]


def _model(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0, **kwargs: Any):
    torch.manual_seed(seed)
    model = TransformerLM(*sizes, dtype=dtype, **kwargs)
    with torch.no_grad():  # gains of 1 would hide a gain that is not applied
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def _tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def _parts(name: str) -> list[str]:
    """Return the names of the matrices that are stacked in a weight."""
    for end, parts in (("qkv.weight", ["q", "k", "v"]), ("gate_up.weight", ["gate", "up"])):
        if name.endswith(end):
            return [name.removesuffix(end) + part for part in parts]
    return [name.removesuffix(".weight")]


def _own_weights(model: TransformerLM) -> dict[str, Tensor]:
    """Return trainable copies of the model's weights, with q, k, v, gate and up split."""
    return {
        part: matrix.clone().requires_grad_()
        for name, value in model.state_dict().items()
        for part, matrix in zip(_parts(name), value.chunk(len(_parts(name))), strict=True)
    }


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = torch.nn.RMSNorm(x.shape[-1], eps=1e-5, dtype=x.dtype)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def _angles(seq_len: int, head_dim: int, theta: float = 10_000.0) -> Tensor:
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)


def _rotated(x: Tensor) -> Tensor:
    angle = _angles(*x.shape[-2:])
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.to(torch.complex64 if x.dtype == torch.float32 else torch.complex128)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def _composed(weights: dict[str, Tensor], sizes: tuple[int, ...], tokens: Tensor) -> Tensor:
    _, _, _, num_layers, num_heads, _ = sizes
    x = F.embedding(tokens, weights["token_embedding"])
    for i in range(num_layers):
        w = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{i}.")
        }
        h = _norm(x, w["attention_norm"])
        q, k, v = (
            F.linear(h, w[f"attention.{part}"]).unflatten(-1, (num_heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        h = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + F.linear(h.transpose(1, 2).flatten(2), w["attention.out"])
        h = _norm(x, w["feed_forward_norm"])
        h = F.silu(F.linear(h, w["feed_forward.gate"])) * F.linear(h, w["feed_forward.up"])
        x = x + F.linear(h, w["feed_forward.down"])
    return F.linear(_norm(x, weights["final_norm"]), weights["output_head"])


def _error(given: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error, or the absolute error if the exact value is zero."""
    size = exact.double().norm().item()
    return (given.double() - exact.double()).norm().item() / (size if size > 1e-30 else 1.0)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    # float32 only with larger sizes: norms over two numbers and gradients of the scores of two
    # tokens may cancel to rounding errors.
    [*((sizes, torch.float64) for sizes in SIZES), (SIZES[0], F32), (SIZES[3], F32)],
)
@pytest.mark.parametrize("shorter", [0, 3])
def test_outputs_and_every_gradient_are_those_of_torchs_own_parts(sizes, dtype, shorter):
    seq_len = max(1, sizes[1] - shorter)
    model = _model(*sizes, dtype=dtype)
    weights = _own_weights(model)
    tokens = _tokens(sizes[0], 2, seq_len)
    logits, exact = model(tokens), _composed(weights, sizes, tokens)
    assert logits.dtype == dtype and logits.shape == (2, seq_len, sizes[0])
    assert _error(logits, exact) <= TOLERANCE[dtype]
    # not from the loss, because its gradient is zero for a vocabulary of one token
    upstream = torch.randn(logits.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    logits.backward(upstream)
    exact.backward(upstream)
    for name, parameter in model.named_parameters():
        names = _parts(name)
        assert parameter.grad is not None
        chunks = parameter.grad.chunk(len(names))
        # The gradient of a part may be zero except for rounding (q and k of a single token). So
        # errors of parts are compared with the norm of the whole gradient.
        whole = torch.cat([weights[part].grad for part in names]).norm().item()
        for part, chunk in zip(names, chunks, strict=True):
            gradient = weights[part].grad
            assert gradient is not None
            apart = (chunk - gradient).norm().item()
            assert apart <= 4 * TOLERANCE[dtype] * max(gradient.norm().item(), 1e-3 * whole), part


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        (torch.bfloat16, 1e-3),
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 3e4),
        (torch.bfloat16, 1e10),  # beyond 1e12 the gradient of float32 rsqrt underflows
        (torch.float16, 1e-2),
        (torch.float16, 1.0),
        (torch.float16, 1e4),  # the square overflows fp16
    ],
)
def test_rms_norm_of_16_bit_activations_of_any_size(dtype, magnitude):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 130, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    norm = RMSNorm(130, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(130, generator=generator, dtype=torch.float64) * 1.5 + 0.5)
    x.requires_grad_()
    out = norm(x)
    exact_x = x.detach().double().requires_grad_()
    exact = _norm(exact_x, norm.weight.detach().double())
    assert out.dtype == dtype
    # A strict bound: one rounding after a few float32 roundings. For subnormal numbers, the error
    # of a rounding is half a step.
    half_a_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    limit = (ROUNDING[dtype] + 2**-20) * exact.abs() + half_a_step
    assert ((out.double() - exact).abs() <= limit).all()
    upstream = torch.randn(exact.shape, generator=generator, dtype=torch.float64).to(dtype)
    out.backward(upstream)
    exact.backward(upstream.double())
    # Gradients below the smallest number of the dtype are lost in any implementation.
    tiny = 130 * torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(
        x.grad.double(),
        exact_x.grad,
        rtol=4 * ROUNDING[dtype],
        atol=tiny + 4 * ROUNDING[dtype] * exact_x.grad.abs().mean().item(),
    )


def test_first_weights_have_the_spread_that_is_meant_and_no_tails():
    d, ff, vocab = 256, 1000, 3000
    torch.manual_seed(0)
    model = TransformerLM(vocab, 8, d, 2, 4, ff)
    spread = {
        "token_embedding.weight": (1.0, 1),
        "output_head.weight": (math.sqrt(2 / (d + vocab)), 1),
        "attention.qkv.weight": (math.sqrt(2 / (d + d)), 3),
        "attention.out.weight": (math.sqrt(2 / (d + d)), 1),
        "feed_forward.gate_up.weight": (math.sqrt(2 / (d + ff)), 2),
        "feed_forward.down.weight": (math.sqrt(2 / (ff + d)), 1),
    }
    # Variance of a normal distribution truncated at 3: 1 - 2 * 3 phi(3) / (2 Phi(3) - 1) = 0.97334
    cut = math.sqrt(0.97334)
    seen = 0
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std, parts = next(value for end, value in spread.items() if name.endswith(end))
        for part in parameter.chunk(parts):
            assert part.std().item() == pytest.approx(cut * std, rel=0.01), name
            assert abs(part.mean().item()) < 5 * std / math.sqrt(part.numel())
            assert 2.9 * std < part.abs().max().item() <= 3 * std
            seen += 1
    assert seen == 2 + 2 * (3 + 1 + 2 + 1)


# ---- tables of RoPE ------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["bfloat16", "double", "to_cpu_half"])
def test_rope_tables_stay_wide_whatever_the_model_is_cast_to(cast):
    # naive, because bfloat16 attention of torch 2.13 on a CPU with AMX raises an error if
    # ATEN_CPU_CAPABILITY selects fewer instructions
    model = TransformerLM(11, 2000, 16, 2, 2, 24, 500.0, attention=implementation("naive"))
    casts = {
        "bfloat16": model.bfloat16,
        "double": model.double,
        "to_cpu_half": lambda: model.to("cpu", torch.float16),
    }
    casts[cast]()
    rope = model.blocks[1].attention.rope
    assert rope is model.blocks[0].attention.rope  # shared by all blocks
    wide = torch.float64 if cast == "double" else torch.float32
    angle = _angles(2000, 8, theta=500.0)
    assert torch.equal(rope.cos, angle.cos().to(wide)) and rope.cos.dtype == wide
    assert torch.equal(rope.sin, angle.sin().to(wide)) and rope.sin.dtype == wide
    logits = model(torch.randint(11, (1, 40)))
    assert logits.dtype == model.output_head.weight.dtype and logits.isfinite().all()


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 8, 10, 1, 3, 8), "d_model must be divisible by num_heads, got 10 and 3"),
        ((10, 8, 15, 1, 3, 8), r"head_dim must be even .*, got 5 \(d_model 15 / num_heads 3\)"),
        ((0, 8, 16, 1, 2, 8), "sizes must be at least 1, got vocab_size 0"),
        ((10, 8, 16, -1, 0, 8), "sizes must be at least 1, got num_layers -1, num_heads 0"),
        ((10, 0, 0, 1, 2, -3), "context_length 0, d_model 0, d_ff -3"),
        ((10, 8, 16, 1, 2, 8, 0.0), "rope_theta must be more than 0, got 0.0"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        TransformerLM(*sizes)


@pytest.mark.parametrize("token_id", [-1, 37, 2**40])
def test_a_token_id_out_of_range_is_named(token_id):
    tokens = _tokens(37, 2, 5)
    tokens[1, 3] = token_id
    with pytest.raises(ValueError, match=rf"token ids must be in 0 to 36, got {token_id}"):
        _model(*SIZES[0])(tokens)


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="at most context_length 19 tokens, got 20"):
        _model(*SIZES[0])(_tokens(37, 2, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cross_entropy_is_taken_in_float32_at_least(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(3, 4, 50, generator=generator, dtype=torch.float64)).to(dtype)
    targets = _tokens(50, 3, 4)
    loss = cross_entropy(logits, targets)
    exact = -torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None]).mean()
    assert loss.shape == () and loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-12 if dtype == torch.float64 else 1e-6)
