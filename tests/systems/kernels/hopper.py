"""Compile kernels as a launch on an H100 or H200 does, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from systems.kernels.kernel_launch import Launch

MULTIPROCESSORS = 132


class Kernel(NamedTuple):
    """A compiled kernel, and the resources that it uses."""

    name: str
    constants: dict[str, Any]
    compiled: Any  # Triton's CompiledKernel
    registers: int  # per thread
    spilled: int  # bytes per thread

    @classmethod
    def of(cls, compiled: Any, constants: dict[str, Any] | None = None) -> Kernel:
        usage = cuobjdump(compiled, "--dump-resource-usage")
        used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        spilled = used["STACK"] + used["LOCAL"]
        return cls(compiled.metadata.name, constants or {}, compiled, used["REG"], spilled)

    @property
    def is_gluon(self) -> bool:
        return str(self.compiled.src.ext) == "ttgir"

    @property
    def ptx(self) -> str:
        return str(self.compiled.asm["ptx"])

    @property
    def shared(self) -> int:
        """Shared memory of a program, in bytes."""
        return int(self.compiled.metadata.shared)

    @property
    def resident(self) -> int:
        """Number of programs that fit on one multiprocessor at the same time (the occupancy).

        A multiprocessor has 65,536 registers, 228 KiB of shared memory and room for 64 warps. The
        registers per thread are rounded up to a multiple of 8. The hardware reserves 1 KiB of
        shared memory for each program, in addition to the shared memory that the program requests.
        """
        warps = self.compiled.metadata.num_warps
        registers = -(-self.registers // 8) * 8 * 32 * warps
        return min(65_536 // registers, (228 << 10) // (self.shared + 1024), 64 // warps)


class _Driver:
    """The driver of an H100 for Triton, which cannot launch kernels."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "H100"  # the key of the cache of kernels

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def compiling_for_hopper() -> Iterator[list[Kernel]]:
    """Return a context in which launches compile a kernel for an H100, and do not run it.

    The tensors are on the CPU. The list that the context yields gets the kernel of each `Launch`.
    In the context, the function `warmup` of any Triton kernel also compiles for an H100.
    """
    from triton.runtime import driver

    from systems.kernels.flash_attention import arguments
    from systems.kernels.flash_attention.triton import base_plan, launch

    found: list[Kernel] = []

    def call(self: Launch, *tensors: Tensor, maps: Sequence[Any] = ()) -> None:
        given = (*maps, *tensors, *self.numbers)
        compiled = self.kernel.warmup(*given, grid=self.grid, **self.constants, **self.options)
        found.append(Kernel.of(compiled, self.constants))

    with launches_on_a_cpu(call, MULTIPROCESSORS) as patch:
        patch.setattr(arguments, "runs_kernels", lambda device: True)
        patch.setattr(arguments, "mend_interpreter", lambda: None)
        patch.setattr(base_plan, "is_hopper", lambda device: True)
        for name in ("_forward_plan", "_backward_plan"):
            patch.setattr(launch, name, getattr(launch, name).__wrapped__)
        patch.setattr(driver, "_active", _Driver())
        yield found


@contextlib.contextmanager
def launches_on_a_cpu(
    call: Callable[..., None], multiprocessors: int
) -> Iterator[pytest.MonkeyPatch]:
    """Return a context in which the Hopper kernels take tensors on the CPU, and `call` launches."""
    from systems.kernels.flash_attention.hopper import backward_launch, forward_launch, support

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", call)
        patch.setattr(support, "is_hopper", lambda device: True)
        for module in (backward_launch, forward_launch):
            patch.setattr(module, "multiprocessors", lambda index: multiprocessors)
        # Without the caches of plans, which depend on the number of multiprocessors
        patch.setattr(forward_launch, "_forward_plan", forward_launch.HopperForwardPlan)
        patch.setattr(backward_launch, "_backward_plan", backward_launch.HopperBackwardPlan)
        yield patch


def cuobjdump(compiled: Any, option: str) -> str:
    """Return what cuobjdump prints of a kernel that Triton has compiled, with "-sass" its SASS."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
