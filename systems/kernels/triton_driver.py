"""Triton's function that launches a compiled kernel, which differs between releases.

In each launch, Triton's own launcher reads settings and hooks and encodes TMA descriptors. The
functions here call what it calls: the function of the driver that takes encoded arguments. Its
interface is private. For a release of Triton that is not in DIRECT_RELEASES, kernels are launched
by Triton itself, with more host overhead.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

# A function of the stream and the encoded arguments, which returns a function that launches the
# kernel with them
Bind = Callable[[int, tuple[Any, ...]], Callable[[], object]]

DIRECT_RELEASES = ((3, 6), (3, 7), (3, 8), (3, 9))


@functools.cache
def release() -> tuple[int, ...]:
    """Return the release of Triton, such as (3, 8) for version 3.8.1. Empty: unknown."""
    import triton

    known = re.match(r"(\d+)\.(\d+)\.", triton.__version__)
    return tuple(map(int, known.groups())) if known else ()


def encoded_descriptor(descriptor: Any, meta: dict[str, Any]) -> list[Any]:
    """Return a TMA descriptor, of Gluon, as a list of arguments for `direct_launch`.

    `meta` is an element of Triton's `tensordesc_metas`, for the parameter that takes the
    descriptor. It depends only on the shape and layout of the tile.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    unused = () if release() < (3, 8) else (None,)
    return make_tensordesc_arg(descriptor, meta, *unused)  # type: ignore[no-any-return]


def tensordesc_metas(compiled: Any) -> tuple[dict[str, Any], ...]:
    """Return a description of each TMA descriptor that a kernel takes, in their order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


def direct_launch(compiled: Any, grid: tuple[int, ...]) -> Bind | None:
    """Return a function that binds a compiled kernel to its arguments, for launches without hooks.

    It is called with a stream of the current device and the values of all parameters: of tensors
    their addresses, of TMA descriptors the elements of `encoded_descriptor`. It returns a function
    without parameters that launches the kernel with little host overhead.

    Returns None if only Triton can launch the kernel: in an unknown release, or if the kernel needs
    scratch memory, which Triton allocates in each launch.
    """
    run = compiled.run
    scratch = run.global_scratch_size or run.profile_scratch_size
    if release() not in DIRECT_RELEASES or scratch or getattr(run, "gsan_enabled", False):
        return None
    options = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    no_hooks, no_scratch = (None, None, None), (None, None)
    if not hasattr(run, "arg_annotations"):  # Triton 3.6: a function compiled for this kernel
        launch = run.launch
        if tensordesc_metas(compiled):  # encodes descriptors, and calls the function inside it
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        fixed = *options, *no_scratch, compiled.packed_metadata, *no_hooks
        return lambda stream, arguments: partial(launch, *grid, stream, *fixed, *arguments)

    import triton

    launch = triton.runtime.driver.active.utils.launch
    types = run.arg_annotations, run.kernel_signature
    before = *options, compiled.packed_metadata, *no_hooks, *no_scratch, *types
    return lambda stream, arguments: partial(launch, *grid, stream, *before, arguments)
