"""Environment variables of a job, without variables of a surrounding torchrun or Slurm job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jobs import ROOT
from jobs.run import Shape
from jobs.slurm_client import SLURM_VARIABLE

THREADS = "OMP_NUM_THREADS"

# Variables that a surrounding launcher (torchrun, MPI, submitit) sets. A job that inherited them
# would take its rank, rendezvous or resources from the wrong launch.
_LEAKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME"
    r"|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_.*"
    r"|SUBMITIT_.*)$"
)


def without_leaks(environment: dict[str, str], slurm: bool = True) -> dict[str, str]:
    """Return an environment without variables of launchers and, with `slurm`, of Slurm."""
    return {
        name: value
        for name, value in environment.items()
        if not _LEAKS.match(name) and not (slurm and SLURM_VARIABLE.match(name))
    }


def job_environment() -> dict[str, str]:
    return with_project(without_leaks(dict(os.environ)))


def with_project(environment: dict[str, str], first: Iterable[str] = ()) -> dict[str, str]:
    """Return an environment in which this project and the folders `first` can be imported."""
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([*first, str(ROOT), *filter(None, given)])
    # Number GPUs as NVML and nvidia-smi do. Otherwise CUDA may number them differently, and a
    # record could name the wrong GPU.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return environment | order | {"PYTHONPATH": os.pathsep.join(paths)}


def thread_limit(shape: Shape) -> dict[str, str]:
    """Return OMP_NUM_THREADS of each process of a run, which then share the CPUs of the run.

    Without Slurm, nothing else holds a run to its `cpus_per_task`. A value of the user stays. It is
    empty if a run of one process names no number of CPUs: then torch chooses.
    """
    if THREADS in os.environ:
        return {THREADS: os.environ[THREADS]}
    if shape.cpus_per_task is None and shape.nproc_per_node is None:
        return {}
    available = len(os.sched_getaffinity(0))
    cpus = min(shape.cpus_per_task or available, available)
    return {THREADS: str(max(1, cpus // (shape.nproc_per_node or 1)))}


@contextmanager
def scoped_environment(slurm: bool) -> Iterator[None]:
    """Remove the variables of other launchers from os.environ during the `with` block."""
    before = dict(os.environ)
    for name in before.keys() - without_leaks(before, slurm).keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
