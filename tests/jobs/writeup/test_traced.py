"""Numbers that know their records."""

from __future__ import annotations

import math

import pytest

from jobs.writeup.language import NotMeasured
from jobs.writeup.traced import Recorded, Traced, marked, shown, without_marks


@pytest.mark.parametrize(
    ("compute", "value", "records"),
    [
        (lambda a, b: a + b, 8.0, {1, 2}),
        (lambda a, b: 10 - a, 4.0, {1}),
        (lambda a, b: a / b, 3.0, {1, 2}),
        (lambda a, b: 12 / a, 2.0, {1}),
        (lambda a, b: 1000 * b, 2000.0, {2}),
        (lambda a, b: a**b, 36.0, {1, 2}),
        (lambda a, b: -a, -6.0, {1}),
        (lambda a, b: abs(-b), 2.0, {2}),
        (lambda a, b: max(a, b), 6.0, {1}),
        (lambda a, b: round(a / 4, 1), 1.5, {1}),
    ],
)
def test_arithmetic_keeps_the_records(compute, value, records) -> None:
    result = compute(Traced(6.0, {1}), Traced(2.0, {2}))
    assert result == value and isinstance(result, Traced) and result.records == records


def test_a_missing_number_spreads() -> None:
    number = Traced(6.0, {1})
    for result in (number + NotMeasured(), NotMeasured() * number, number / NotMeasured()):
        assert isinstance(result, NotMeasured)
    with pytest.raises(TypeError):
        number + "text"


def test_marks_can_be_removed() -> None:
    text = f"takes {marked('4.2', {3, 1})} ms"
    assert without_marks(text) == "takes 4.2 ms"
    assert "1,3" in text
    assert shown(Traced(math.pi, {5}), "3.14") == marked("3.14", {5})
    assert shown(2.0, "2") == "2"


def test_text_of_records_is_escaped() -> None:
    hostile = Recorded("<script>`x`*y*\n[a](javascript:b)\ue000")
    text = shown(hostile, str(hostile))
    assert "\n" not in text and "\ue000" not in text
    for character in "<`*[(":
        assert f"\\{character}" in text
