"""Environment variables of a job, without those of a surrounding torchrun or Slurm allocation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from jobs import ROOT

# Variables that a surrounding torchrun or allocation sets. A job that inherited them would take
# its rank, rendezvous or resources from the wrong launch.
_LEAKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME"
    r"|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_.*"
    r"|SUBMITIT_.*)$"
)
_SLURM_LEAKS = re.compile(r"(?!SLURM_CONF$)(SLURM|SBATCH|SRUN|SALLOC|SLURMD)_.*$")


def without_leaks(environment: dict[str, str], slurm: bool = True) -> dict[str, str]:
    """Return the environment without the variables of a surrounding torchrun or allocation.

    Args:
        environment: environment variables by name.
        slurm: also remove Slurm's variables, except SLURM_CONF.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _LEAKS.match(name) and not (slurm and _SLURM_LEAKS.match(name))
    }


def job_environment() -> dict[str, str]:
    """Return this process's environment for a job: without leaks, the project on PYTHONPATH."""
    return with_project(without_leaks(dict(os.environ)))


def with_project(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the project on PYTHONPATH and GPUs numbered by PCI bus."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    # Number GPUs as NVML and nvidia-smi do. Otherwise CUDA may number them differently, and a
    # record would name a GPU other than the one measured.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return environment | order | {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def scoped_environment(slurm: bool) -> Iterator[None]:
    """Remove leaked variables from this process's environment, and restore it on exit.

    Args:
        slurm: as in `without_leaks`.
    """
    before = dict(os.environ)
    for name in before.keys() - without_leaks(before, slurm).keys():
        del os.environ[name]
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
