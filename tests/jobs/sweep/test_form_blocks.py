"""Blocks of a sweep file: which runs they contain. bad_input/sweep_files.py has the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.sweep.expand import Expansion, expand
from tests.jobs.results_folder import TOY, load

GRID = "grid: {size: [1, 2], mode: [fast, exact]}\n"
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
    everywhere = expand(load(tmp_path, TOY + GRID + keys + "sustained: {seconds: 3}}\n"))
    assert all(block.sustained == block.runs for block in everywhere.blocks)


def test_ids_of_blocks_do_not_depend_on_which_runs_are_present(tmp_path: Path) -> None:
    """A block to which an implementation is added keeps its id."""

    def ids(grid: str) -> list[str]:
        return [block.id for block in expand(load(tmp_path, TOY + grid + BLOCKS)).blocks]

    assert ids(GRID) == ids("grid: {size: [1, 2], mode: [exact]}\n")
