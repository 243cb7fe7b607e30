"""RotaryEmbedding: its angles, and the dtype and device of its tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.model import RotaryEmbedding, TransformerLM
from systems.training.attention_choice import implementation


@settings(max_examples=50)
@given(
    head_dim=st.integers(1, 16).map(lambda half: 2 * half),
    positions=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    shift=st.integers(0, 23),
    theta=st.floats(10.0, 1e6),
    seed=st.integers(0, 2**16),
)
def test_rope_depends_on_relative_positions_alone(head_dim, positions, shift, theta, seed):
    rope = RotaryEmbedding(head_dim, 64, theta, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, head_dim, dtype=torch.float64, generator=generator)
    turned_q, turned_k = (rope(x.expand(64, head_dim)) for x in (q, k))
    i, j = positions
    here = turned_q[i] @ turned_k[j]
    there = turned_q[i + shift] @ turned_k[j + shift]
    assert abs(here - there) <= 1e-12 * q.norm() * k.norm()
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("cast", ["bfloat16", "double", "to_cpu_half"])
def test_rope_tables_stay_wide_whatever_the_model_is_cast_to(cast):
    # naive, because bfloat16 attention of torch 2.13 on a CPU with AMX raises an error if
    # ATEN_CPU_CAPABILITY selects fewer instructions
    model = TransformerLM(11, 2000, 16, 2, 2, 24, attention=implementation("naive"))
    casts = {
        "bfloat16": model.bfloat16,
        "double": model.double,
        "to_cpu_half": lambda: model.to("cpu", torch.float16),
    }
    casts[cast]()
    rope = model.blocks[1].attention.rope
    assert rope is model.blocks[0].attention.rope  # shared by all blocks
    wide = torch.float64 if cast == "double" else torch.float32
    assert rope.cos.dtype == rope.sin.dtype == wide
    frequency = 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.outer(torch.arange(2000, dtype=torch.float64), frequency)
    assert torch.equal(rope.cos, angle.cos().to(wide))
    assert torch.equal(rope.sin, angle.sin().to(wide))
    logits = model(torch.randint(11, (1, 40)))
    assert logits.dtype == model.output_head.weight.dtype and logits.isfinite().all()


def test_rope_tables_follow_the_model_from_meta():
    model = TransformerLM(11, 9, 16, 1, 2, 24, device="meta")
    model.to_empty(device="cpu")
    cos = model.blocks[0].attention.rope.cos
    assert torch.equal(cos, TransformerLM(11, 9, 16, 1, 2, 24).blocks[0].attention.rope.cos)
