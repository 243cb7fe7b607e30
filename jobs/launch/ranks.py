"""Checks of the number of processes that torchrun starts for a run."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.errors import InputError, Problem
from jobs.formatting import counted
from jobs.run import Run
from jobs.sweep.load import LoadedSweep


def require_ranks(loaded: LoadedSweep, runs: Iterable[Run]) -> None:
    """Check that torchrun starts as many processes as the parameter `world_size` of a run says.

    Raises:
        InputError: if it does not. Such a run would fail.
    """
    for run in runs:
        nodes, each, asked = run.shape.nodes, run.shape.nproc_per_node, run.params.get("world_size")
        if each is None or type(asked) is not int or asked == nodes * each:
            continue
        what = (
            f"launch.nproc_per_node must be world_size / resources.nodes, got {each} for "
            f"{counted(nodes, 'node')} and world_size {asked}"
        )
        raise InputError([Problem(loaded.document.at(("launch", "nproc_per_node")), what)])


def unlike_gpus(runs: Iterable[Run]) -> list[str]:
    """Return a note for each number of GPUs that is not that of the processes on a node.

    Without GPUs, only runs with the backend nccl need some.
    """
    shapes = {
        (run.shape.gpus_per_node, run.shape.nproc_per_node)
        for run in runs
        if run.shape.gpus_per_node or run.params.get("backend") == "nccl"
    }
    return [
        f"{counted(gpus, 'GPU')} but {counted(each, 'process')} per node; a process uses one GPU, "
        "see resources.gpus_per_node"
        for gpus, each in sorted(shapes, key=str)
        if each and gpus != each
    ]
