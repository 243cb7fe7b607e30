"""The command `check`: compares an implementation of one's own with a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal, get_args

import typer

from jobs.cli.arguments import flag
from jobs.cli.output import fail
from jobs.formatting import counted
from jobs.launch.signals import handled
from jobs.provenance import packages, visible_gpus
from jobs.versions import untested
from systems.attentions import ATTENTIONS
from systems.check.checked import Checked
from systems.external.reference import BadReference, Reference
from systems.external.source import check_source, likely_kind
from systems.triton_faults import TRITON_FAULT

EXAMPLES = "my_kernels/flash.py:MyFlash"

SHOWN_REASONS = 5  # maximum number of different reasons for refused and crashed cases
CRASHED = "crashed or hung"  # see `Checked.crashed`
Kind = Literal["attention", "ddp", "fsdp", "optimizer"]


class Dtype(StrEnum):  # typer has no lists of literals
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def check(
    implementation: Annotated[
        str,
        typer.Argument(
            metavar="IMPLEMENTATION",
            help="FILE.py:NAME or PACKAGE.MODULE:NAME, for example my_kernels/flash.py:MyFlash, or "
            "an attention of this project by its name.",
        ),
    ],
    kind: Annotated[
        Kind | None,
        typer.Option("--as", help="What it implements. [default: what its source shows]"),
    ] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU, even if there is a GPU.")] = False,
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(help="Attention: check only this dtype. Can be repeated."),
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

    Attention is compared with float64, output and gradients, in a child process, for a grid of
    shapes, dtypes and memory layouts. Wrappers and optimizers are compared with a single process,
    on 2 and 3 ranks. Without a GPU, Triton kernels run in Triton's interpreter.

    Exit code: 0 if every case is right or refused, by an exception of an attention or by
    NotImplementedError of other code; 1 if a case is wrong, crashes or hangs, if no case is right,
    or if some were not checked; 2 if the input is invalid.
    """
    on_gpu = bool(visible_gpus()) and not cpu
    dtypes = [str(one) for one in dtype or ()] or None
    if implementation in ATTENTIONS:
        _show_versions()
        raise SystemExit(_attention(implementation, on_gpu, dtypes, seq_len, head_dim, seconds))
    try:
        reference = Reference.parse(implementation)
        found = kind or likely_kind(reference)
        if found is None:
            kinds = ", ".join(get_args(Kind))
            fail(f"{reference}: what it implements is unknown; use --as with one of {kinds}")
        check_source(reference, found)
    except BadReference as error:
        fail(str(error))
    _show_versions()
    if found == "attention":
        code = _attention(str(reference), on_gpu, dtypes, seq_len, head_dim, seconds)
    else:
        code = _parallel(found, str(reference), on_gpu)
    raise SystemExit(code)


def _show_versions() -> None:
    """Print the versions of torch and Triton, which of them are untested, and a known fault."""
    installed = packages()
    texts = [f"{name} {installed[name] or 'not installed'}" for name in ("torch", "triton")]
    unknown = untested(installed)
    note = f" (untested: {', '.join(unknown)})" if unknown else ""
    print(f"{', '.join(texts)}{note}", flush=True)
    if TRITON_FAULT:
        print(f"warning: {TRITON_FAULT}", flush=True)


def _attention(
    reference: str,
    on_gpu: bool,
    dtypes: list[str] | None,
    seq_lens: list[int] | None,
    head_dims: list[int] | None,
    budget_s: float,
) -> int:
    """Check an attention function, print the results, and return the exit code."""
    import torch

    from systems.check.attention import cases
    from systems.check.attention_accuracy import TOLERANCE
    from systems.check.attention_process import NotImportable, check_in_child

    grid = cases(on_gpu, dtypes, seq_lens, head_dims)
    name = torch.cuda.get_device_name() if on_gpu else "the CPU"
    limits = f"{counted(len(grid), 'case')}, about {budget_s:g} s at most"
    print(f"{reference}: attention on {name}, {limits}", flush=True)
    try:
        checked = list(check_in_child(reference, grid, on_gpu, budget_s))
    except NotImportable as error:
        fail(f"{reference} cannot be imported: {error}")
    for kind in dict.fromkeys(case.dtype for case in grid):
        own = [item for item in checked if item.case.dtype == kind]
        errors = [error for item in own if item.status == "right" for error in item.errors.values()]
        largest = f"; largest error of the right cases {max(errors):.1e}" if errors else ""
        counts = _counts(own) or "not checked"
        print(f"  {kind}  {counts}; limit {TOLERANCE[kind]:.0e}{largest}")
    all_checked = len(checked) == len(grid)
    if not all_checked:
        left = counted(len(grid) - len(checked), "case")
        ended = checked[-1].crashed or "CUDA error" in checked[-1].refused
        print(f"  {left} not checked: {checked[-1].refused if ended else 'out of time'}")
    return _show(checked) or int(not all_checked)


def _parallel(kind: str, reference: str, on_gpu: bool) -> int:
    """Check a wrapper or an optimizer like `_attention`."""
    from systems.check.wrappers import WORLD_SIZES, cases, check_parallel_code

    enough = len(visible_gpus()) >= max(WORLD_SIZES)
    backend = "nccl" if on_gpu and enough else "gloo"
    ranks = " and ".join(map(str, WORLD_SIZES))
    print(f"{reference}: {kind} on {ranks} ranks, {backend}", flush=True)
    with handled(_exit):  # so that the ranks end, too
        checked = list(check_parallel_code(kind, reference, backend))
    errors: dict[str, float] = {}
    for item in checked:
        for name, error in item.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    largest = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"  {_counts(checked)}" + (f"; largest errors: {largest}" if errors else ""))
    left = sum(len(cases(kind, size)) for size in WORLD_SIZES) - len(checked)
    if left:
        print(f"  {counted(left, 'case')} not checked, because the ranks ended")
    return _show(checked) or int(left > 0)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _counts(checked: Sequence[Checked]) -> str:
    counts = Counter(map(_kind_of, checked))
    return ", ".join(
        f"{counts[k]} {k}" for k in ("right", "wrong", "refused", CRASHED) if counts[k]
    )


def _kind_of(item: Checked) -> str:
    """Return the status, in which a case that crashed is not `refused`."""
    return CRASHED if item.crashed else item.status


def _show(checked: Sequence[Checked]) -> int:
    """Print the smallest wrong case with details, and why others were refused or crashed.

    Return the exit code.
    """
    wrong = [item for item in checked if item.status == "wrong"]
    if wrong:
        of = f"{len(wrong)} of {counted(len(checked), 'case')}"
        print("\n  ".join([f"wrong: {of}; the smallest: {wrong[0].case}", *wrong[0].wrong]))
    first = {item.refused: item for item in reversed(checked)}
    reasons = Counter(item.refused for item in checked if item.refused)
    for reason, count in reasons.most_common(SHOWN_REASONS):
        smallest = first[reason]
        kind, case = _kind_of(smallest), smallest.case
        print(f"{kind}: {counted(count, 'case')}: {reason}; the smallest: {case}")
    right = any(item.status == "right" for item in checked)
    if not right:
        print("no case is right")
    return 0 if right and not wrong and not any(item.crashed for item in checked) else 1
