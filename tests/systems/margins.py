"""Correct results stay well below their limits.

Limits are derived, so that they hold on any processor. Many draws of the inputs show that they are
not too tight: each stays under half of its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

SEEDS = 200
MOST = 0.5


def assert_margin(shares_of: Callable[[int], Mapping[str, float]], seeds: int = SEEDS) -> None:
    """No error of any seed is more than half of its limit.

    Args:
        shares_of: for a seed, errors by name, each as a share of its limit.
    """
    worst: dict[str, float] = {}
    for seed in range(seeds):
        for name, share in shares_of(seed).items():
            # not max(): NaN is the worst
            if not share <= worst.get(name, -1.0):
                worst[name] = share
    summary = ", ".join(f"{name} {share:.3f}" for name, share in worst.items())
    print(f"largest share of its limit over {seeds} seeds: {summary}")
    assert all(share <= MOST for share in worst.values()), summary
