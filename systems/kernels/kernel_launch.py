"""Launch a Triton kernel repeatedly with low host overhead.

In every launch, Triton inspects all arguments to select a compiled variant of the kernel, reads its
own settings and hooks, and encodes TMA descriptors. For a kernel with forty arguments this takes 15
to 60 microseconds of CPU time. `Launch` avoids most of this work. It stores all arguments except
the tensors, and calls the same function as Triton, see `triton_driver`. `Repeats` avoids almost all
of it if the addresses of the tensors are those of an earlier call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import current_stream
from systems.kernels.triton_driver import direct_launch, encoded_descriptor, tensordesc_metas
from systems.triton_faults import TRITON_FAULT

Repeat = Callable[[], object]  # launches a kernel again with the same arguments
# Maximum number of calls that all `Repeats` objects together keep, with about 5 KB each. In
# training, each layer needs two: the caching allocator returns the same addresses in every step.
MAX_REPEATS = 4096
# Number of 32-bit registers per multiprocessor, the same for all NVIDIA GPUs that Triton supports
REGISTERS = 65_536
# True within `compiling_only`. Context variables are local to a thread, so other threads can launch
# kernels at the same time.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


@contextlib.contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Return a context manager in which calls of `Launch` objects only compile the kernels.

    A pool of threads compiles them in parallel, and the context ends when all are compiled. A call
    after the context raises the errors of compilation. A `Launch` object that has run before the
    context still runs its kernel. Only calls by the thread that entered the context are affected.
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
    """Launch of a Triton kernel with a fixed grid and fixed scalar arguments.

    The tensors are passed in each call. A call `launch(*tensors, maps=maps)` is equivalent to

        kernel[grid](*maps, *tensors, *numbers, **constants, **options)

    The optional argument `maps` is a list of TMA descriptors, from `tensor_maps.TensorMaps`. All
    calls must use the same dtypes and the same device, which must be the current device.

    Triton compiles separate variants of a kernel for tensors with aligned and with unaligned
    addresses. The first call of each variant is an ordinary Triton launch, and returns None, as all
    calls in Triton's interpreter and those that only compile. Later calls return a function that
    launches the kernel again on the same stream, with the same numbers and with tensors at the same
    addresses. They skip Triton's launch hooks if `triton_driver.direct_launch` supports the kernel,
    so tools that use these hooks, such as the profiler Proton, do not see them.

    Raises:
        RuntimeError: if the installed version of Triton has a known fault.

    Args:
        kernel: triton.jit or gluon.jit function. Its parameters must be TMA descriptors, tensors,
            numbers and constants, in this order.
        grid: up to three numbers of programs.
        numbers: values of the int and float parameters, in their order.
        constants: values of the constexpr parameters by name, in their order.
        options: of Triton's compiler, such as num_warps.
    """

    __slots__ = ("_variants", "compiled", "constants", "grid", "kernel", "numbers", "options")

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        **options: int,
    ):
        if TRITON_FAULT:
            raise RuntimeError(TRITON_FAULT)
        self.kernel, self.numbers, self.constants = kernel, tuple(numbers), dict(constants)
        self.grid = (*grid, 1, 1)[:3]
        # Stated because Triton 3.9 warns that this default will change
        self.options = {"enable_fp_fusion": True, **options}
        self.compiled: Any = None  # Triton's CompiledKernel of the variant that was compiled last
        self._variants: dict[int, Callable[[Sequence[Any], list[int]], Repeat]] = {}

    def __call__(self, *tensors: Tensor, maps: Sequence[Any] = ()) -> Repeat | None:
        # Triton specializes a kernel on whether the address of a tensor is a multiple of 16.
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = 0
        for address in addresses:
            aligned = 2 * aligned + (address % 16 == 0)
        bind = self._variants.get(aligned)
        if bind is not None:
            repeat = bind(maps, addresses)
            repeat()
            return repeat
        arguments = (*maps, *tensors, *self.numbers)
        if _compiles_only.get():
            self.kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options)
            return None
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if hasattr(compiled, "packed_metadata"):  # neither interpreted nor being compiled
            rest = (*self.numbers, *self.constants.values())
            self._variants[aligned] = _variant(compiled, self.grid, rest)
            self.compiled = compiled
        return None

    def resident(self) -> int:
        """Return the occupancy of the kernel: how many of its programs fit on a multiprocessor.

        An earlier call of this object must have compiled and launched the kernel.
        """
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


def _variant(
    compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...]
) -> Callable[[Sequence[Any], list[int]], Repeat]:
    """Return a function (maps, addresses of the tensors) that binds a compiled kernel to these.

    `rest` has the values of the parameters that follow the tensors.
    """
    direct, metas = direct_launch(compiled, grid), tensordesc_metas(compiled)
    if direct is None:
        return lambda maps, addresses: partial(compiled[grid], *maps, *addresses, *rest)
    device = torch.device("cuda", torch.cuda.current_device())

    def bind(maps: Sequence[Any], addresses: list[int]) -> Repeat:
        encoded: list[Any] = []
        for descriptor, meta in zip(maps, metas, strict=True):
            encoded += encoded_descriptor(descriptor, meta)
        return direct(current_stream(device), (*encoded, *addresses, *rest))

    return bind


class Repeats:
    """The launches of a plan, repeated for tensors with the same addresses as before.

    A call `repeats(stream, tensors, launch)` launches what `launch()` launches. `launch` returns
    the results of its calls of `Launch` objects. It must be the same function in all calls, except
    for the tensors, and must use exactly these. The current stream must be `stream`, a number.
    """

    __slots__ = ("_number",)
    _numbers = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._numbers)

    def __call__(
        self,
        stream: int,
        tensors: Sequence[Tensor],
        launch: Callable[[], Sequence[Repeat | None]],
    ) -> None:
        key = (self._number, stream, *[tensor.data_ptr() for tensor in tensors])
        found = _repeats.get(key)
        if found is not None:
            for repeat in found:
                repeat()
            return
        launched = launch()
        repeats = [repeat for repeat in launched if repeat is not None]
        if len(repeats) == len(launched):
            if len(_repeats) >= MAX_REPEATS:
                _repeats.clear()
            _repeats[key] = repeats


# By the number of a `Repeats` object, the stream and the addresses
_repeats: dict[tuple[int, ...], Sequence[Repeat]] = {}
