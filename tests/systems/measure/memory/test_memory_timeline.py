"""Tests of memory timelines: handwritten snapshots, and random events against brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.measure.memory.memory_plot import timeline_data
from systems.measure.memory.memory_timeline import (
    MARK,
    Owner,
    bytes_by_kind,
    kinds,
    largest_allocations,
    largest_tensors,
    read_timeline,
)
from systems.measure.memory.source_lines import Frame, Source, source_of
from systems.plot_data import MAX_POINTS, read_figure, write_figure

ROOT = Path("/project")
MODEL = "/project/systems/model.py"


def frame(line: int, filename: str = MODEL, name: str = "forward") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def alloc(address: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


def free(address: int, size: int, *frames: dict[str, Any]) -> list[dict[str, Any]]:
    """Return both events of a free; their frames are those of the allocation."""
    entry = {"addr": address, "size": size, "frames": list(frames)}
    return [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]


def mark(address: int = 9) -> list[dict[str, Any]]:
    here = frame(1, "/project/systems/measure/memory/memory_timeline.py", MARK)
    return [alloc(address, 1, here), *free(address, 1, here)]


def snapshot(
    trace: list[dict[str, Any]], active: dict[int, int], frames: Any = ()
) -> dict[str, Any]:
    blocks = [
        {
            "address": address, "size": -(-size // 512) * 512, "requested_size": size,
            "state": "active_allocated", "frames": list(frames),
        }
        for address, size in active.items()
    ]  # fmt: skip
    free_block = {"address": 7, "size": 4096, "requested_size": 0, "state": "inactive"}
    elsewhere = {"device": 1, "blocks": [{**free_block, "state": "active_allocated"}]}
    segment = {"device": 0, "blocks": [*blocks, free_block]}
    return {"segments": [elsewhere, segment], "device_traces": [trace, []]}


WEIGHT, STATE, BATCH, ACTIVATION, SCRATCH, GRADIENT = 10, 20, 30, 40, 50, 60


def step() -> dict[str, Any]:
    """Return the snapshot of a step that has its peak in backward.

    Weights have 100 bytes, optimizer state 200 and the batch 3.

    time     0    1    2    3  |  4    5    6
    event         +40  +50  -50   +100 +70  -40
    bytes  303  343  393  343   443  513  473
    """
    return snapshot(
        [
            *free(1, 5000),  # a tensor older than the trace, freed before the step
            alloc(WEIGHT, 100, frame(37, name="__init__")),
            {"action": "segment_alloc", "addr": 0, "size": 1 << 21, "frames": []},
            *mark(),
            alloc(ACTIVATION, 40, frame(42), frame(150)),
            alloc(GRADIENT, 50, frame(80)),  # the address of what follows
            *free(GRADIENT, 50, frame(80)),
            *mark(),
            alloc(GRADIENT, 100),  # threads of autograd have no Python frames
            alloc(SCRATCH, 70),
            {"action": "oom", "size": 1 << 40, "device_free": 0},
            *free(ACTIVATION, 40, frame(42), frame(150)),
            *mark(SCRATCH + 5),
            *mark(),
        ],
        {WEIGHT: 100, STATE: 200, BATCH: 3, GRADIENT: 100, SCRATCH: 70},
        [frame(93, "/project/systems/training/training.py", "optimizer_step")],
    )


PHASES = ["forward", "backward", "optimizer"]
OWNERS = [
    Owner("weights", 0, {WEIGHT: "w"}),
    Owner("optimizer state", 0, {STATE: "0 exp_avg"}),
    # Gradients have their addresses at time 6. Earlier, other tensors may use the same addresses.
    Owner("gradients", 6, {GRADIENT: "blocks.*.down.weight"}),
]


def test_kinds_of_memory():
    timeline = read_timeline(step(), PHASES)
    found = kinds(timeline, OWNERS)
    assert bytes_by_kind(timeline, found, 2) == {
        "weights": 100, "optimizer state": 200, "gradients": 0, "activations": 40,
        "temporaries": 50, "before": 3,
    }  # fmt: skip
    assert bytes_by_kind(timeline, found, 5) == {
        "weights": 100, "optimizer state": 200, "gradients": 100, "activations": 40,
        "temporaries": 70, "before": 3,
    }  # fmt: skip


def test_largest_allocations_at_the_peak():
    rows = largest_allocations(read_timeline(step(), PHASES), OWNERS, root=ROOT)
    totals = [(r["source"], r["kind"], r["phase"], r["count"], r["alive_bytes"]) for r in rows]
    assert totals == [
        ("systems/training/training.py:93 optimizer_step", "optimizer state", "before", 1, 200),
        ("systems/model.py:37 __init__", "weights", "before", 1, 100),
        ("gradients of blocks.*.down.weight", "gradients", "backward", 1, 100),
        ("no Python frame", "temporaries", "backward", 1, 70),
        ("systems/model.py:42 forward", "activations", "forward", 1, 40),
        ("systems/training/training.py:93 optimizer_step", "before", "before", 1, 3),
    ]
    assert rows[4]["called_at"] == "systems/model.py:150"
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert len(largest_allocations(read_timeline(step(), PHASES), OWNERS, top=2, root=ROOT)) == 2


def test_allocations_of_one_line_are_one_row():
    trace = [*mark(), *[alloc(100 + i, 10 + i % 2, frame(42)) for i in range(32)], *mark()]
    timeline = read_timeline(snapshot(trace, {}), ["forward"])
    (row,) = largest_allocations(timeline, [], root=ROOT)
    assert (row["count"], row["alive_bytes"], row["share"]) == (32, 336, 1.0)
    (row,) = largest_tensors(timeline, [], root=ROOT)
    assert (row["count"], row["tensor_bytes"]) == (16, 11)


def test_largest_tensors_of_the_step():
    """Also those that are freed before the peak."""
    rows = largest_tensors(read_timeline(step(), PHASES), OWNERS, root=ROOT)
    assert [row["tensor_bytes"] for row in rows] == [200, 100, 100, 70, 50, 40, 3]
    assert (rows[4]["kind"], rows[4]["phase"]) == ("temporaries", "forward")


def test_marks_that_were_lost():
    with pytest.raises(ValueError, match=r"3 marks, .* \(a, b\) .* got 4"):
        read_timeline(step(), ["a", "b"])


def test_source_lines():
    torch_frame = Frame("/env/torch/nn/functional.py", 9, "silu")
    mine, caller = Frame(MODEL, 181, "forward"), Frame(MODEL, 211, "forward")
    launcher = Frame("/project/jobs/worker/run_process.py", 5, "main")
    assert source_of([torch_frame, mine, torch_frame, caller, launcher], ROOT) == Source(
        "systems/model.py:181 forward", "", "systems/model.py:211"
    )
    assert source_of([torch_frame, launcher], ROOT).source == "nn/functional.py:9 silu"
    assert source_of([], ROOT).source == "no Python frame"


def test_the_drawn_data_keeps_the_peak_and_the_kinds(tmp_path):
    many = [
        event
        for i in range(2 * MAX_POINTS)
        for event in (alloc(10**6 + i, 2**20 * (50 if i == 777 else 1)), *free(10**6 + i, 2**20))
    ]
    trace = [*mark(), *many[: len(many) // 2], *mark(), *many[len(many) // 2 :], *mark()]
    timeline = read_timeline(snapshot([*trace, *mark()], {WEIGHT: 2**30}), PHASES)
    path = tmp_path / "memory.plot.json"
    write_figure(timeline_data(timeline, OWNERS, "a step"), path)
    figure = read_figure(path)
    assert len(figure.x) == MAX_POINTS < timeline.events
    sums = [sum(values) for values in zip(*figure.layers.values(), strict=True)]
    assert max(sums) == pytest.approx(timeline.peak()[1] / 2**30, abs=1e-3)
    assert set(figure.layers["weights"]) == {1.0}
    assert [(p.name, p.end) for p in figure.phases] == [(p.name, p.end) for p in timeline.phases]
    assert [p.start for p in figure.phases] == [0, *(p.end for p in figure.phases[:-1])]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 1000)), max_size=60),
    st.tuples(*[st.integers(0, 60)] * 3),
)
def test_any_sequence_against_brute_force(moves, times):
    """Bytes in use at every time match a simulation of random allocations and frees.

    Each move allocates an address, or frees it if it is in use. The trace starts after `skip` moves
    and the phase after `begin` moves.
    """
    skip, begin, end = sorted(min(time, len(moves)) for time in times)
    in_use: dict[int, int] = {}
    trace: list[dict[str, Any]] = []
    totals: list[int] = []
    for i in range(len(moves) + 1):
        trace += mark(100 + i) * (begin, end).count(i)
        if begin <= i <= end:
            totals.append(sum(in_use.values()))
        if i == len(moves):
            break
        address, size = moves[i]
        if address in in_use:
            events = free(address, in_use.pop(address))
        else:
            in_use[address] = size
            events = [alloc(address, size)]
        trace += events if i >= skip else []
    timeline = read_timeline(snapshot(trace, in_use), ["phase"])
    assert timeline.active_bytes().tolist() == totals
    time, peak = timeline.peak()
    assert (time, peak) == (totals.index(max(totals)), max(totals))
    alive = sum(one.size for one in timeline.allocations if one.alive_at(time))
    assert alive == peak
    rows = largest_allocations(timeline, [], root=ROOT)
    assert sum(row["alive_bytes"] for row in rows) == peak
