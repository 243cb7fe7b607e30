"""Check that the error limits of tests are not too tight.

Limits are derived, so that they hold on any CPU or GPU. For many random inputs, the error of
correct code must stay below half of its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

SEEDS = 200
MOST = 0.5


def assert_margin(shares_of: Callable[[int], Mapping[str, float]], seeds: int = SEEDS) -> None:
    """Check that no error is more than half of its limit, for all seeds.

    Args:
        shares_of: function that returns, for a seed, errors by name, each divided by its limit.
    """
    worst: dict[str, float] = {}
    for seed in range(seeds):
        for name, share in shares_of(seed).items():
            # not max(), because NaN must count as the largest
            if not share <= worst.get(name, -1.0):
                worst[name] = share
    summary = ", ".join(f"{name} {share:.3f}" for name, share in worst.items())
    print(f"largest share of its limit over {seeds} seeds: {summary}")
    assert all(share <= MOST for share in worst.values()), summary
