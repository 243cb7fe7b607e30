"""A Triton kernel launched again and again with the same numbers: what a call costs the host.

Triton looks at every argument of every launch to find the variant that fits, asks its settings and
hooks, and encodes descriptors: 15 to 60 microseconds for a kernel of forty arguments. A `Launch`
holds all arguments but the tensors, looks at their alignment and calls what Triton's own launch
ends in.
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

REGISTERS = 65_536  # of a multiprocessor, of every GPU since 2012
# Of the thread that asks for it: what others launch meanwhile is to run
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


@contextlib.contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Every `Launch` that this thread calls in here is compiled and not launched, `threads` of them
    at a time.

    What does not compile says so when it is launched.
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
    """`kernel[grid](*maps, *tensors, *numbers, **constants)`, for one device, which is to be the
    current, and for maps and tensors that have the same dtypes at every call.

    Triton's launch hooks (Proton's) see its first call with each alignment only.

    Args:
        kernel: a function under triton.jit or gluon.jit, its arguments in this order: descriptors,
            tensors, numbers, constants. A variant is compiled at the first call and found again by
            alignment alone.
        grid: programs along each axis.
        constants: constexpr arguments, in the kernel's order.
        options: num_warps and the like.
    """

    __slots__ = ("_launches", "constants", "grid", "kernel", "made", "numbers", "options")

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
        self.made: Any = None  # the last variant compiled, Triton's CompiledKernel
        self._launches: dict[int, Callable[..., object]] = {}

    def __call__(self, *tensors: Tensor, maps: Sequence[TensorMap] = ()) -> None:
        # Triton specialises a pointer on whether 16 divides it: so may what it compiles to.
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = 0
        for address in addresses:
            aligned = 2 * aligned + (address % 16 == 0)
        launch = self._launches.get(aligned)
        if launch is not None:
            launch(maps, addresses)
            return
        arguments = (*(given.descriptor for given in maps), *tensors, *self.numbers)
        if _compiles_only.get():
            self.kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options)
            return
        made = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if hasattr(made, "packed_metadata"):  # not by the interpreter, nor while others compile
            rest = (*self.numbers, *self.constants.values())
            self._launches[aligned] = _direct(made, self.grid, rest)
            self.made = made

    def resident(self) -> int:
        """Programs of the last variant that a multiprocessor of this GPU has room for at a time."""
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        threads = 32 * self.made.metadata.num_warps
        registers = -(-self.made.n_regs // 8) * 8 * threads
        shared = self.made.metadata.shared + 1024  # what a program has besides
        return max(
            1,
            min(
                REGISTERS // registers,
                gpu.shared_memory_per_multiprocessor // shared,
                gpu.max_threads_per_multi_processor // threads,
            ),
        )


def _direct(made: Any, grid: tuple[int, ...], rest: tuple[Any, ...]) -> Callable[..., object]:
    """What triton 3.6's `CompiledKernel.__getitem__` comes to where no hook is set.

    Given addresses in place of tensors it need not ask each of them where it lies.
    """
    run = made.run
    if run.global_scratch_size or run.profile_scratch_size:
        return lambda maps, addresses: made[grid](*(m.descriptor for m in maps), *addresses, *rest)
    metas = getattr(made.metadata, "tensordesc_meta", None) or ()
    launch = run.launch
    if metas:  # what Triton's own encodes descriptors for
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    launch = functools.partial(launch, *grid)
    stream_of, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()
    scratch, hooks = (None, None), (None, None, None)
    before = (
        made.function, run.launch_cooperative_grid, run.launch_pdl, *scratch,
        made.packed_metadata, *hooks,
    )  # fmt: skip

    def direct(maps: Sequence[TensorMap], addresses: list[int]) -> None:
        encoded: list[Any] = []
        for given, meta in zip(maps, metas, strict=True):
            encoded += given.arguments(meta)
        launch(stream_of(device), *before, *encoded, *addresses, *rest)

    return direct
