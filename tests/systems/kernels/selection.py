"""Which cases of a parametrized test run always, and which only after a change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: object) -> pytest.ParameterSet:
    """Mark a case that runs only in make test-all, after a change (see tests/unchanged.py)."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.depends])


def matrix(always: Sequence[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values. Those that are not in `always` are slow."""
    combinations = list(itertools.product(*axes))
    assert all(x in combinations for x in always)
    return [x if x in always else slow(*x) for x in combinations]
