"""Blocks: which runs of a sweep they contain, and in which order.

bad_input/sweep_files.py has the errors.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.block import Block
from jobs.errors import InputError
from jobs.sweep.expand import Expansion, expand
from tests.jobs.results_folder import GRID, TOY, load

BLOCKS = "blocks: {interleave: [mode], baseline: {mode: exact}}\n"


def compared(found: Expansion) -> list[list[dict[str, Any]]]:
    params = {run.id: run.params for run in found.runs}
    return [[params[run] for run in block.runs] for block in found.blocks]


def test_runs_that_differ_only_in_the_named_parameters_form_a_block(tmp_path: Path) -> None:
    found = expand(load(tmp_path, TOY + GRID + BLOCKS))
    assert [[(p["size"], p["mode"]) for p in members] for members in compared(found)] == [
        [(1, "exact"), (1, "fast")],
        [(2, "exact"), (2, "fast")],
    ]
    assert all(block.baseline == block.runs[0] for block in found.blocks)
    assert {(block.rounds, block.aa, block.sustained) for block in found.blocks} == {(5, True, ())}
    assert expand(load(tmp_path, TOY + GRID + BLOCKS, "blocks=null")).blocks == []
    (alone,) = expand(load(tmp_path, TOY + "fixed: {size: 1, mode: exact}\n" + BLOCKS)).blocks
    assert len(alone.all_tasks()) == 10


def test_runs_of_a_benchmark_without_the_parameters_are_in_no_block(tmp_path: Path) -> None:
    text = TOY + "cases:\n  - grid: {size: [1], causal: [false, true]}\n"
    text += "  - {benchmark: tests.benchmarks.counter, fixed: {size: 1}}\n"
    text += "blocks: {interleave: [causal], baseline: {causal: false}}\n"
    found = expand(load(tmp_path, text))
    assert len(found.runs) == 3
    assert [[p["causal"] for p in members] for members in compared(found)] == [[False, True]]


def test_a_condition_selects_the_runs_that_are_measured_over_seconds(tmp_path: Path) -> None:
    keys = "blocks: {interleave: [mode], baseline: {mode: exact}, "
    sustained = "sustained: {seconds: 3, where: size == 2 and mode == fast}}\n"
    found = expand(load(tmp_path, TOY + GRID + keys + sustained))
    params = {run.id: run.params for run in found.runs}
    chosen = [params[run] for block in found.blocks for run in block.sustained]
    assert [(p["size"], p["mode"]) for p in chosen] == [(2, "fast")]
    # With --against, each run is in a block.
    keys_alone = "blocks: {sustained: {seconds: 3, where: size > 1}}"
    alone = expand(load(tmp_path, TOY + GRID + keys_alone), with_blocks=False)
    assert {params[run]["size"] for run in alone.sustained} == {2}
    everywhere = expand(load(tmp_path, TOY + GRID + keys + "sustained: {seconds: 3}}\n"))
    assert all(block.sustained == block.runs for block in everywhere.blocks)


def test_ids_of_blocks_do_not_depend_on_which_runs_are_present(tmp_path: Path) -> None:
    """A block to which an implementation is added keeps its id."""

    def ids(grid: str) -> list[str]:
        return [block.id for block in expand(load(tmp_path, TOY + grid + BLOCKS)).blocks]

    assert ids(GRID) == ids("grid: {size: [1, 2], mode: [exact]}\n")


ANY_BLOCK = st.builds(
    Block,
    id=st.just("b"),
    baseline=st.just("base"),
    runs=st.integers(0, 4).map(lambda n: ("base", *map(str, range(n)))),
    rounds=st.integers(1, 6),
    aa=st.booleans(),
)


@given(ANY_BLOCK)
def test_places_are_balanced(block: Block) -> None:
    """A steady drift over a pair of rounds shifts every process by the same amount.

    Each process is first equally often, and the two of the baseline are about half a round apart.
    """
    size = len(block.tasks(0))
    firsts: Counter[tuple[str, bool]] = Counter()
    for even in range(0, 2 * size, 2):
        places: Counter[tuple[str, bool]] = Counter()
        for round in (even, even + 1):
            tasks = block.tasks(round)
            processes = [(run, block.is_twice(run) and repeat % 2 == 1) for run, repeat in tasks]
            firsts[processes[0]] += 1
            places.update({process: place for place, process in enumerate(processes)})
            own = [place for place, (run, _) in enumerate(tasks) if run == "base"]
            assert not block.aa or 2 * (own[1] - own[0]) in range(size - 1, size + 2)
        assert set(places.values()) <= {size - 1}
    assert set(firsts.values()) == {2} and len(firsts) == size


@pytest.mark.parametrize("key", ["exclude", "filter"])
def test_a_block_without_a_baseline_says_in_what_the_nearest_one_differs(
    tmp_path: Path, key: str
) -> None:
    """If the sweep leaves out the baseline of this block, the key that does so is named."""

    def error(text: str, left_out: str) -> str:
        conditions = {"exclude": f"exclude: [{left_out}]\n"}
        where = f"not ({left_out})" if key == "filter" else None
        loaded = load(tmp_path, TOY + text + BLOCKS + conditions.get(key, ""), filter=where)
        with pytest.raises(InputError) as caught:
            expand(loaded)
        return str(caught.value)

    pairs = "zip: {size: [1, 2], mode: [exact, fast]}\n"
    hint = "its run also differs in size: add that to interleave"
    assert hint in error(pairs, "size == 7")
    left_out = error(GRID, "size == 2 and mode == exact")
    assert hint not in left_out and key in left_out
