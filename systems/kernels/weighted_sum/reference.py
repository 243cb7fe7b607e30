"""Reference of the weighted-sum kernels in torch, with an explicit gradient.

It is also the fallback on devices without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum_reference(x: Tensor, w: Tensor) -> Tensor:
    """Compute y[...] = sum over d of x[..., d] w[d], at least in float32.

    Args:
        x: (..., d), any float dtype.
        w: (d,), same dtype as x.

    Returns:
        Tensor (...) with the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * w.to(wide)).sum(-1).to(x.dtype)


def weighted_sum_gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute dL/dx and dL/dw from dy = dL/dy, by the chain rule.

        dx[..., d] = dy[...] w[d]
        dw[d] = sum over all rows of dy[...] x[..., d]

    Args:
        dy: (...), same dtype as x.
        x, w: arguments of `weighted_sum_reference`.

    Returns:
        dx (..., d) and dw (d,) with the dtype of x, computed at least in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    column = dy.to(wide)[..., None]
    dx = column * w.to(wide)
    dw = (column * x.to(wide)).sum(tuple(range(x.ndim - 1))) if x.ndim > 1 else column * x.to(wide)
    return dx.to(x.dtype), dw.to(w.dtype)
