"""Stored noise floors."""

from __future__ import annotations

import pytest

from jobs.run import Run, Shape
from jobs.verdicts.noise_floors import NoiseFloor, noise_floors
from tests.jobs.results_folder import CPU, H200


def floor_of(
    run: Run, device: str, times: tuple[float, float], same_gpus: bool
) -> NoiseFloor | None:
    floors = noise_floors(run, device, same_gpus)
    return None if floors is None else floors.at(*times)


def attention(heads: int | None = 1, batch: int = 1) -> Run:
    return Run("0" * 16, "attention", 4, {"num_heads": heads, "batch_size": batch}, Shape(), 60.0)


@pytest.mark.parametrize(
    ("run", "times", "same_gpus", "usual", "largest"),
    [
        (attention(), (0.03, 0.03), False, 0.015, 0.024),
        (attention(None), (0.03, 0.03), False, 0.015, 0.024),
        (attention(16), (0.03, 0.03), True, 0.011, 0.011),
        (attention(), (0.05, 0.19), False, 0.012, 0.025),
        (attention(), (0.2, 5.0), True, 0.009, 0.01),
        (attention(16), (0.2, 5.0), False, 0.032, 0.066),
        (attention(1, 2), (0.2, 5.0), False, 0.032, 0.066),
        # Times in two ranges have the larger floor.
        (attention(), (0.19, 0.21), False, 0.015, 0.062),
    ],
)
def test_floors_of_attention(
    run: Run, times: tuple[float, float], same_gpus: bool, usual: float, largest: float
) -> None:
    for order in (times, times[::-1]):
        floor = floor_of(run, H200, order, same_gpus)
        assert floor is not None
        assert (floor.usual, floor.largest) == pytest.approx((usual, largest))


def test_the_maximum_is_used_if_the_quantile_is_unknown() -> None:
    floor = floor_of(Run("0", "train_step", 1, {}, Shape(), 60.0), H200, (9.0, 9.0), False)
    assert floor is not None and floor.usual == floor.largest == 0.24


def test_other_devices_and_benchmarks_have_no_floor() -> None:
    assert floor_of(attention(), CPU, (1.0, 1.0), True) is None
    assert floor_of(attention(), "NVIDIA H100 80GB HBM3", (1.0, 1.0), True) is None
    assert floor_of(Run("0", "toy", 1, {}, Shape(), 60.0), H200, (1.0, 1.0), True) is None
