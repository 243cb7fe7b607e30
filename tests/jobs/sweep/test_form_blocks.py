"""Blocks of a sweep file: which runs they contain, and errors in the key `blocks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.block import Block
from jobs.sweep.expand import Expansion, expand
from tests.jobs.results_folder import TOY, errors, load, write

GRID = "grid: {size: [1, 2], mode: [fast, exact]}\n"
BLOCKS = "blocks: {interleave: [mode], baseline: {mode: exact}}\n"


def expansion(folder: Path, text: str, *overrides: str, **keywords: Any) -> Expansion:
    return expand(load(folder, text, *overrides, **keywords))


def compared(found: Expansion) -> list[list[dict[str, Any]]]:
    params = {run.id: run.params for run in found.runs}
    return [[params[run] for run in block.runs] for block in found.blocks]


def test_runs_that_differ_only_in_the_named_parameters_form_a_block(tmp_path: Path) -> None:
    found = expansion(tmp_path, TOY + GRID + BLOCKS)
    assert [[(p["size"], p["mode"]) for p in members] for members in compared(found)] == [
        [(1, "exact"), (1, "fast")],
        [(2, "exact"), (2, "fast")],
    ]
    assert all(block.baseline == block.runs[0] for block in found.blocks)
    assert {(block.rounds, block.aa, block.sustained) for block in found.blocks} == {(5, True, ())}


def test_a_sweep_without_the_key_has_no_blocks(tmp_path: Path) -> None:
    assert expansion(tmp_path, TOY + GRID).blocks == []
    assert expansion(tmp_path, TOY + GRID + BLOCKS, "blocks=null").blocks == []


def test_keys_can_be_overridden(tmp_path: Path) -> None:
    found = expansion(tmp_path, TOY + GRID + BLOCKS, "blocks.rounds=2", "blocks.aa=false")
    assert {(block.rounds, block.aa) for block in found.blocks} == {(2, False)}


def test_runs_of_a_benchmark_without_the_parameters_are_in_no_block(tmp_path: Path) -> None:
    text = TOY + "cases:\n  - grid: {size: [1], causal: [false, true]}\n"
    text += "  - {benchmark: tests.benchmarks.counter, fixed: {size: 1}}\n"
    text += "blocks: {interleave: [causal], baseline: {causal: false}}\n"
    found = expansion(tmp_path, text)
    assert len(found.runs) == 3
    assert [[p["causal"] for p in members] for members in compared(found)] == [[False, True]]


def test_a_condition_selects_the_runs_that_are_measured_over_seconds(tmp_path: Path) -> None:
    keys = "blocks: {interleave: [mode], baseline: {mode: exact}, "
    sustained = "sustained: {seconds: 3, where: size == 2 and mode == fast}}\n"
    found = expansion(tmp_path, TOY + GRID + keys + sustained)
    params = {run.id: run.params for run in found.runs}
    chosen = [params[run] for block in found.blocks for run in block.sustained]
    assert [(p["size"], p["mode"]) for p in chosen] == [(2, "fast")]
    everywhere = expansion(tmp_path, TOY + GRID + keys + "sustained: {seconds: 3}}\n")
    assert all(block.sustained == block.runs for block in everywhere.blocks)


def test_ids_of_blocks_do_not_depend_on_which_runs_are_present(tmp_path: Path) -> None:
    """A block to which an implementation is added keeps its id."""

    def ids(grid: str) -> list[str]:
        return [block.id for block in expansion(tmp_path, TOY + grid + BLOCKS).blocks]

    assert ids(GRID) == ids("grid: {size: [1, 2], mode: [exact]}\n")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("interleave: [mood], baseline: {mood: a}", ["blocks.interleave", "'mood'", "'mode'"]),
        ("interleave: [mode], baseline: {size: 1}", ["blocks.baseline", "(valid: mode)", "'size'"]),
        (
            "interleave: [mode], baseline: {mode: fsat}",
            ["sweep.yaml:4:47: blocks.baseline: no run has mode=fsat; did you mean 'fast'? (valid"],
        ),
        (
            "interleave: [mode, causal], baseline: {causal: false}",
            ["one run of each block", "2 runs", "mode=fast", "mode=exact", "size=1"],
        ),
        (
            "interleave: [mode], baseline: {mode: fast}, rounds: 1, margin: 0.02",
            ["blocks.margin requires at least 2 rounds"],
        ),
        (
            "interleave: [mode], baseline: {mode: fast}, sustained: {seconds: 3, where: sise == 2}",
            ["sise", "'size'"],
        ),
    ],
)
def test_wrong_keys(tmp_path: Path, keys: str, words: list[str]) -> None:
    path = write(tmp_path, f"{TOY}{GRID}blocks: {{{keys}}}\n")
    found = "\n".join(errors(path))
    assert all(word in found for word in words), found
    assert "sweep.yaml:" in found


def test_runs_of_a_block_need_the_same_resources(tmp_path: Path) -> None:
    text = TOY + "grid: {size: [1], mode: [fast, exact], ranks: [1, 2]}\n"
    text += "launch: {nproc_per_node: $ranks}\n"
    text += "blocks: {interleave: [mode, ranks], baseline: {mode: fast, ranks: 1}}\n"
    (problem,) = errors(write(tmp_path, text))
    assert "the same resources" in problem
    assert "mode=fast ranks=2" in problem and "mode=fast ranks=1" in problem


def test_repeats_and_blocks_exclude_each_other(tmp_path: Path) -> None:
    (problem,) = errors(write(tmp_path, f"{TOY}{GRID}{BLOCKS}repeats: 3\n"))
    assert "repeats must be 1 together with blocks" in problem and "blocks.rounds" in problem


def test_a_filter_must_keep_the_baseline(tmp_path: Path) -> None:
    path = write(tmp_path, TOY + GRID + BLOCKS)
    found = errors(path, filter="mode == fast")
    assert len(found) == 1 and "the filter must keep the baseline" in found[0]
    found = errors(path, filter="size == 1 or mode == fast")
    assert len(found) == 1 and "none (valid: mode=fast); the filter must keep" in found[0]
    assert "in the block tests.benchmarks.toy size=2" in found[0]


def test_keys_of_blocks_at_the_top_level(tmp_path: Path) -> None:
    (problem,) = errors(write(tmp_path, TOY + GRID + "baseline: {mode: fast}\n"))
    assert problem.endswith("unknown key 'baseline'; it is a key of blocks")


def test_a_block_is_one_run_and_its_repeats(tmp_path: Path) -> None:
    (block,) = expansion(tmp_path, TOY + "fixed: {size: 1, mode: exact}\n" + BLOCKS).blocks
    assert isinstance(block, Block) and len(block.all_tasks()) == 10
