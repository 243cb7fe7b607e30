"""Shows the ids of many Slurm jobs in short form, as squeue does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def compact_ids(job_ids: Iterable[str]) -> str:
    """Return job ids in short form, such as `12, 13_[0-9,11]`. scancel accepts each of its parts.

    Args:
        job_ids: ids such as "12", or "13_4" for an element of a job array.
    """
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, underscore, index = job_id.partition("_")
        indices = arrays.setdefault(array, [])
        if underscore:
            indices.append(int(index))
    return ", ".join(_compact(array, sorted(arrays[array])) for array in sorted(arrays, key=int))


def _compact(array: str, indices: list[int]) -> str:
    if not indices:
        return array
    breaks = [i for i, (a, b) in enumerate(pairwise(indices), start=1) if b != a + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    runs = [(indices[start], indices[end - 1]) for start, end in bounds]
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{array}_{text}" if len(indices) == 1 else f"{array}_[{text}]"
