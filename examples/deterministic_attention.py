r"""`flash_attention` with bitwise reproducible gradients, measured to see what they cost.

torch's deterministic mode is a setting of the process. Each run has a process of its own, so this
module may switch it on for the runs that import it. In this mode, torch also fills new tensors with
NaN; this is switched off, because it is not a part of attention.

Run these commands in the folder `examples/`. The first one needs no GPU:

    python -m jobs check deterministic_attention.py:deterministic_attention
    python -m jobs.submit sweeps/flash_heads.yaml --out logs/deterministic_attention \
        'implementation=[deterministic_attention.py:deterministic_attention, flash_hopper]'
    python -m aggregate logs/deterministic_attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.flash_attention import flash_attention

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def deterministic_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v; q, k and v are (batch, seq_len, head_dim)."""
    return flash_attention(q, k, v, is_causal)
