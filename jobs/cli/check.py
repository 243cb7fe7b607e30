"""The command `check`: compares an implementation of one's own with a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from jobs.cli.consoles import console, fail
from jobs.formatting import counted
from jobs.provenance import visible_gpus
from systems.external.reference import BadReference, Reference
from systems.external.source import check_source, likely_kind

EXAMPLES = "my_kernels/flash.py:MyFlash"

DTYPES = ("bf16", "fp16", "fp32")
SHOWN_REASONS = 5  # maximum number of different reasons for refused cases


def show(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


class CheckKind(StrEnum):
    """What an implementation implements."""

    attention = "attention"
    ddp = "ddp"
    fsdp = "fsdp"
    optimizer = "optimizer"


def check(
    implementation: Annotated[
        str,
        typer.Argument(
            metavar="IMPLEMENTATION",
            help="FILE.py:NAME or PACKAGE.MODULE:NAME, for example my_kernels/flash.py:MyFlash.",
        ),
    ],
    kind: Annotated[
        CheckKind | None,
        typer.Option("--as", help="What it implements. [default: what its source shows]"),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use the CPU, even if there is a GPU.")
    ] = False,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help="Attention: check only this dtype: bf16, fp16 or fp32. Can be repeated.",
        ),
    ] = None,
    seq_len: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=1, help="Attention: check only this number of tokens. Can be repeated."
        ),
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=1, help="Attention: check only this head_dim. Can be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Attention: start no further case after this time.")
    ] = 120.0,
) -> None:
    """Check an attention, a DDP or FSDP wrapper or a sharded optimizer of your own.

    Attention is compared with float64, output and gradients, for a grid of shapes, dtypes and
    memory layouts. Wrappers and optimizers are compared with a single process, on 2 and 3 ranks.
    Nothing is timed or recorded. Without a GPU, Triton kernels run in Triton's interpreter.
    Attention runs in a child process, so that it may crash or hang.

    Exit code: 0 if every case is right or refused with an exception; 1 if a case is wrong, crashes
    or hangs, or if no case is right; 2 if the input is invalid.
    """
    for given in dtype or ():
        if given not in DTYPES:
            fail(f"--dtype must be one of {', '.join(DTYPES)}, got {given!r}")
    try:
        reference = Reference.parse(implementation)
        found = kind or likely_kind(reference)
        if found is None:
            fail(
                f"{reference}: what it implements is unknown; use --as with one of "
                f"{', '.join(CheckKind)}"
            )
        check_source(reference, str(found))
    except BadReference as error:
        fail(str(error))
    on_gpu = bool(visible_gpus()) and not cpu
    if found == CheckKind.attention:
        right, wrong = _check_attention(str(reference), on_gpu, dtype, seq_len, head_dim, seconds)
    else:
        right, wrong = _check_parallel(str(found), str(reference), on_gpu)
    raise SystemExit(1 if wrong or not right else 0)


def _check_attention(
    reference: str,
    on_gpu: bool,
    dtypes: list[str] | None,
    seq_lens: list[int] | None,
    head_dims: list[int] | None,
    budget_s: float,
) -> tuple[int, int]:
    """Check an attention function and print the results.

    Return the numbers of right cases and of failed cases, which are wrong or ended the process.
    """
    import torch

    from systems.check.attention import cases
    from systems.check.attention_process import NotImportable, check_in_child
    from systems.measure.attention_accuracy import TOLERANCE

    grid = cases(on_gpu, dtypes, seq_lens, head_dims)
    name = torch.cuda.get_device_name() if on_gpu else "the CPU"
    show(f"{reference}: attention on {name}, {counted(len(grid), 'case')}")
    try:
        checked = list(check_in_child(reference, grid, on_gpu, budget_s))
    except NotImportable as error:
        fail(f"{reference} cannot be imported: {error}")
    for kind in dict.fromkeys(case.dtype for case in grid):
        own = [item for item in checked if item.case.dtype == kind]
        errors = [error for item in own if item.status == "right" for error in item.errors.values()]
        largest = f"; largest error of the right cases {max(errors):.1e}" if errors else ""
        counts = _counts(item.status for item in own)
        show(f"  {kind}  {counts}; limit {TOLERANCE[kind]:.0e}{largest}")
    if len(checked) < len(grid):
        left = counted(len(grid) - len(checked), "case")
        ended = checked[-1].crashed or "CUDA error" in checked[-1].refused
        show(f"  {left} not checked: {checked[-1].refused if ended else 'out of time'}")
    wrong = [item for item in checked if item.status == "wrong"]
    if wrong:
        first = wrong[0]
        show(f"wrong: {len(wrong)} of {counted(len(checked), 'case')}; the smallest: {first.case}")
        for tensor in first.wrong:
            show(
                f"  {tensor.name}: relative error {tensor.error:.1e} (at most {tensor.limit:.0e}), "
                f"wrong in {tensor.rows}"
            )
        if first.message:
            show(f"  {first.message}")
        only = _only([i.case for i in wrong], [i.case for i in checked if i.status == "right"])
        if only:
            show(f"  only cases {only} are wrong")
    _show_refused((str(item.case), item.refused) for item in checked if item.refused)
    failed = [item for item in checked if item.status == "wrong" or item.crashed]
    return sum(item.status == "right" for item in checked), len(failed)


def _check_parallel(kind: str, reference: str, on_gpu: bool) -> tuple[int, int]:
    """Check a wrapper or an optimizer and print the results; see `_check_attention`."""
    from systems.check.parallel import WORLD_SIZES, check_parallel_code

    enough = len(visible_gpus()) >= max(WORLD_SIZES)
    backend = "nccl" if on_gpu and enough else "gloo"
    ranks = " and ".join(map(str, WORLD_SIZES))
    show(f"{reference}: {kind} on {ranks} ranks, {backend}")
    checked = list(check_parallel_code(kind, reference, backend))
    errors: dict[str, float] = {}
    for item in checked:
        for name, error in item.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    largest = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    counts = _counts(item.status for item in checked)
    show(f"  {counts}" + (f"; largest errors: {largest}" if errors else ""))
    wrong = [item for item in checked if item.status == "wrong"]
    if wrong:
        first = wrong[0]
        show(f"wrong: {len(wrong)} of {counted(len(checked), 'case')}; the smallest: {first.case}")
        show(f"  {first.message}")
        if first.looks_like:
            show(f"  it looks as if {first.looks_like}")
    _show_refused((str(item.case), item.message) for item in checked if item.status == "refused")
    return sum(item.status == "right" for item in checked), len(wrong)


def _only(wrong: list[Any], right: list[Any]) -> str | None:
    """Return what all wrong cases have and no right case has, or None."""
    conditions: list[tuple[str, Callable[[Any], bool]]] = [
        ("that are causal", lambda case: case.causal),
        ("that are not causal", lambda case: not case.causal),
        *((f"in {name}", partial(_has, name="dtype", value=name)) for name in DTYPES),
        *((f"with: {name}", partial(_has, name="layout", value=name)) for name in _layouts(wrong)),
        *(
            (f"whose seq_len is not a multiple of {tile}", partial(_is_cut, tile=tile))
            for tile in (128, 64, 32, 16)
        ),
    ]
    for text, holds in conditions:
        if all(map(holds, wrong)) and right and not any(map(holds, right)):
            return text
    return None


def _has(case: Any, name: str, value: object) -> bool:
    return bool(getattr(case, name) == value)


def _layouts(cases: list[Any]) -> set[str]:
    return {case.layout for case in cases}


def _is_cut(case: Any, tile: int) -> bool:
    return bool(case.seq_len % tile)


def _counts(statuses: Iterable[str]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[s]} {s}" for s in ("right", "wrong", "refused") if counts[s])


def _show_refused(refused: Iterable[tuple[str, str]]) -> None:
    """Print each reason for refused cases once, with the number of cases and the smallest case."""
    by_reason: dict[str, list[Any]] = {}
    for case, reason in refused:
        by_reason.setdefault(reason, []).append(case)
    for reason, listed in list(by_reason.items())[:SHOWN_REASONS]:
        show(f"refused: {counted(len(listed), 'case')}: {reason}; the smallest: {listed[0]}")
    if len(by_reason) > SHOWN_REASONS:
        show(f"refused: {len(by_reason) - SHOWN_REASONS} more reasons")
