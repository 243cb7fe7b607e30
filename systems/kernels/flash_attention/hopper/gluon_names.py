"""Functions of Gluon by the names of Triton 3.9, for each older release of Triton.

| 3.9 | Triton 3.6 | Triton 3.7 | Triton 3.8 |
| --- | --- | --- | --- |
| barrier | gl.thread_barrier | gl.barrier | gl.barrier |
| async_load | tma.async_copy_global_to_shared | as 3.6 | tma.async_load |
| async_store | tma.async_copy_shared_to_global | as 3.6 | tma.async_store |
| async_atomic_add | only an operation of the compiler | as 3.6 | tma.async_atomic_add |
| reinterpret | the method _reinterpret | as 3.6 | as 3.6 |

`reinterpret(tile, dtype, shape, layout)` returns a view of the bytes of a tile in shared memory.
Since Triton 3.8, the view must have the size of the tile.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(gl.shared_memory_descriptor, "reinterpret"):
    reinterpret = gl.shared_memory_descriptor.reinterpret
else:
    reinterpret = gl.shared_memory_descriptor._reinterpret

if hasattr(tma, "async_atomic_add"):
    async_load, async_store = tma.async_load, tma.async_store
    async_atomic_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @builtin  # type: ignore[untyped-decorator]
    def async_atomic_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Add a tile in shared memory to global memory by TMA, asynchronously."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
        )
