"""Blocks: the order of their runs, and how jobs contain them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jobs.block import Block

blocks = st.builds(
    Block,
    id=st.just("b"),
    baseline=st.just("base"),
    runs=st.integers(0, 4).map(lambda n: ("base", *map(str, range(n)))),
    rounds=st.integers(1, 6),
    aa=st.booleans(),
)


@given(blocks)
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
