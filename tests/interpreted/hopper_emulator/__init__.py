"""Runs the Hopper kernels on a CPU, from their source, with the synchronization of the GPU.

Triton's interpreter does not support Gluon. This package executes the Python source of a Gluon
kernel with substitutes for the modules of Gluon and Triton:

    schedule        which warpgroups and asynchronous operations proceed, in a random order
    values          scalars, tiles in registers, and pointers
    shared_memory   tiles in shared memory, mbarriers, and TMA descriptors
    language        the functions of `triton.experimental.gluon.language`
    hopper          mbarriers, TMA and WGMMA
    launch          loads the source of kernels, and replaces the launch of Gluon kernels

Each warpgroup runs in a thread, but only one thread runs at a time. Before each action that others
can see, a random choice decides who proceeds: a warpgroup, a copy by TMA or a WGMMA. The same seed
gives the same order. Synchronization errors lead to wrong results, to NaN or to a deadlock in some
of the orders. These errors are found:

- a slot in shared memory that is read before it is filled, or overwritten while it is read. It
  holds NaN from the start of a copy to its end
- an mbarrier with a wrong phase, number of arrivals or number of bytes, and a deadlock
- a missing `fence_async_shared`. Shared memory has two copies, one as seen by threads, and one as
  seen by TMA and WGMMA. A store sets the second copy to NaN, and the next fence publishes the data
- a result of a WGMMA that is used before the wait for it
- an addition to global memory that is assumed to be complete when TMA has only read its data, or
  when threads have not released it
- an access outside of the memory of a tensor in global memory

Not emulated: registers; layouts, except the order of columns in swizzled tiles; races between the
four warps of a warpgroup; the order of stores to global memory by threads, which others see at
once; overflow of int32. A WGMMA or a copy reads all of its data at one instant. Maxima propagate
NaN, which is stricter than on a GPU.
"""
