"""Limits for the error of attention in finite precision, derived by rounding error analysis.

First-order analysis of FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithms 1 and 2). Each
rounding is modeled as an independent error with mean zero and a magnitude of at most one unit
roundoff of the rounded number. A sum of errors e_i a_i with |e_i| <= 1 then has a standard
deviation of at most norm(a), and exceeds CONFIDENCE times norm(a) with a probability of at most
2 exp(-CONFIDENCE**2 / 2) (Hoeffding's inequality; Higham and Mary 2019, "A New Approach to
Probabilistic Rounding Error Analysis", https://doi.org/10.1137/18M1226312). The limit does not
depend on the order of summation, since each of the n partial sums of n terms is at most the sum of
the magnitudes. So it is the same for every CPU or GPU, number of threads and tile size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import PLAIN, Call

# Largest error of an element, in standard deviations. The norm of the errors of n elements may
# exceed its expectation by a factor of 1 + CONFIDENCE / sqrt(n).
CONFIDENCE = 6.0
FLUSHED = 2.0**-126  # a GPU may flush smaller float32 numbers to zero
NAMES = ("out", "lse", "dq", "dk", "dv")
LARGE = 2**22  # scores from which the heads of k are processed one at a time


class Precision(NamedTuple):
    """Unit roundoffs and absolute errors of the steps of an implementation.

    Attributes:
        result: unit roundoff of the returned out, dq, dk and dv.
        operand: unit roundoff of P and dS as operands of a matmul.
        term: unit roundoff of a product of two inputs. It is 0 for 16-bit inputs, whose products
            are exact in float32.
        sum: unit roundoff of sums, exponentials and lse.
        smallest: absolute error of every operand and result, due to underflow.
        depth: absolute error of an operand, relative to the largest magnitude in its matrix.
        score: unit roundoff of the scores and of dP, where they are rounded to the inputs' dtype.
    """

    result: float
    operand: float
    term: float
    sum: float
    smallest: float
    depth: float = 0.0
    score: float = 0.0

    def floor(self, x: Tensor) -> Tensor:
        """Return the absolute error of every element of an operand, however small it is."""
        return self.smallest + self.depth * x.abs().amax((-2, -1), keepdim=True)

    def operands_error(self, a: Tensor, a_error: Tensor, b: Tensor) -> Tensor:
        """Return the deviation of a matmul a b, due to a_error, floor(b) and the summation."""
        squares = a_error.square() @ b.square()
        squares += a.square().sum(-1, keepdim=True) * self.floor(b).square()
        return squares.sqrt() + self.sum * math.sqrt(a.shape[-1]) * (a.abs() @ b.abs())

    def inputs_error(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the deviation of a matmul a b of inputs."""
        return self.operands_error(a, self.term * a.abs() + self.floor(a), b)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def precision_of(dtype: torch.dtype, split_float32: bool = False) -> Precision:
    """Return the precision of an implementation that computes in float32.

    Results and operands of matmuls have the dtype of the inputs.

    Args:
        dtype: dtype of the inputs.
        split_float32: float32 matmuls are computed from two float16 halves of each operand. The
            halves represent an operand with a relative error of up to 2**-22. The product of the
            low halves, up to another 2**-22 of a term, is left out. The halves of a matrix share
            one scale, so their smallest bit is 2**-38 of the largest magnitude in the matrix.
    """
    own = unit_roundoff(dtype)
    wide = unit_roundoff(torch.promote_types(dtype, torch.float32))
    smallest = max(torch.finfo(dtype).smallest_normal * 2 * own, FLUSHED)
    if own > wide:
        return Precision(own, own, 0.0, wide, smallest)
    if split_float32 and dtype == torch.float32:
        return Precision(own, 3 * 2**-22, 3 * 2**-22, wide, smallest, 2**-38)
    return Precision(own, wide, wide, wide, smallest)


def torch_precision_of(dtype: torch.dtype, scale: float, between: torch.dtype) -> Precision:
    """Return the precision of attention by operations of torch, whose results are rounded.

    The scores and dS are rounded to the dtype `between` twice, because they are multiplied by the
    scale. So dS may underflow before it is multiplied by k.
    """
    precision, own = precision_of(dtype, split_float32=True), unit_roundoff(between)
    return precision._replace(
        operand=max(precision.operand, 2 * own),
        smallest=precision.smallest / min(1.0, abs(scale) or 1.0),
        score=2 * own,
    )


class Limits(NamedTuple):
    """Exact results in float64, and the standard deviation of the error of each element."""

    exact: dict[str, Tensor]
    deviation: dict[str, Tensor]


