"""Read active memory over time from a snapshot of torch's CUDA allocator, and draw it.

    with recording():
        ...                              build what is alive at the start
        mark_phase(); forward()          a mark where each phase begins
        mark_phase(); backward()
        mark_phase()                     and one at the end
        snapshot = torch.cuda.memory._snapshot()
    timeline = read_timeline(snapshot, ["forward", "backward"])

A mark is an allocation of one byte by `mark_phase`, recognised by its stack. So the allocator
records it in order with all others; a time would have to be compared across two clocks.

Bytes are those that tensors asked for. The allocator rounds each up, to 512 bytes or to the size of
the block it reuses, up to 1 MiB more; `torch.cuda.max_memory_allocated` counts that too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systems.measure.source_lines import ROOT, Frame, Source, source_of

MAX_ENTRIES = 1_000_000  # a step of the largest model makes some 40,000
MARK = "mark_phase"
NOT_OWNED = ("activations", "temporaries", "before")
KINDS = ("weights", "optimizer state", "gradients", *NOT_OWNED)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record all events of the allocator in this block, with the Python stack of allocations."""
    import torch

    # With context "alloc" the event of a free has the stack of its allocation.
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def mark_phase() -> None:
    """Put a mark between the allocator's events."""
    import torch

    torch.empty(1, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class Allocation:
    """One tensor's memory. Time is the count of events since the first mark.

    Attributes:
        start, end: alive after `start` events, and no more after `end`; 0 if it was there before,
            one more than the last event if it stays.
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
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Owner:
    """Names of the memory that live tensors hold at a time.

    Attributes:
        kind: weights, gradients or optimizer state.
        at: the time at which these addresses were in use.
        names: by address.
    """

    kind: str
    at: int
    names: Mapping[int, str]


@dataclass(frozen=True)
class Timeline:
    """All allocations that were alive between the first mark and the last."""

    allocations: list[Allocation]
    phases: list[Phase]

    @property
    def events(self) -> int:
        return self.phases[-1].end

    def active_bytes(self, chosen: Sequence[bool] | None = None) -> np.ndarray:
        """Return bytes in use after 0, 1, ... events, of the chosen allocations if given."""
        change = np.zeros(self.events + 2, dtype=np.int64)
        for i, allocation in enumerate(self.allocations):
            if chosen is None or chosen[i]:
                change[allocation.start] += allocation.size
                change[allocation.end] -= allocation.size
        return np.cumsum(change)[: self.events + 1]

    def peak(self) -> tuple[int, int]:
        """Return the first time at which most bytes are in use, and how many."""
        active = self.active_bytes()
        time = int(active.argmax())
        return time, int(active[time])

    def phase_of(self, start: int) -> str:
        """Return the phase in which an allocation was made, or `before` if it was there already.

        An allocation lives from after its event on, so one in a phase starts later than the phase.
        """
        if start == 0:
            return "before"
        return next(phase.name for phase in self.phases if start <= phase.end)


def read_timeline(snapshot: Mapping[str, Any], phases: Sequence[str], device: int = 0) -> Timeline:
    """Return the events between marks: one at the start of each phase and one at the end.

    Raises:
        ValueError: the number of marks is wrong. The allocator keeps the last MAX_ENTRIES events.
    """
    # start, size and frames by address; and (address, size, start, end, frames) of what was freed
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
            f"{len(marks)} marks in {len(trace)} events; expected {len(phases) + 1}: one before "
            f"each of {', '.join(phases)}, and one at the end"
        )
    for block in _active_blocks(snapshot, device):  # without an event: it was there all the time
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
    """Return the kind of each allocation.

    Weights, gradients and optimizer state by the tensors that own them; activations are allocated
    in forward and alive at its end; temporaries are all other allocations; before is what was
    there before and has no owner: the batch, RoPE's tables, workspaces of cuBLAS.
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
    """Return the owner of the memory, if any."""
    for owner in owners:
        if allocation.address in owner.names and allocation.alive_at(owner.at):
            return owner
    return None


def bytes_by_kind(timeline: Timeline, kinds: Sequence[str], time: int) -> dict[str, int]:
    """Return bytes in use at a time, by kind."""
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
    """Return what is in use at the peak, summed by source line, kind and phase, largest first.

    Autograd computes gradients in threads without Python frames; a gradient is named after its
    parameter.
    """
    time, peak = timeline.peak()
    groups: dict[tuple[Source, str, str], list[int]] = {}
    for one, kind in zip(timeline.allocations, kinds(timeline, owners), strict=True):
        if one.alive_at(time):
            source = source_of(one.frames, root)
            owner = owner_of(one, owners)
            if owner is not None and not one.frames:
                source = Source(f"{kind} of {owner.names[one.address]}", "", "")
            groups.setdefault((source, kind, timeline.phase_of(one.start)), []).append(one.size)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "source": source.source,
            "code": source.code,
            "called_at": source.called_at,
            "kind": kind,
            "phase": phase,
            "count": len(sizes),
            "alive_bytes": sum(sizes),
            "share": sum(sizes) / peak,
        }
        for (source, kind, phase), sizes in ordered[:top]
    ]


