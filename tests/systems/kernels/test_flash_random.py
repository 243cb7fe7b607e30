"""Random calls of flash_attention with all features, compared with float64; see random_cases.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from systems.kernels.flash_attention import flash_pytorch
from systems.kernels.flash_attention.call import Call, PackedSizes
from systems.kernels.flash_attention.hopper import support
from tests.systems.kernels import random_cases
from tests.systems.kernels.flash_cases import on_hopper
from tests.systems.kernels.random_cases import (
    CPU,
    GPU,
    Case,
    assert_cases_right,
    batches,
    draw,
    run,
)

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
    wrong = [_is_wrong(case) for case in itertools.islice(named, 12)]
    assert sum(wrong) >= 4, wrong


def _is_wrong(case: Case) -> bool:
    try:
        run(case, CPU)
    except AssertionError:
        return True
    return False


def test_a_case_that_is_wrong_can_be_repeated(monkeypatch):
    monkeypatch.setattr(
        random_cases, "flash_attention", lambda q, k, v, **_: (_ for _ in ()).throw(ValueError("x"))
    )
    with pytest.raises(AssertionError, match=r"FLASH_SEED.*\ncase 7 \(cpu\): x\nCase\(seed=7"):
        assert_cases_right([7], CPU)
    monkeypatch.setenv("FLASH_SEED", "417")
    monkeypatch.setenv("FLASH_CASES", "60")
    assert [x.values for x in batches(1000, 50, 0)] == [(range(417, 467),), (range(467, 477),)]


def test_what_an_implementation_refuses_is_counted(monkeypatch):
    monkeypatch.setattr(random_cases, "run", lambda *_: "no such feature")
    with pytest.raises(AssertionError, match="case 0: no such feature"):
        assert_cases_right(range(50), CPU)


@pytest.mark.parametrize("place", [GPU, CPU, random_cases.INTERPRETER])
def test_cases_are_supported_and_small_enough(place, monkeypatch):
    monkeypatch.setattr(support, "is_hopper", lambda _: True)
    cases = [draw(seed, place) for seed in range(1000)]
    assert draw(417, place) == cases[417]
    for case in cases:
        per_head = sum(x * y for x, y in case.lengths)
        for x in case.leading or ():
            per_head *= x
        assert per_head * (case.heads or 1) * case.group <= place.scores
        assert max(max(x) for x in case.lengths) <= place.longest
        if case.implementation == "flash_hopper":
            packing = PackedSizes(1, 1, 1) if case.packed else None
            call = Call(softcap=case.softcap, packing=packing)
            form = torch.device("cuda"), case.dtype, case.head_dim, case.value_dim
            assert support.reason_for(*form, call) is None