@torch.no_grad()
def attention_limits(
    inputs: Sequence[Tensor], call: Call, precision: Precision, dlse: Tensor | None = None
) -> Limits:
    """Return exact out, lse, dq, dk and dv, and the standard deviation of each element's error.

    Materializes several score matrices in float64: about 2 GB per head of 4,096 tokens. If they are
    large, only the heads of q that share one head of k are in memory at a time.

    Args:
        inputs: q, k, v and dout. q, dout: (..., n_queries, head_dim or value_dim). k, v: (...,
            n_keys, the same), with the leading dimensions of q, or with fewer heads.
        call: of one sequence; its packing is ignored.
        dlse: gradient of lse, (..., n_queries); zero by default.
    """
    q, k, v, dout = inputs
    kv_heads = math.prod(k.shape[-3:-2])  # 1 without such a dimension
    if kv_heads > 1 and math.prod(q.shape[:-1]) * k.shape[-2] >= LARGE:
        parts = [
            attention_limits(
                [x.chunk(kv_heads, -3)[i] for x in inputs],
                call,
                precision,
                None if dlse is None else dlse.chunk(kv_heads, -2)[i],
            )
            for i in range(kv_heads)
        ]
        joined = [
            {name: torch.cat([x[name] for x in of], -2 if name == "lse" else -3) for name in NAMES}
            for of in zip(*parts, strict=True)
        ]
        return Limits(*joined)
    group = math.prod(q.shape[:-2]) // math.prod(k.shape[:-2])
    if precision.score and group > 1:
        # The gradients of k and v are rounded for each head of q before they are added up.
        k, v = (x.repeat_interleave(group, -3) for x in (k, v))
        exact_, apart = attention_limits((q, k, v, dout), call, precision, dlse)
        for name in ("dk", "dv"):
            exact_[name] = exact_[name].unflatten(-3, (-1, group)).sum(-3)
            apart[name] = apart[name].unflatten(-3, (-1, group)).square().sum(-3).sqrt()
            apart[name] += precision.result * exact_[name].abs()
        return Limits(exact_, apart)
    # Heads of q with the same head of k are like more queries of one head.
    q_rows, dout_rows = (x.reshape(*k.shape[:-2], -1, x.shape[-1]) for x in (q, dout))
    if dlse is not None:
        dlse = dlse.reshape(q_rows.shape[:-1])
    limits = _limits_of_rows(q_rows, k, v, dout_rows, call, precision, dlse, group)
    for name, x in limits.exact.items():
        unit = precision.sum if name == "lse" else precision.result
        limits.deviation[name] += unit * x.masked_fill(x.isinf(), 0).abs() + precision.smallest
    for values in limits:
        for name, like in (("out", dout), ("lse", q[..., 0]), ("dq", q)):
            values[name] = values[name].reshape(like.shape)
    return limits


def _visible(scores: Tensor, call: Call, group: int) -> Tensor:
    """Return which keys each query sees, bool (n_queries, n_keys)."""
    n_queries, n_keys = scores.shape[-2] // group, scores.shape[-1]
    position = torch.arange(n_queries, device=scores.device).repeat(group)[:, None]
    key = torch.arange(n_keys, device=scores.device)
    if call.lower_right:
        position = position + n_keys - n_queries
    visible = torch.ones_like(key >= position)
    if call.is_causal:
        visible &= key <= position
    if call.window_left is not None:
        visible &= key >= position - call.window_left
    if call.window_right is not None:
        visible &= key <= position + call.window_right
    return visible


