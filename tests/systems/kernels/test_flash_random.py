"""Random calls of flash_attention with all features, compared with float64; see random_cases.py."""

from __future__ import annotations

import itertools

import pytest

from systems.kernels.flash_attention import flash_pytorch
from tests.systems.kernels import random_cases
from tests.systems.kernels.flash_cases import on_hopper
from tests.systems.kernels.random_cases import CPU, GPU, assert_cases_right, batches, draw

pytestmark = [
    pytest.mark.usefixtures("one_thread", "outputs_hold_nan"),
    pytest.mark.filterwarnings("ignore:.*determinis"),
]


@pytest.mark.parametrize("seeds", batches(1000, 25, 2, pytest.mark.exhaustive))
def test_on_a_cpu(seeds, monkeypatch):
    monkeypatch.setattr(flash_pytorch, "QUERY_TILE", 24)
    monkeypatch.setattr(flash_pytorch, "KEY_TILE", 40)
    assert_cases_right(seeds, CPU)


@on_hopper
@pytest.mark.gpu
@pytest.mark.timeout(1200)  # compiles many kernels
@pytest.mark.parametrize("seeds", batches(1000, 10, 20, pytest.mark.exhaustive))
def test_on_a_gpu(seeds):
    assert_cases_right(seeds, GPU)


FLIPPED = {"upper_left": "lower_right", "lower_right": "upper_left"}
# Argument, change, and for which cases it should matter
SLIPS = {
    "another scale": ("scale", lambda x: 1.5 * (x or 0.2), lambda case: True),
    "the heads of k in another order": ("k", lambda x: x.flip(-2), lambda case: case.packed),
    "another causal mask": ("is_causal", lambda x: not x, lambda case: True),
    "another alignment": ("alignment", FLIPPED.get, lambda case: case.is_causal),
    "a wider window": (
        "window", lambda x: [y and y + 1 for y in x], lambda case: case.window[0] in range(1, 30)
    ),
    "no softcap": ("softcap", lambda x: None, lambda case: (case.softcap or 99) < 9),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_found(slip, monkeypatch):
    """If an argument is misread, many of the cases with this argument are wrong."""
    name, change, matters = SLIPS[slip]
    for function in ("flash_attention", "flash_attention_packed"):

        def slipped(q, k, v, right=getattr(random_cases, function), **options):
            call = {"q": q, "k": k, "v": v, **options}
            return right(**call | {name: change(call[name])})

        monkeypatch.setattr(random_cases, function, slipped)
    cases = (draw(seed, CPU) for seed in itertools.count())
    named = (case for case in cases if case.implementation in ("auto", "naive") and matters(case))
    with pytest.raises(AssertionError, match=r"\d of 12 are wrong") as found:
        assert_cases_right([case.seed for case in itertools.islice(named, 12)], CPU)
    assert int(str(found.value).split()[0]) >= 4
