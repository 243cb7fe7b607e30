"""The simulation that docs/verdicts.md shows."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.simulate_verdicts import NOISES, Noise, judged

QUIET = NOISES[0]  # 0.1%


@pytest.mark.parametrize(("slowdown", "verdict"), [(0.05, "slower"), (0, "same")])
def test_only_a_slowdown_is_found(slowdown: float, verdict: str) -> None:
    cells, codes = judged(QUIET, "1x5", 100, slowdown, np.random.default_rng(0))
    assert [cell["verdict"] for cell in cells] == [verdict] * 100
    assert any(codes) == (verdict == "slower")


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_every_noise_gives_20_cells_with_all_rounds(noise: Noise) -> None:
    cells, codes = judged(noise, "2x5", 20, 0, np.random.default_rng(0))
    assert [(cell["rounds"], cell["allocations"]) for cell in cells] == [("10", "2")] * 20
    assert len(codes) == 1
