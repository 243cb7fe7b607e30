"""Launch a Triton kernel repeatedly with low host overhead.

For every launch Triton inspects all arguments to find the compiled variant, reads its settings and
hooks, and encodes TMA descriptors. This takes 15 to 60 microseconds for a kernel with forty
arguments. A `Launch` holds all arguments except the tensors. In a call it checks only the alignment
of the tensors and then calls the same driver function as Triton.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from systems.kernels.tensor_maps import TensorMap

REGISTERS = 65_536  # 32-bit registers per multiprocessor of every NVIDIA GPU that Triton supports
# A context variable is local to its thread, so kernels of other threads are still launched.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


@contextlib.contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Return a context in which each `Launch` that this thread calls compiles and does not launch.

    Kernels are compiled by `threads` threads. Compile errors are ignored in the context and raised
    by the later launch.
    """
    import triton

    with ThreadPoolExecutor(threads) as pool:
        before = _compiles_only.set(True)
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            _compiles_only.reset(before)


class Launch:
    """Launch of a kernel with fixed grid, numbers and constants; a call supplies the tensors.

    A call is equivalent to `kernel[grid](*maps, *tensors, *numbers, **constants)`. All calls must
    be on the same device, which must be the current one, and the dtypes of maps and tensors must be
    the same in every call. The first call with an alignment of the tensors compiles a variant of
    the kernel. Triton's launch hooks (Proton's, for example) see only these first calls.

    Args:
        kernel: a triton.jit or gluon.jit function whose arguments are TMA descriptors, tensors,
            numbers and constants, in this order.
        grid: programs along each axis.
        numbers: int and float arguments, in the kernel's order.
        constants: constexpr arguments, in the kernel's order.
        options: launch options such as num_warps.
    """

    __slots__ = ("_launches", "compiled", "constants", "grid", "kernel", "numbers", "options")

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        **options: int,
    ):
        self.kernel, self.numbers, self.constants = kernel, tuple(numbers), dict(constants)
        self.grid = (*grid, 1, 1)[:3]
        self.options = options
        self.compiled: Any = None  # Triton's CompiledKernel of the last variant
        self._launches: dict[int, Callable[..., object]] = {}

    def __call__(self, *tensors: Tensor, maps: Sequence[TensorMap] = ()) -> None:
        # Triton specializes a kernel on whether the address of a tensor is a multiple of 16.
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = 0
        for address in addresses:
            aligned = 2 * aligned + (address % 16 == 0)
        launch = self._launches.get(aligned)
        if launch is not None:
            launch(maps, addresses)
            return
        arguments = (*(m.descriptor for m in maps), *tensors, *self.numbers)
        if _compiles_only.get():
            self.kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options)
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if hasattr(compiled, "packed_metadata"):  # neither interpreted nor still compiling
            rest = (*self.numbers, *self.constants.values())
            self._launches[aligned] = _direct(compiled, self.grid, rest)
            self.compiled = compiled

    def resident(self) -> int:
        """Return the occupancy of the last compiled variant, in programs per multiprocessor."""
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        threads = 32 * self.compiled.metadata.num_warps
        registers = -(-self.compiled.n_regs // 8) * 8 * threads
        shared = self.compiled.metadata.shared + 1024  # CUDA reserves 1 KiB per program
        return max(
            1,
            min(
                REGISTERS // registers,
                gpu.shared_memory_per_multiprocessor // shared,
                gpu.max_threads_per_multi_processor // threads,
            ),
        )


def _direct(compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...]) -> Callable[..., object]:
    """Return a function that launches as `CompiledKernel.__getitem__` of Triton 3.6, without hooks.

    The function takes TMA descriptors and addresses. With addresses instead of tensors, the driver
    does not have to call a method of each tensor.
    """
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return lambda maps, addresses: compiled[grid](
            *(m.descriptor for m in maps), *addresses, *rest
        )
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    launch = run.launch
    if metas:  # Triton's launcher encodes descriptors in every call; use the one that it wraps
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    launch = functools.partial(launch, *grid)
    stream_of, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()
    scratch, hooks = (None, None), (None, None, None)
    before = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch,
        compiled.packed_metadata, *hooks,
    )  # fmt: skip

    def direct(maps: Sequence[TensorMap], addresses: list[int]) -> None:
        encoded: list[Any] = []
        for tensor_map, meta in zip(maps, metas, strict=True):
            encoded += tensor_map.arguments(meta)
        launch(stream_of(device), *before, *encoded, *addresses, *rest)

    return direct
