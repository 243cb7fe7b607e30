"""Measure GPU memory over time, from a snapshot of torch's CUDA allocator.

    with recording():
        ...                              # create model and optimizer
        mark_phase(); forward()          # a mark at the start of each phase
        mark_phase(); backward()
        mark_phase()                     # a mark at the end of the last phase
        snapshot = torch.cuda.memory._snapshot()
    timeline = read_timeline(snapshot, ["forward", "backward"])

A mark is an allocation of one byte. It is recognized by the function `mark_phase` in its Python
stack. The allocator records marks and all other events, which are allocations and frees, in one
sequence. So the phase of each allocation is known without comparing clocks. Times are numbers of
events since the first mark, and the step lasts from the first to the last mark.

Sizes are the bytes that tensors requested. The allocator rounds each size up to a multiple of 512
bytes, or to the size of a free block that it reuses. This can add up to 1 MiB to a size.
`torch.cuda.max_memory_allocated` counts the rounded sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systems.measure.memory.source_lines import ROOT, Frame, Source, source_of

# Maximum number of events that the allocator keeps. A step of the largest model has about 40,000.
MAX_ENTRIES = 1_000_000
MARK = "mark_phase"  # name of the function that allocates marks
NOT_OWNED = ("activations", "temporaries", "before")  # kinds of memory without an `Owner`
KINDS = ("weights", "optimizer state", "gradients", *NOT_OWNED)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let torch's CUDA allocator record its events, with the Python stack of each allocation."""
    import torch

    # With context="alloc" a free event has the stack of the allocation.
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def mark_phase() -> None:
    """Mark the start of a phase, or the end of the last phase, in the allocator's history."""
    import torch

    torch.empty(1, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class Allocation:
    """One allocation of GPU memory during a training step.

    Attributes:
        size: requested size in bytes.
        start: time of the allocation, or 0 if it was made before the first mark.
        end: time at which the memory was freed. If it was not freed before the last mark, this is
            the number of events between the first and the last mark, plus 1.
        frames: Python stack of the allocation.
    """

    address: int
    size: int
    start: int
    end: int
    frames: tuple[Frame, ...] = ()

    def alive_at(self, time: int) -> bool:
        return self.start <= time < self.end


@dataclass(frozen=True)
class Phase:
    """Phase of a training step, such as forward, from its start to its end."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Owner:
    """Tensors of one kind, such as all weights. Each tensor owns the allocation at its address.

    Attributes:
        kind: weights, gradients or optimizer state.
        at: time at which the addresses were read. An address can belong to another tensor at other
            times.
        names: name of each tensor, by address.
    """

    kind: str
    at: int
    names: Mapping[int, str]


@dataclass(frozen=True)
class Timeline:
    """Phases of a training step, and all allocations that were alive during the step."""

    allocations: list[Allocation]
    phases: list[Phase]

    @property
    def events(self) -> int:
        return self.phases[-1].end

    def active_bytes(self, chosen: Sequence[bool] | None = None) -> np.ndarray:
        """Return the bytes in use after 0, 1, ... events, of all or of the chosen allocations."""
        change = np.zeros(self.events + 2, dtype=np.int64)
        for i, allocation in enumerate(self.allocations):
            if chosen is None or chosen[i]:
                change[allocation.start] += allocation.size
                change[allocation.end] -= allocation.size
        return np.cumsum(change)[: self.events + 1]

    def peak(self) -> tuple[int, int]:
        """Return the first time at which the most bytes are in use, and their number."""
        active = self.active_bytes()
        time = int(active.argmax())
        return time, int(active[time])

    def phase_of(self, start: int) -> str:
        """Return the name of the phase in which an allocation was made, or "before" for start 0."""
        if start == 0:
            return "before"
        return next(phase.name for phase in self.phases if start <= phase.end)


def read_timeline(snapshot: Mapping[str, Any], phases: Sequence[str], device: int = 0) -> Timeline:
    """Return phases and allocations of a step from the result of `torch.cuda.memory._snapshot`.

    Raises:
        ValueError: if the number of marks is not the number of phases plus 1. Marks before the last
            MAX_ENTRIES events are lost.
    """
    # alive: (start, size, frames) by address
    # over: (address, size, start, end, frames) of freed allocations
    alive: dict[int, tuple[int, int, Any]] = {}
    over: list[tuple[int, int, int, int, Any]] = []
    marks: list[int] = []
    mark_addresses: set[int] = set()
    time = 0
    trace = snapshot["device_traces"][device]
    for entry in trace:
        address, frames = entry.get("addr"), entry.get("frames", ())
        if entry["action"] == "alloc":
            if any(frame["name"] == MARK for frame in frames):
                marks.append(time)
                mark_addresses.add(address)
                continue
            time += 1
            alive[address] = (time, entry["size"], frames)
        elif entry["action"] == "free_completed":
            if address in mark_addresses:
                mark_addresses.remove(address)
                continue
            time += 1
            start, size, frames = alive.pop(address, (0, entry["size"], frames))
            over.append((address, size, start, time, frames))
    if len(marks) != len(phases) + 1:
        raise ValueError(
            f"the allocator's history must have {len(phases) + 1} marks, one before each phase "
            f"({', '.join(phases)}) and one at the end, got {len(marks)} in {len(trace)} events"
        )
    for block in _active_blocks(snapshot, device):  # a block without events is always alive
        there = (0, block["requested_size"], block.get("frames", ()))
        alive.setdefault(block["address"], there)
    over += [(address, size, start, time + 1, f) for address, (start, size, f) in alive.items()]
    first, last = marks[0], marks[-1]
    seen = [
        Allocation(
            address, size, max(start - first, 0), min(end, last + 1) - first, _frames(frames)
        )
        for address, size, start, end, frames in over
        if start <= last and end > first
    ]
    named = [Phase(name, marks[i] - first, marks[i + 1] - first) for i, name in enumerate(phases)]
    return Timeline(seen, named)


def kinds(timeline: Timeline, owners: Sequence[Owner]) -> list[str]:
    """Return the kind of each allocation of a training step.

    weights, gradients, optimizer state: one of `owners` has this kind and owns the allocation.
    activations: the allocation was made in forward and is alive at the end of forward.
    before: the allocation was made before the step and has no owner. Examples are the batch, the
    tables of RoPE and the workspaces of cuBLAS.
    temporaries: all other allocations.
    """
    saved_at = next((p.end for p in timeline.phases if p.name == "forward"), -1)
    found = []
    for one in timeline.allocations:
        owner = owner_of(one, owners)
        if owner is not None:
            found.append(owner.kind)
        elif one.start == 0:
            found.append("before")
        elif timeline.phase_of(one.start) == "forward" and one.alive_at(saved_at):
            found.append("activations")
        else:
            found.append("temporaries")
    return found


def owner_of(allocation: Allocation, owners: Sequence[Owner]) -> Owner | None:
    """Return the owner of which a tensor is stored in this allocation, or None."""
    for owner in owners:
        if allocation.address in owner.names and allocation.alive_at(owner.at):
            return owner
    return None


def bytes_by_kind(timeline: Timeline, kinds: Sequence[str], time: int) -> dict[str, int]:
    """Return the bytes in use at one time, by kind. `kinds` has the kind of each allocation."""
    total = dict.fromkeys(KINDS, 0)
    for allocation, kind in zip(timeline.allocations, kinds, strict=True):
        if allocation.alive_at(time):
            total[kind] += allocation.size
    return total


def largest_allocations(
    timeline: Timeline,
    owners: Sequence[Owner],
    top: int = 10,
    root: Path = ROOT,
) -> list[dict[str, Any]]:
    """Return the memory in use at the peak, grouped by source line, kind and phase, largest first.

    Gradients are grouped by parameter instead of source line, because autograd computes gradients
    in threads without Python frames.
    """
    time, peak = timeline.peak()
    groups = _groups(timeline, owners, root, time)
    return [
        {**origin, "count": len(sizes), "alive_bytes": sum(sizes), "share": sum(sizes) / peak}
        for origin, sizes in sorted(groups, key=lambda group: -sum(group[1]))[:top]
    ]


def largest_tensors(
    timeline: Timeline, owners: Sequence[Owner], top: int = 8, root: Path = ROOT
) -> list[dict[str, Any]]:
    """Return the largest single allocations that were alive at any time of the step.

    They are grouped as by `largest_allocations`. A group has the largest size in it and the number
    of allocations that are as large.
    """
    groups = _groups(timeline, owners, root, None)
    return [
        {**origin, "tensor_bytes": max(sizes), "count": sizes.count(max(sizes))}
        for origin, sizes in sorted(groups, key=lambda group: -max(group[1]))[:top]
    ]


def _groups(
    timeline: Timeline, owners: Sequence[Owner], root: Path, time: int | None
) -> list[tuple[dict[str, str], list[int]]]:
    """Return where allocations come from, with their sizes: those alive at a time, or ever."""
    groups: dict[tuple[Source, str, str], list[int]] = {}
    for one, kind in zip(timeline.allocations, kinds(timeline, owners), strict=True):
        if time is None or one.alive_at(time):
            source = source_of(one.frames, root)
            owner = owner_of(one, owners)
            if owner is not None and not one.frames:
                source = Source(f"{kind} of {owner.names[one.address]}", "", "")
            groups.setdefault((source, kind, timeline.phase_of(one.start)), []).append(one.size)
    return [
        (
            {
                "source": source.source,
                "code": source.code,
                "called_at": source.called_at,
                "kind": kind,
                "phase": phase,
            },
            sizes,
        )
        for (source, kind, phase), sizes in groups.items()
    ]


def _active_blocks(snapshot: Mapping[str, Any], device: int) -> Iterator[Mapping[str, Any]]:
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    yield block


def _frames(frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(f["filename"], f["line"], f["name"]) for f in frames)
