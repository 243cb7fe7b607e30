"""Blocks: the order of their runs, and how jobs contain them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobs.block import Block, block_id, in_blocks
from jobs.run import Run, Shape

blocks = st.builds(
    Block,
    id=st.just("b"),
    baseline=st.just("base"),
    runs=st.integers(0, 4).map(lambda n: ("base", *map(str, range(n)))),
    rounds=st.integers(1, 6),
    aa=st.booleans(),
)


def test_rounds_alternate_their_direction_and_enclose_the_others_in_the_baseline() -> None:
    block = Block("b", "base", ("base", "x", "y"), rounds=2, aa=True)
    assert block.tasks(0) == [("base", 0), ("x", 0), ("y", 0), ("base", 1)]
    assert block.tasks(1) == [("base", 3), ("y", 1), ("x", 1), ("base", 2)]
    once = Block("b", "base", ("base", "x"), rounds=2, aa=False)
    assert once.tasks(0) == [("base", 0), ("x", 0)]
    assert once.tasks(1) == [("x", 1), ("base", 1)]


@given(blocks)
def test_every_pair_is_in_one_round(block: Block) -> None:
    tasks = block.all_tasks()
    assert len(set(tasks)) == len(tasks) == block.rounds * (len(block.runs) + block.aa)
    for round in range(block.rounds):
        assert {block.round_of(task) for task in block.tasks(round)} == {round}


@given(blocks)
def test_mean_position_is_equal_after_an_even_number_of_rounds(block: Block) -> None:
    """A steady drift then shifts every run, and the mean of the baseline, by the same amount."""
    positions: dict[str, list[int]] = {}
    for round in range(2 * block.rounds):
        for position, (run, _) in enumerate(block.tasks(round)):
            positions.setdefault(run, []).append(position)
    assert len({sum(places) / len(places) for places in positions.values()}) == 1


def test_pairs_of_a_block_stay_together_in_their_order() -> None:
    block = Block("b", "base", ("base", "x"), rounds=2, aa=False)
    tasks = [("alone", 0), *block.tasks(0), ("alone", 1), *block.tasks(1)]
    assert in_blocks(tasks, [block]) == [
        (None, [("alone", 0)]),
        (block, block.all_tasks()),
        (None, [("alone", 1)]),
    ]


def test_id_depends_on_the_parameters_that_are_not_compared() -> None:
    def run(**params: object) -> Run:
        return Run("0", "toy", 1, params, Shape(), 60.0)

    one = block_id(run(size=1, mode="fast"), ("mode",))
    assert block_id(run(mode="exact", size=1), ("mode",)) == one
    assert block_id(run(size=2, mode="fast"), ("mode",)) != one
    assert block_id(run(size=1), ("mode",)) == one  # a benchmark may lack the parameter