def _limits_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    call: Call,
    precision: Precision,
    dlse: Tensor | None,
    group: int,
) -> Limits:
    """Return exact results of `group` heads of queries, stacked as rows, by their definition.

    The deviations are those before the final rounding of the results.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    scores = scale * (q @ k.mT)
    slope = torch.ones_like(scores)  # derivative of the capped scores by the scaled scores
    if call.softcap is not None:
        ratio = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * ratio, 1 - ratio.square()
    scores.masked_fill_(~_visible(scores, call, group), -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = (scores - lse[..., None]).exp().nan_to_num(0)  # 0 for a query that sees no key
    out = p @ v
    dp = dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)  # D, minus the gradient of lse
    if dlse is not None:
        delta = delta - dlse[..., None].double()
    ds = p * (dp - delta) * slope
    exact = {
        "out": out, "lse": lse, "dq": scale * (ds @ k), "dk": scale * (ds.mT @ q), "dv": p.mT @ dout
    }  # fmt: skip
    operands_error, inputs_error = precision.operands_error, precision.inputs_error
    operand, total = precision.operand, precision.sum
    n_keys, d = k.shape[-2], v.shape[-1]
    # The argument of the exponential is the difference of a score and the maximum, both rounded and
    # scaled by log2(e). exp2 itself has an error of up to 2 units in the last place.
    largest = scores.masked_fill(scores.isinf(), 0).abs().amax(-1, keepdim=True)
    score_error = abs(scale) * inputs_error(q, k.mT) + total * (4 + 4 * largest)
    if precision.score:
        score_error += precision.score * scores.masked_fill(scores.isinf(), 0).abs()
    slope_error = torch.zeros_like(slope)
    if call.softcap is not None:
        # tanh has an absolute error of a few roundings of numbers up to 2.
        slope_error = 2 * score_error / call.softcap + 8 * total
        score_error = score_error + 4 * total * call.softcap
    lse_error = (p * score_error).square().sum(-1, keepdim=True).sqrt()
    finite_lse = lse.masked_fill(lse.isinf(), 0)
    lse_error += total * (math.sqrt(n_keys) + 2 * finite_lse[..., None].abs())
    p_error = p * (score_error + lse_error) + FLUSHED
    p_operand_error = p_error + operand * p + precision.floor(p)
    # An error e of P changes out by e (v - out), because the row is divided by its sum.
    out_error = operands_error(p, p_operand_error, v)
    out_error += p_operand_error.norm(dim=-1, keepdim=True) * out.abs()
    # The running sum is rescaled, and so rounded, whenever the maximum grows.
    out_error += total * math.sqrt(n_keys) * (p @ v.abs())
    # All elements of a row of dS share the error of D = rowsum(dO * O). An error e_j of P_j changes
    # D by e_j (dP_j - D), and O is rounded before D is computed.
    row_error = (p_operand_error * (dp - delta)).norm(dim=-1, keepdim=True)
    rescaled = dout.abs() * (p @ v.abs())
    row_error += 2 * total * math.sqrt(n_keys) * rescaled.sum(-1, keepdim=True)
    row_error += precision.result * (dout * out).norm(dim=-1, keepdim=True)
    row_error += total * math.sqrt(d) * (dout * out).abs().sum(-1, keepdim=True)
    row_error += total * delta.abs() + precision.score * (p * dp).norm(dim=-1, keepdim=True)
    dp_error = inputs_error(dout, v.mT) + precision.score * dp.abs()
    ds_error = slope * (p * dp_error + p_error * (dp - delta).abs())
    ds_error += p * (dp - delta).abs() * slope_error
    ds_error += operand * ds.abs() + precision.floor(ds)
    dq_error = operands_error(ds, ds_error, k)
    dq_error += row_error * ((p * slope) @ k).abs() + lse_error * (ds @ k).abs()
    dk_error = operands_error(ds.mT, (ds_error + row_error * p * slope).mT, q)
    dv_error = operands_error(p.mT, p_operand_error.mT, dout)
    deviation = {
        "out": out_error,
        "lse": lse_error[..., 0],
        "dq": abs(scale) * dq_error,
        "dk": abs(scale) * dk_error,
        "dv": dv_error,
    }
    return Limits(exact, deviation)


def shares_of_limits(found: dict[str, Tensor], limits: Limits) -> dict[str, float]:
    """Return the error of each result divided by its limit. Above 1 or NaN the result is wrong.

    Key `NAME` is the largest share of an element, `NAME norm` the share of the norm of all errors.
    """
    shares = {}
    n_queries, n_keys = limits.exact["out"].shape[-2], limits.exact["dk"].shape[-2]
    rows = math.prod(limits.exact["out"].shape[:-2]) * min(n_queries, n_keys)
    for name, x in found.items():
        exact, deviation = limits.exact[name], limits.deviation[name]
        assert x.shape == exact.shape, f"{name} has {tuple(x.shape)}, not {tuple(exact.shape)}"
        # lse is -inf for a query that sees no key.
        error = (x.double() - exact).abs().masked_fill(x.double() == exact, 0)
        shares[name] = (error / (CONFIDENCE * deviation)).max().item()
        # All elements of a row of dQ, and of what a query adds to dK, share the error of its D, so
        # only the rows count as independent.
        independent = rows if name in ("dq", "dk") else exact.numel()
        room = 1 + CONFIDENCE / math.sqrt(independent)
        shares[f"{name} norm"] = (error.norm() / (room * deviation.norm())).item()
    return shares


def attention_shares(
    found: Iterable[Tensor],
    inputs: Sequence[Tensor],
    call: Call = PLAIN,
    split_float32: bool = False,
    dlse: Tensor | None = None,
) -> dict[str, float]:
    """Return `shares_of_limits` of the results for q, k, v and dout: those of NAMES, or the first.

    Args:
        split_float32: see `precision_of`.
    """
    limits = attention_limits(inputs, call, precision_of(inputs[0].dtype, split_float32), dlse)
    return shares_of_limits(dict(zip(NAMES, found, strict=False)), limits)


def assert_within_limits(shares: dict[str, float]) -> None:
    """Assert that no error is above its limit. `shares` are those of `shares_of_limits`."""
    wrong = {name: f"{share:.3g}" for name, share in shares.items() if not share <= 1}
    assert not wrong, f"errors above their limits, as multiples of the limits: {wrong}"
