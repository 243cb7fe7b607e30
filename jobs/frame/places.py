"""Tells whether records were measured on the same GPUs and host, as far as the records tell."""

from __future__ import annotations

from collections.abc import Collection

from jobs.frame.recorded import UNKNOWN, recorded_value
from jobs.results.record import Record


def on_different_gpus(some: Collection[Record], others: Collection[Record]) -> bool:
    """Return whether two cells were measured on different GPUs or hosts.

    A host that was booted again counts as another host. Records without the id of the boot are
    compared by the UUIDs of their GPUs and the name of the host. The result is False if it is
    unknown.
    """
    allocations = [{record.allocation for record in cell} for cell in (some, others)]
    if not any(None in cell for cell in allocations):
        return allocations[0] != allocations[1]
    return any(_differ(some, others, name) for name in ("gpu", "host"))


def _differ(some: Collection[Record], others: Collection[Record], name: str) -> bool:
    """Return whether the records of two cells have different values. False if one is unknown."""
    values, of_others = ({recorded_value(record, name) for record in r} for r in (some, others))
    return values != of_others and not any(UNKNOWN in value for value in values | of_others)
