"""Random calls of `flash_attention` and `flash_attention_packed`, compared with float64.

A case is drawn from one number. These variables of the environment choose the cases, here case 417
of those for a GPU, and 5,000 for this CPU and for Triton's interpreter:

    FLASH_SEED=417 FLASH_CASES=1 pytest -m gpu tests/systems/kernels/test_flash_random.py
    FLASH_CASES=5000 pytest tests/systems/kernels/test_flash_random.py
    FLASH_CASES=5000 TRITON_INTERPRET=1 pytest tests/interpreted/test_flash_random_interpreted.py
"""

from __future__ import annotations

import itertools
import math
import os
import random
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from systems.kernels.flash_attention import flash_attention, flash_attention_packed
from systems.kernels.flash_attention.call import Call
from tests.systems.kernels.attention_error import (
    assert_within_limits,
    attention_limits,
    precision_of,
    shares_of_limits,
    torch_precision_of,
)
from tests.systems.kernels.flash_cases import BF16, F16, F32, each_sequence, inputs

KERNELS = ("flash_triton", "flash_hopper")
MOST_ELEMENTS = 2**25  # of a tensor; several processes share a GPU, and the limits are in float64
MOST_UNSUPPORTED = 0.1  # share of the cases that a forced implementation may refuse
STRIDES = ("dense", "dense", "rows", "columns", "slice", "shifted", "spread", "swapped", "expanded")
GROUPS = (1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16)
HOPPER_DIMS = (64, 64, 64, 72, 96, 128, 128, 128, 160, 192, 192, 256, 256, *range(64, 257, 8))


class Place(NamedTuple):
    """Where cases run, which implementations there are, and how large the inputs are.

    Fields:
        longest: largest number of queries and of keys.
        scores: largest number of elements of all score matrices of a case. A quarter of them may
            belong to one head of k: the limits need 200 bytes for each of these.
        head_dim: largest head_dim.
        heads: largest number of heads of q, of all sequences.
        alike: consecutive cases with the same compiled kernels, because these take most time.
    """

    device: str
    implementations: tuple[str, ...]
    longest: int
    scores: int
    head_dim: int
    heads: int = 512
    alike: int = 1


TORCHS = ("sdpa", "sdpa_flash", "sdpa_math")
GPU = Place(
    "cuda",
    ("flash_hopper",) * 4 + ("flash_triton",) * 3 + ("auto",) * 2 + ("naive", "sdpa"),
    4096, 10**8, 256, alike=10,
)  # fmt: skip
CPU = Place("cpu", ("auto",) * 4 + ("naive",) * 4 + ("flash_pytorch",) * 2 + TORCHS, 200, 10**6, 80)
INTERPRETER = Place("cpu", ("flash_triton", "flash_triton", "auto"), 70, 4000, 33, heads=12)


class Case(NamedTuple):
    """Arguments of a call, and what is done with its result.

    Fields:
        lengths: numbers of queries and keys, of each sequence if they are packed.
        leading: dimensions before the heads.
        heads: of k and v, None without such a dimension; `group` heads of q belong to each of them.
        strides: of q, k, v and dout.
        magnitude: of q; k and v are smaller.
        longest: max_seqlen of packed sequences: "none", "exact" or "larger".
        gradient_of: "out", "lse" or "both", with respect to those of q, k and v in `needs`; "" for
            a call under torch.no_grad.
        autocast: dtypes of q, k and v, which are cast to `dtype`; none without autocast.
    """

    seed: int
    implementation: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    lengths: tuple[tuple[int, int], ...]
    leading: tuple[int, ...]
    heads: int | None
    group: int
    packed: bool
    same_starts: bool
    longest: str
    is_causal: bool
    window: tuple[int | None, int | None]
    alignment: str
    softcap: float | None
    scale: float | None
    return_lse: bool
    layout: str
    strides: tuple[str, ...]
    magnitude: int
    gradient_of: str
    needs: str
    deterministic: bool
    autocast: tuple[torch.dtype, ...]


