"""Launch the AdamW kernels on tensors whose addresses are in a table in device memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.adamw.group import misfits
from systems.kernels.adamw.reference import stream
from systems.kernels.device import on

BLOCK_SIZE = 1024  # number of elements per program; a power of two, at least 32
# Bytes of the widest dtype per warp, 16 for each of its 32 threads. kernel.py says why.
WARP_BYTES = 512
MAX_WARPS = 32


class ParamTensors(NamedTuple):
    """One parameter with all other tensors and options that its AdamW step needs."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor
    hyper: Tensor  # float64 (5,) on the device of param: lr, beta1, beta2, eps, weight_decay
    stream: int  # random stream of the parameter, reference.stream(seed, index)
    stochastic: bool  # True for stochastic rounding

    def others(self) -> dict[str, Tensor]:
        """Return the step, the gradient and the state by name, as `group.misfits` takes them."""
        names = ("gradient", "exp_avg", "exp_avg_sq", "master", "step")
        return {n: t for n, t in zip(names, self[1:6], strict=True) if t is not None}


class _Variant(NamedTuple):
    """Properties of a parameter for which `kernel.adamw_kernel` is compiled separately.

    param, grad and state are the dtypes of the parameter, of its gradient and of both its moments.
    All parameters of the same variant are updated in one launch.
    """

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool  # True if there are master weights
    stochastic: bool  # True for stochastic rounding
    aligned: bool  # True if all addresses are multiples of 16


class TableLayout(NamedTuple):
    """Values from which `Tables` creates its tensors on the device.

    Equal layouts give equal device tables. So a layout shows whether an existing table can be used
    again.
    """

    rows: list[tuple[int, ...]]  # columns as in kernel.py
    # Whether the parameter is contiguous, and the sizes of the gradient and the state. A tensor can
    # be replaced by a smaller one at the same address.
    sizes: list[tuple[int, ...]]
    variants: list[_Variant]  # variant of each row
    block_size: int  # number of elements per program


def table_layout(params: list[ParamTensors], block_size: int) -> TableLayout:
    """Return the addresses, sizes and variants of parameters, from which `Tables` can be created.

    A variant is a set of properties for which the kernel is compiled separately. One program of the
    kernel updates block_size elements.
    """
    rows: list[tuple[int, ...]] = []
    sizes: list[tuple[int, ...]] = []
    variants: list[_Variant] = []
    # Unpacked, because each access to a field would take time in every step.
    for param, grad, first, second, master, step, hyper, random, stochastic in params:
        p, g, m, v = param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr()
        w = 0 if master is None else master.data_ptr()
        aligned = (p | g | m | v | w) % 16 == 0
        has_master, weights = (False, 0) if master is None else (True, master.nbytes)
        dtypes = param.dtype, grad.dtype, first.dtype
        variants.append(_Variant(*dtypes, has_master, stochastic, aligned))
        sizes.append((param.is_contiguous(), grad.numel(), first.nbytes, second.nbytes, weights))
        # Same order as the columns in kernel.py.
        rows.append((p, g, m, v, w, step.data_ptr(), hyper.data_ptr(), param.numel(), random))
    return TableLayout(rows, sizes, variants, block_size)


