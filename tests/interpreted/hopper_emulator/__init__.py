"""Runs the Hopper kernels on a CPU, from their source, with the parallelism of the GPU.

Triton's interpreter does not support Gluon. This package executes the Python source of a Gluon
kernel with substitutes for the modules of Gluon and Triton:

    schedule        which warps and asynchronous operations proceed, in a random order
    values          scalars, tiles in registers, and pointers
    shared_memory   tiles in shared memory, mbarriers, and TMA descriptors
    language        the functions of `triton.experimental.gluon.language`
    hopper          mbarriers, TMA and WGMMA
    launch          loads the source of kernels, and replaces the launch of Gluon kernels

The warpgroups of `gl.warp_specialize` run in threads. A random choice decides which one proceeds
at each step, and when a copy by TMA or a WGMMA takes place between its start and the wait for it.
Synchronization errors therefore lead to wrong results, to NaN or to a deadlock in some of the runs.
These errors are found:

- a slot in shared memory that is read before it is filled, or overwritten while it is read. It
  holds NaN from the start of a copy to its end
- an mbarrier with a wrong phase, number of arrivals or number of bytes, and a deadlock
- a missing `fence_async_shared`: shared memory has two copies, one for stores by threads, and one
  for TMA and WGMMA. A store changes the second copy at the next fence
- a result of a WGMMA that is used before the wait for it
- an access outside of a tensor in global memory

Layouts, registers, and races between the four warps of a warpgroup are not emulated.
"""
