"""Explains a wrong output or gradient of attention by comparing it with common mistakes.

Each mistake is computed in float64. If the wrong tensor equals the tensor with the mistake, the
mistake explains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # out, dq, dk and dv, or some of them
LN2 = math.log(2)


def explain(
    given: Tensor,
    exact: Tensor,
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    is_causal: bool,
    tolerance: float,
) -> str | None:
    """Return what a wrong tensor looks like, or None if no known mistake explains it.

    `given` is (batch, heads, seq_len, head_dim), `exact` is float64, and the name is out, dq, dk or
    dv. Two tensors count as equal up to `tolerance`, a relative L2 error.
    """
    given = given.double()
    if not given.isfinite().all():
        row = int((~given.isfinite()).any(-1).flatten(0, -2).any(0).nonzero()[0])
        return f"the tensor contains NaN or infinity, first in row {row}"
    if not given.any():
        return "nothing is written: the tensor is zero"
    norm = torch.linalg.vector_norm
    if norm(exact) > 1e-9 * norm(dout.double()):  # dq and dk of a single token are zero
        factor = ((given * exact).sum() / exact.square().sum()).item()
        is_scaled = abs(factor - 1) > tolerance and _equal(given, factor * exact, tolerance)
        if is_scaled:
            return _explain_factor(factor, exact.shape[-1])
    for what, tensors in _mistakes(inputs, dout, is_causal):
        wrong = tensors.get(name)
        if wrong is None or wrong.shape != exact.shape or _equal(wrong, exact, 3 * tolerance):
            continue
        if _equal(given, wrong, tolerance):
            return what
    return None


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    norm = torch.linalg.vector_norm
    return bool(norm(a - b) <= tolerance * norm(b))


def _explain_factor(factor: float, head_dim: int) -> str:
    root = math.sqrt(head_dim)
    known = {
        root: f"the scale 1/sqrt(head_dim) is missing: values are {root:.3g} times too large",
        1 / root: f"the scale 1/sqrt(head_dim) is applied twice: values are divided by {root:.3g}",
        -1.0: "the sign is wrong",
        LN2: "a factor of log2(e) is missing: values are multiplied by ln(2)",
        1 / LN2: "the factor log2(e) of exp2 is not removed: values are multiplied by log2(e)",
    }
    for value, what in known.items():
        if abs(factor / value - 1) < 0.02:
            return what
    return f"values are multiplied by {factor:.4g}"


def _mistakes(
    inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, is_causal: bool
) -> Iterator[tuple[str, Tensors]]:
    """Yield descriptions of mistakes, each with the tensors that it makes wrong."""
    q, k, v = (x.detach().double() for x in inputs)
    dout = dout.double()
    n, d = q.shape[-2:]
    everything = torch.ones(n, n, dtype=torch.bool, device=q.device)
    causal = everything.tril()
    mask = causal if is_causal else everything
    scale = 1 / math.sqrt(d)
    same = (q, k, v, dout)
    yield "the scale 1/sqrt(head_dim) is missing", _attention(*same, mask, 1.0)
    yield "the scale is 1/head_dim instead of 1/sqrt(head_dim)", _attention(*same, mask, 1 / d)
    yield (
        "the exponential has base 2: the scores must be multiplied by log2(e)",
        _attention(*same, mask, scale * LN2),
    )
    yield "the scores are multiplied by log2(e)", _attention(*same, mask, scale / LN2)
    if is_causal:
        yield "the causal mask is missing", _attention(*same, everything, scale)
        yield (
            "the causal mask also hides the diagonal: query i must see key i",
            _attention(*same, everything.tril(-1), scale),
        )
        yield (
            "the causal mask lets query i see key i + 1",
            _attention(*same, everything.tril(1), scale),
        )
        yield (
            "the causal mask is transposed: query i sees the keys from i on",
            _attention(*same, everything.triu(), scale),
        )
    else:
        yield (
            "a causal mask is applied although is_causal is False",
            _attention(*same, causal, scale),
        )
    yield (
        "softmax is taken over the queries instead of the keys",
        _attention(*same, mask, scale, softmax_dim=-2),
    )
    yield "q and k are swapped", _attention(k, q, v, dout, mask, scale)
    yield "k and v are swapped", _attention(q, v, k, dout, mask, scale)
    yield (
        "the rows are not divided by the sums of the exponentials",
        _without_sums(*same, mask, scale),
    )
    yield from _mistakes_in_backward(q, k, v, dout, mask, scale)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, scale: float, softmax_dim: int = -1
) -> Tensors:
    with torch.enable_grad():
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
        out = torch.softmax(scores, softmax_dim).nan_to_num(0.0) @ v
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def _without_sums(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, scale: float
) -> Tensors:
    scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return {"out": p @ v, "dv": p.mT @ dout}


def _mistakes_in_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, scale: float
) -> Iterator[tuple[str, Tensors]]:
    """Yield mistakes in the formulas of the gradients (FlashAttention-2, Dao 2023, section 2.2)."""
    unmasked = q @ k.mT * scale
    scores = unmasked.masked_fill(~mask, -math.inf)
    p = scores.softmax(-1)
    out = p @ v
    dp = dout @ v.mT
    difference = dp - (dout * out).sum(-1, keepdim=True)
    ds = p * difference
    exact = {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ dout}

    def gradients(p: Tensor, ds: Tensor) -> Tensors:
        return {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ dout}

    yield "rowsum(dout * out) is not subtracted from dP", gradients(p, p * dp)
    visible = (unmasked - scores.logsumexp(-1, keepdim=True)).exp()
    yield "the causal mask is missing in backward", gradients(visible, visible * difference)
    yield "dP is not multiplied by P", gradients(p, difference.masked_fill(~mask, 0))
    yield (
        "a matrix is not transposed: dk must be dSᵀ q, and dv must be Pᵀ dout",
        {"dk": ds @ q * scale, "dq": ds.mT @ k * scale, "dv": p @ dout},
    )
    for one, other in (("dq", "dk"), ("dk", "dv"), ("dq", "dv")):
        yield f"{one} and {other} are swapped", {one: exact[other], other: exact[one]}
    if q.shape[0] == q.shape[1] > 1:
        yield (
            "batch and heads are swapped",
            {name: tensor.transpose(0, 1) for name, tensor in {**exact, "out": out}.items()},
        )
