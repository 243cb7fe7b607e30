"""The environment variables of a job: nothing of a surrounding torchrun or Slurm allocation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from jobs import ROOT

# What a surrounding allocation or torchrun leaves in the environment; a job must not see it.
_LEAKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME"
    r"|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_.*"
    r"|SUBMITIT_.*)$"
)
_SLURM_LEAKS = re.compile(r"(?!SLURM_CONF$)(SLURM|SBATCH|SRUN|SALLOC|SLURMD)_.*$")


def without_leaks(environment: dict[str, str], slurm: bool = True) -> dict[str, str]:
    """The environment without what a surrounding torchrun, or (slurm) allocation, put there."""
    return {
        name: value
        for name, value in environment.items()
        if not _LEAKS.match(name) and not (slurm and _SLURM_LEAKS.match(name))
    }


def job_environment() -> dict[str, str]:
    """The environment that a job starts from: this one without leaks, this project importable."""
    return with_project(without_leaks(dict(os.environ)))


def with_project(environment: dict[str, str]) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    # Number GPUs as NVML and nvidia-smi do, or a record names another card than was measured.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return environment | order | {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def scoped_environment(slurm: bool) -> Iterator[None]:
    """Take leaks out of this process's environment for a while; restore it as it was."""
    before = dict(os.environ)
    for name in before.keys() - without_leaks(before, slurm).keys():
        del os.environ[name]
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