def draw(seed: int, place: Place) -> Case:
    """Return the case with this number."""
    # The first generator draws what a kernel is compiled for, the second one everything else.
    form, own = random.Random(f"form {seed // place.alike}"), random.Random(seed)
    implementation = form.choice(place.implementations)
    has_all = implementation not in (*TORCHS, "flash_pytorch")
    on_hopper = implementation == "flash_hopper"
    packed = has_all and form.random() < 0.25
    dtype = form.choice((BF16, F16) if on_hopper else (BF16, F16, F32))
    head_dim = form.randint(1, place.head_dim)
    if on_hopper or (place.device == "cuda" and form.random() < 0.5):
        head_dim = form.choice((64, 128, 192, 256) if on_hopper and packed else HOPPER_DIMS)
    value_dim = head_dim
    equal = implementation == "sdpa_flash" or (on_hopper and head_dim <= 128)
    if form.random() < 0.25 and not equal:
        value_dim = 128 if on_hopper or head_dim == 192 else form.randint(1, place.head_dim)
    group = 1 if implementation == "flash_pytorch" else form.choice(GROUPS)
    is_causal = form.random() < 0.5
    bounded = [has_all and form.random() < 0.3 for _ in range(2)]
    capped, return_lse, lse_counts = (has_all and form.random() < p for p in (0.3, 0.4, 0.6))
    has_heads = packed or group > 1 or own.random() < 0.9
    n_leading = own.choice((0, 1, 1, 1, 2)) if has_heads and not packed else 0
    batch = own.randint(1, 4) if n_leading else 1
    heads = own.randint(1, 8) if has_heads else 1
    # The lengths are log-uniform, in half of the cases without short ones. Some are equal.
    shortest = own.choice((1, place.longest // 64))
    longest, n_sequences = place.longest, own.randint(1, 6) if packed else 1
    same_starts = packed and own.random() < 0.4
    while True:
        lengths = []
        for _ in range(n_sequences):
            n_queries, n_keys = (_length(own, shortest, longest, packed) for _ in range(2))
            equal = same_starts or own.random() < 0.25
            lengths.append((n_queries, n_queries if equal else n_keys))
        rows = max(sum(n) for n in zip(*lengths, strict=True))
        of_a_head = group * sum(x * y for x, y in lengths) * batch
        if (
            of_a_head * heads <= place.scores
            and of_a_head <= place.scores / 4
            and batch * heads * group * n_sequences <= max(group, place.heads)
            and batch * heads * group * rows * max(head_dim, value_dim) <= MOST_ELEMENTS
        ):
            break
        batch, heads, n_sequences = (-(-x // 2) for x in (batch, heads, n_sequences))
        longest = max(1, longest * 3 // 4)
    needs = own.choice(("qkv",) * 6 + ("q", "k", "v", "qk", "kv", "qv"))
    gradient_of = "both" if return_lse and lse_counts else "out"
    if gradient_of == "both" and needs != "v" and own.random() < 0.2:
        gradient_of = "lse"
    bounds = (0, own.randint(1, 9), own.randint(1, longest), 10 * longest, 10**12)
    window = [own.choice(bounds) if bound else None for bound in bounded]
    return Case(
        seed, implementation, dtype, head_dim, value_dim, tuple(lengths),
        leading=((), (batch,), (2, batch // 2) if batch > 1 else (1, 1))[n_leading],
        heads=heads if has_heads else None,
        group=group,
        packed=packed,
        same_starts=same_starts,
        longest=own.choice(("none", "exact", "larger")),
        is_causal=is_causal,
        window=(window[0], window[1]),
        alignment=own.choice(("upper_left", "lower_right") if has_all else ("upper_left",)),
        softcap=2 ** own.uniform(0, math.log2(500)) if capped else None,
        scale=own.choice((None, None, None, None, 0.0, 0.3, -0.2, 2 ** own.uniform(-5, 0))),
        return_lse=return_lse,
        layout=own.choice(("bhsd", "bhsd", "bshd")) if has_heads else "bhsd",
        strides=("dense",) * 4 if own.random() < 0.3
        else (*(own.choice(STRIDES) for _ in range(3)), own.choice((*STRIDES, "sum", "sum"))),
        magnitude=own.choice((1, 1, 1, 5)),
        gradient_of=gradient_of if own.random() < 0.85 else "",
        needs=needs,
        deterministic=own.random() < 0.15,
        autocast=tuple(own.choice((F32, dtype)) for _ in range(3))
        if dtype != F32 and own.random() < 0.1 else (),
    )  # fmt: skip


def _length(rng: random.Random, shortest: int, longest: int, packed: bool) -> int:
    if rng.random() < (0.15 if packed else 0.02):
        return 0
    n = int(2 ** rng.uniform(math.log2(min(shortest, longest)), math.log2(longest)))
    return n // 64 * 64 if n >= 64 and rng.random() < 0.15 else n


def laid_out(x: Tensor, strides: str) -> Tensor:
    """Return a tensor with the shape of x and such strides, with some or all elements of x."""
    if strides == "rows" and x.dim() > 2:  # (rows, heads, head_dim) in memory
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "columns":
        return x.mT.contiguous().mT
    if strides == "slice":  # of a projection to q, k and v
        return torch.cat((x, x, x), -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if strides == "shifted":  # not at a multiple of 16 bytes
        return torch.cat((x.flatten()[:1], x.flatten()))[-x.numel() :].view_as(x)
    if strides == "spread":
        return x.repeat_interleave(2, -1)[..., ::2]
    if strides == "swapped" and x.dim() > 3:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if strides == "expanded" and x.dim() > 2 and x.numel():  # one head for all
        return x[..., :1, :, :].expand_as(x)
    if strides == "sum" and x.numel():  # as the gradient of a sum
        return x.flatten()[0].expand_as(x)
    return x


def _inputs(case: Case, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return [q, k, v], dout and the gradient of lse, all (..., heads, rows, head_dim)."""
    rows_q, rows_k = (sum(n) for n in zip(*case.lengths, strict=True))
    heads = () if case.heads is None else (case.heads * case.group,)
    made = inputs(
        (rows_q, rows_k), case.head_dim, F32, (*case.leading, *heads), device, case.seed,
        case.heads, case.value_dim,
    )  # fmt: skip
    sizes = (1, 1, 1, 1) if case.magnitude == 1 else (case.magnitude, 3, 3, 1)
    dtypes = (*(case.autocast or [case.dtype] * 3), case.dtype)
    *leaves, dout = (
        laid_out((size * x).to(dtype), by)
        for x, size, dtype, by in zip(made, sizes, dtypes, case.strides, strict=True)
    )
    for name, x in zip("qkv", leaves, strict=True):
        x.requires_grad_(name in case.needs and bool(case.gradient_of))
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    return leaves, dout, torch.randn(dout.shape[:-1], generator=generator, device=device)


def run(case: Case, place: Place) -> str | None:
    """Run a case and assert that its results are right; return why it is not supported, or None."""
    leaves, dout, dlse = _inputs(case, place.device)
    torch.use_deterministic_algorithms(case.deterministic, warn_only=True)
    try:
        results = _results(case, leaves, dout, dlse)
        if case.deterministic and case.implementation in KERNELS:
            again = _results(case, leaves, dout, dlse)
            assert all(torch.equal(x, again[name]) for name, x in results.items()), "not the same"
    except RuntimeError as error:
        if "pack_vnni2" in str(error):
            # On a CPU with AVX512-FP16 or AMX, torch 2.13 multiplies 16-bit numbers with these
            # instructions even if ATEN_CPU_CAPABILITY selects older ones. It then fails to prepare
            # their operands.
            return None
        if case.implementation != "auto" and "implementations that support these" in str(error):
            return str(error)
        raise
    finally:
        torch.use_deterministic_algorithms(False)
    q, k, v = leaves
    for name, like in (("out", dout), ("lse", dlse), ("dq", q), ("dk", k), ("dv", v)):
        x = results.get(name, like)
        assert (x.shape, x.dtype) == (like.shape, like.dtype), f"{name}: {x.shape} {x.dtype}"
    q, k, v = (x.detach().to(case.dtype) for x in leaves)
    if case.gradient_of == "lse":
        dout = torch.zeros_like(dout)
    counts = case.gradient_of in ("lse", "both")
    starts = [[0, *itertools.accumulate(n)] for n in zip(*case.lengths, strict=True)]
    sequences = each_sequence(starts, results, (q, k, v, dout), dlse if counts else None)
    for found, given, of_lse in sequences:
        _assert_right(case, found, given, of_lse)
    return None


def _results(case: Case, leaves: Sequence[Tensor], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """Return out, lse if it is returned, and the gradients of `needs`, all as (heads, rows, ..)."""
    options: dict[str, Any] = {
        "is_causal": case.is_causal, "scale": case.scale, "window": case.window,
        "implementation": case.implementation, "alignment": case.alignment,
        "softcap": case.softcap, "return_lse": case.return_lse,
    }  # fmt: skip
    device = dout.device.type
    autocast = torch.autocast(device, case.dtype) if case.autocast else nullcontext()
    with autocast, nullcontext() if case.gradient_of else torch.no_grad():
        if case.packed:
            q, k, v = (x.transpose(0, 1) for x in leaves)
            result = flash_attention_packed(q, k, v, **_boundaries(case, device) | options)
        else:
            turned = case.layout == "bshd"
            q, k, v = (x.transpose(-3, -2) if turned else x for x in leaves)
            result = flash_attention(q, k, v, layout=case.layout, **options)
    out, lse = result if case.return_lse else (result, None)
    if case.packed or case.layout == "bshd":
        out = out.transpose(-3, -2)
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    of = {"out": ([out], [dout]), "lse": ([lse], [dlse]), "both": ([out, lse], [dout, dlse])}
    if case.gradient_of:
        wanted = [x for x in leaves if x.requires_grad]
        # An lse does not depend on v.
        pairs = [x for x in zip(*of[case.gradient_of], strict=True) if x[0].requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        for name, x, gradient in zip(case.needs, wanted, gradients, strict=True):
            found[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return found


def _boundaries(case: Case, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, lengths in zip("qk", zip(*case.lengths, strict=True), strict=True):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        odd = torch.cat((starts[:1], starts))[1:]  # not at a multiple of 16 bytes
        found[f"cu_seqlens_{name}"] = (odd, torch.stack((starts, starts), 1)[:, 1])[case.seed % 2]
        if case.longest != "none":
            found[f"max_seqlen_{name}"] = max(lengths) + 1000 * (case.longest == "larger")
    if case.same_starts:
        found["cu_seqlens_k"] = None
    return found


def _assert_right(
    case: Case, found: dict[str, Tensor], inputs: Sequence[Tensor], dlse: Tensor | None
) -> None:
    """Assert that the results for these inputs, or for one packed sequence, are right."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    precision = precision_of(case.dtype, split_float32=True)
    if case.implementation in ("auto", "naive", *TORCHS):
        # For features that torch lacks, `naive` computes in float32.
        is_wide = case.return_lse or case.packed or case.softcap is not None
        precision = torch_precision_of(case.dtype, scale, F32 if is_wide else case.dtype)
    lower_right = case.alignment == "lower_right"
    call = Call(case.is_causal, scale, *case.window, lower_right, case.softcap)
    limits = attention_limits(inputs, call, precision, dlse)
    blind = limits.exact["lse"].isinf()
    for name in {"out", "dq"} & {*found}:
        assert not found[name][blind].any(), f"{name} is not 0 for a query that sees no key"
    shares = shares_of_limits(found, limits)
    if {"sum", "expanded"} & {*case.strides}:  # equal elements have equal errors
        shares = {name: share for name, share in shares.items() if "norm" not in name}
    assert_within_limits(shares)


def assert_cases_right(seeds: Iterable[int], place: Place) -> None:
    """Run the cases with these numbers, and assert that none is wrong; the error names all."""
    seeds, wrong, unsupported = list(seeds), [], []
    for seed in seeds:
        case = draw(seed, place)
        try:
            reason = run(case, place)
        except Exception as error:
            where = "" if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
            wrong.append(f"case {seed} ({place.device}): {error}\n{case}\n{where}")
        else:
            unsupported += [f"case {seed}: {reason}"] if reason else []
    repeat = "to repeat one: FLASH_SEED=NUMBER FLASH_CASES=1 pytest ..., see random_cases.py"
    assert not wrong, "\n".join([f"{len(wrong)} of {len(seeds)} are wrong; {repeat}", *wrong])
    assert len(unsupported) <= max(1, MOST_UNSUPPORTED * len(seeds)), "\n".join(unsupported)


def batches(count: int, size: int, always: int, *marks: pytest.MarkDecorator) -> list[Any]:
    """Return ranges of numbers of cases, one for each test: `count` cases from 0 on.

    The tests after the first `always` have these marks, unless the environment chooses the cases.
    """
    chosen = {"FLASH_SEED", "FLASH_CASES"} & {*os.environ}
    first = int(os.environ.get("FLASH_SEED", "0"))
    end = first + int(os.environ.get("FLASH_CASES", count))
    ranges = [range(start, min(start + size, end)) for start in range(first, end, size)]
    return [
        pytest.param(x, marks=() if chosen or i < always else marks, id=f"{x[0]}-{x[-1]}")
        for i, x in enumerate(ranges)
    ]
