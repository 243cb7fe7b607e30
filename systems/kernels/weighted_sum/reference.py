"""Weighted sum of each row and its gradients in torch.

They are the reference for the kernels, and replace them for float64 and on devices without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum_reference(x: Tensor, w: Tensor) -> Tensor:
    """Return y[...] = sum over i of x[..., i] w[i].

    The sum is computed in float32, or in float64 for float64 inputs. x is (..., d), of any
    floating-point dtype, w (d,), and the result (...), with the same dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * w.to(wide)).sum(-1).to(x.dtype)


def weighted_sum_gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients dx and dw of the weighted sum, from the gradient dy of its result.

        dx[..., i] = dy[...] w[i]
        dw[i] = sum over all rows of dy[...] x[..., i]

    They are computed in float32, or in float64 for float64 inputs. dy is (...), and the gradients
    (..., d) and (d,) have the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    column = dy.to(wide)[..., None]
    dx = column * w.to(wide)
    dw = (column * x.to(wide)).sum(tuple(range(x.ndim - 1))) if x.ndim > 1 else column * x.to(wide)
    return dx.to(x.dtype), dw.to(w.dtype)