# Tol's bright scheme, which colour-blind readers can tell apart.
_COLOURS = {
    "weights": "#4477aa", "optimizer state": "#66ccee", "gradients": "#228833",
    "activations": "#ee6677", "temporaries": "#ccbb44", "before": "#bbbbbb",
}  # fmt: skip
_NARROWEST = 0.1  # of the width: a phase without allocations, the optimizer say, must be visible


def draw_timeline(timeline: Timeline, owners: Sequence[Owner], title: str, path: Path) -> None:
    """Draw active memory by kind, in the order of the allocator's events."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = kinds(timeline, owners)
    # A narrow phase is widened; memory is constant in the added width.
    x, times, edges = _axis(timeline)
    layers = {
        kind: timeline.active_bytes([name == kind for name in named])[times] / 2**30
        for kind in KINDS
    }
    layers = {kind: layer for kind, layer in layers.items() if layer.any()}
    time, peak = timeline.peak()
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    panel.stackplot(
        x, *layers.values(), labels=list(layers), colors=[_COLOURS[k] for k in layers], step="post",
        linewidth=0,
    )  # fmt: skip
    panel.step(
        x, timeline.active_bytes()[times] / 2**30, where="post", color="black", linewidth=0.8,
        label="total",
    )  # fmt: skip
    top = peak / 2**30
    panel.set_ylim(0, top * 1.18 or 1)
    panel.set_xlim(x[0], x[-1])
    for i, phase in enumerate(timeline.phases):
        panel.axvspan(edges[i], edges[i + 1], color="#eeeeee" if i % 2 else "white", zorder=0)
        panel.text(
            (edges[i] + edges[i + 1]) / 2, 0.985, phase.name, ha="center", va="top",
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip
        panel.axvline(edges[i], color="black", linewidth=0.6, linestyle=":")
    at = float(x[int(np.flatnonzero(times == time)[0])])
    panel.plot([at], [top], marker="v", color="black", markersize=5)
    right = at > (x[0] + x[-1]) / 2
    panel.annotate(
        f"peak {top:.4g} GiB", (at, top), xytext=(-7 if right else 7, 3),
        textcoords="offset points", ha="right" if right else "left", va="bottom",
    )  # fmt: skip
    panel.set_xticks([])
    panel.set_xlabel(f"{timeline.events:,} allocations and frees, in their order")
    panel.set_ylabel("memory in use (GiB)")
    panel.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    figure.savefig(path, dpi=110)


def _axis(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return x positions, the time that each shows, and where phases begin and the last ends."""
    narrowest = max(1.0, _NARROWEST * timeline.events)
    x: list[float] = []
    times: list[int] = []
    edges = [0.0]
    for phase in timeline.phases:
        length = phase.end - phase.start
        x += [edges[-1] + i for i in range(length + 1)]
        times += range(phase.start, phase.end + 1)
        edges.append(edges[-1] + max(length, narrowest))
    return np.array([*x, edges[-1]]), np.array([*times, times[-1]]), edges


def _active_blocks(snapshot: Mapping[str, Any], device: int) -> Iterator[Mapping[str, Any]]:
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    yield block


def _frames(frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(f["filename"], f["line"], f["name"]) for f in frames)
