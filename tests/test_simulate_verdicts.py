"""The simulation that docs/verdicts.md shows."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.simulate_verdicts import NOISES, Noise, judged

QUIET = NOISES[0]  # 0.1%


def test_a_slowdown_of_5_percent_is_found() -> None:
    cells, _ = judged(QUIET, "1x5", 100, 0.05, np.random.default_rng(0))
    assert len(cells) == 100
    assert {cell["verdict"] for cell in cells} == {"slower"}


def test_unchanged_code_is_the_same() -> None:
    cells, codes = judged(QUIET, "1x5", 60, 0, np.random.default_rng(0))
    assert {cell["verdict"] for cell in cells} == {"same"}
    assert codes == [0, 0, 0]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_every_noise_gives_20_cells_with_all_rounds(noise: Noise) -> None:
    cells, codes = judged(noise, "2x5", 20, 0, np.random.default_rng(0))
    assert [(cell["rounds"], cell["allocations"]) for cell in cells] == [("10", "2")] * 20
    assert len(codes) == 1