class Tables:
    """Device tensors with which the kernels run one AdamW step on many parameters of one device.

    The main tensor, `table`, has one row of tensor addresses for each parameter. Captured CUDA
    graphs read this tensor, so it is never modified. If addresses change, new Tables are created.
    """

    def __init__(
        self, layout: TableLayout, device: torch.device, like: Tables | None = None
    ) -> None:
        """Copy the addresses to the device, and allocate the other tensors that the kernels need.

        `like` is on the same device. If it has the same numbers of elements, variants and block
        size, all tensors except the table of addresses are shared with it.
        """
        from systems.kernels.adamw import kernel

        self.layout, self.device = layout, device
        rows = len(layout.rows)
        self.table = _upload(torch.tensor(layout.rows, dtype=torch.int64, device="cpu"), device)
        shapes = [row[kernel.NUMEL.value] for row in layout.rows]
        self._shapes = (shapes, layout.variants, layout.block_size)
        self.scalars: Tensor  # float32 (rows, SCALARS)
        self.keys: Tensor  # uint32 (rows,)
        self.blocks: dict[_Variant, Tensor] = {}  # int32 (programs, 2)
        if like is not None and like._shapes == self._shapes:
            self.scalars, self.keys, self.blocks = like.scalars, like.keys, like.blocks
            return
        self.scalars = torch.empty(rows, kernel.SCALARS.value, dtype=torch.float32, device=device)
        self.keys = torch.empty(rows, dtype=torch.uint32, device=device)
        numel = torch.tensor(shapes, dtype=torch.int64, device="cpu")
        for variant in dict.fromkeys(layout.variants):
            mine = torch.tensor([v == variant for v in layout.variants], device="cpu")
            count = torch.where(mine, (numel + layout.block_size - 1) // layout.block_size, 0)
            row = torch.arange(rows, device="cpu").repeat_interleave(count)
            first = (count.cumsum(0) - count).repeat_interleave(count)
            block = torch.arange(len(row), device="cpu") - first
            if len(row):  # no blocks if all tensors are empty
                pairs = torch.stack([row, block], dim=1).to(torch.int32)
                self.blocks[variant] = _upload(pairs, device)

    def launch(self) -> None:
        """Launch the kernels that run one AdamW step on all parameters in the table."""
        with on(self.device):
            self._advance(len(self.layout.rows))
            for variant, blocks in self.blocks.items():
                self._update(variant, blocks)

    def compile(self) -> None:
        """Compile and load the kernels, without updating any tensor.

        The kernels are launched in such a way that they change nothing. Call this method before a
        CUDA graph is captured, because kernels cannot be loaded during a capture.
        """
        with on(self.device):
            self._advance(0)
            for variant in self.blocks:
                past_the_end = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
                self._update(variant, past_the_end.to(self.device))

    def _advance(self, rows: int) -> None:
        from systems.kernels.adamw import kernel

        grid = (max(1, -(-rows // kernel.ROWS)),)
        kernel.advance_kernel[grid](
            self.table, self.scalars, self.keys, rows, ROWS=kernel.ROWS, enable_fp_fusion=False
        )

    def _update(self, variant: _Variant, blocks: Tensor) -> None:
        from systems.kernels.adamw import kernel

        kernel.adamw_kernel[(len(blocks),)](
            self.table, self.scalars, self.keys, blocks,
            **constants(*variant, block_size=self.layout.block_size),
            num_warps=num_warps(variant.param, variant.grad, variant.state,
                                variant.master, self.layout.block_size),
            enable_fp_fusion=False,
        )  # fmt: skip


def stale_reason(layout: TableLayout, tables: Tables | None) -> str:
    """Return a message that says why a step cannot be captured in a CUDA graph with `tables`.

    `tables` does not fit the parameters, and new Tables cannot be created during a capture.
    `layout` is that of the step.
    """
    if tables is None:
        return "FusedAdamW has not yet copied the addresses of the tensors to the device"
    before, now = tables.layout.rows, layout.rows
    if len(before) != len(now):
        return (
            f"{len(now)} parameters have gradients, but {len(before)} parameters had gradients in "
            "the last FusedAdamW.prepare() or step()"
        )
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "master", "step")
    moved = [
        f"{name} of parameter {i}"
        for i, (old, new) in enumerate(zip(before, now, strict=True))
        for name, old_address, new_address in zip(names, old, new, strict=False)
        if old_address != new_address
    ]
    what = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
    return (
        "tensors changed or moved since the last FusedAdamW.prepare() or step(): "
        f"{what or 'other dtypes or sizes'}"
    )


def constants(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype,
    master: bool, stochastic: bool, aligned: bool, *, block_size: int = BLOCK_SIZE,
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of `kernel.adamw_kernel`, which describes them, by name."""
    import triton.language as tl

    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return {
        "PARAM_DTYPE": types[param],
        "GRAD_DTYPE": types[grad],
        "STATE_DTYPE": types[state],
        "HAS_MASTER": master,
        "STOCHASTIC": stochastic,
        "ALIGNED": aligned,
        "BLOCK": block_size,
    }


def num_warps(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype, master: bool, block_size: int
) -> int:
    """Return the number of warps of `kernel.adamw_kernel`, between 1 and 32.

    If the number is within this range, each thread has 16 bytes of the widest dtype.
    """
    widest = max(4 if master else 0, *(dtype.itemsize for dtype in (param, grad, state)))
    return min(MAX_WARPS, max(1, block_size * widest // WARP_BYTES))


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device asynchronously.

    The copy is from pinned memory. torch reuses this memory only after the device has read it.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.no_grad()
def fused_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    stochastic_rounding: bool,
    seed: int = 0,
    index: int = 0,
) -> None:
    """Run one AdamW step on one tensor in place, with the Triton kernels.

    The arguments are those of `reference.adamw_reference`. All tensors must be on the same GPU, or
    on the CPU with TRITON_INTERPRET=1.

    If both moments are float32, results are bitwise equal to the reference. If both are bfloat16,
    the update has an error of up to 3 units in the last place of float32. A parameter that is
    rounded to bfloat16 may then differ from the reference by one unit in the last place of
    bfloat16.

    Raises:
        RuntimeError: if a tensor is not contiguous or has another shape, dtype or device than in
            `adamw_reference`; the message names all of them.
    """
    hyper = torch.tensor([lr, *betas, eps, weight_decay], dtype=torch.float64, device=param.device)
    tensors = ParamTensors(
        param, grad, exp_avg, exp_avg_sq, master, step, hyper, stream(seed, index),
        stochastic_rounding,
    )  # fmt: skip
    dtypes = {"exp_avg": exp_avg.dtype, "exp_avg_sq": exp_avg.dtype}
    dtypes |= {} if master is None else {"master": torch.float32}
    if errors := misfits("param", param, tensors.others(), dtypes):
        raise RuntimeError("; ".join(errors))
    Tables(table_layout([tensors], BLOCK_SIZE), param.device).launch()
