"""Comparisons of parameters: their meaning, their errors, and that no code is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.sweep.benchmarks import Benchmarks, load_benchmark
from jobs.sweep.conditions import Condition, ConditionError, Names

FIELDS = ["seq_len", "dtype", "causal", "window"]
NAMES = Names(FIELDS, ["status", "repeat"])
RUN: dict[str, Any] = {"seq_len": 128, "dtype": "bf16", "causal": True, "window": None}
RUN |= {"run.status": "ok", "run.repeat": 2}


def names_of(*benchmarks: str) -> Names:
    by_name = {name: load_benchmark(name) for name in benchmarks}
    found = Benchmarks(by_name[benchmarks[0]], by_name)
    return Names(found.fields, ["benchmark"], found.never_equals)


TOY = names_of("tests.benchmarks.toy")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("seq_len == 128.0", True),
        ("dtype == 'bf16' and not causal == true", False),
        ("causal == false or seq_len in [64, 128]", True),
        ("seq_len not in (64, 128)", False),
        ("dtype in [fp16, bf16]", True),
        ("window == None and seq_len > -1", True),
        ("  seq_len == 128  ", True),
        ("dtype == 'window'", False),
        ("status == ok and run.status == ok", True),
        ("run.status in [error, oom] or run.repeat < 3", True),
    ],
)
def test_meaning(text: str, holds: bool) -> None:
    assert Condition(text, NAMES)(RUN) is holds


def test_a_parameter_takes_precedence_over_a_value_of_records() -> None:
    names = Names(["status", "size"], ["status"])
    assert Condition("status == 5", names)({"status": 5, "run.status": "ok"})
    assert Condition("run.status == ok", names)({"status": 5, "run.status": "ok"})
    assert not Condition("status == ok", names)({"size": 5, "run.status": "ok"})


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        (NAMES, "run.stat == ok", "did you mean 'run.status'"),
        (NAMES, "bf16 == dtype", "'bf16' is not a parameter"),
        (NAMES, "seq_len > 64 and 64 < seq_len <= 128", "write for example"),
        (NAMES, "seq_len = 128", "write =="),
        (NAMES, "dtype == abc-dirty", "text in quotes"),
        (NAMES, "seq_len in 128", "is required after 'in'"),
        (NAMES, "seq_len is 128", "must be one of ==, !=, <, <=, >, >=, in, not in"),
        (NAMES, "dtype == f'{seq_len}'", "not a plain value"),
        (NAMES, "seq_len == 1if causal else 2", "not a comparison of a parameter"),
        (NAMES, "not " * 60 + "seq_len == 1", "nested"),
        (NAMES, "(" * 900 + "seq_len == 1" + ")" * 900, "is not a comparison"),
        # values that the parameter never has
        (TOY, "size == 128 and mode in [exact, fsat]", "did you mean 'fast'"),
        (TOY, "size == 128.5", "got 128.5, expected a valid integer"),
        (TOY, "size == true", "got True, expected a valid integer"),
        (TOY, "size > large", "got 'large', expected a valid integer"),
        (TOY, "mode > fast", "words such as 'fast' have no order"),
        (TOY, "label == mode", "compares two parameters"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_refusal_says_what_is_wrong(names: Names, text: str, words: str) -> None:
    with pytest.raises(ConditionError, match=words):
        Condition(text, names)


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    call = f"__import__('os').system('touch {mark}')"
    for text in (f"{call} == 1", f"seq_len == {call}", f"seq_len in [{call}]", f"not {call}"):
        with pytest.raises(ConditionError):
            Condition(text, NAMES)
    assert not mark.exists()


def test_values_without_order_are_an_error_not_false() -> None:
    with pytest.raises(
        ConditionError, match=r"compares null with 5.*write window != null and window > 5"
    ):
        Condition("window > 5", NAMES)(RUN)
    assert not Condition("window != null and window > 5", NAMES)(RUN)
    for text in ("dtype < 5", "causal > 0"):
        with pytest.raises(ConditionError, match="no order"):
            Condition(text, NAMES)(RUN)


@pytest.mark.parametrize(
    "text", ["size == 128.0", "scale == 2", "window == null", "size < -3", "label == x"]
)
def test_a_value_that_it_can_have_is_none(text: str) -> None:
    """A value that a parameter can have, or a bound outside its range, is no error."""
    assert Condition(text, TOY).names == {text.split()[0]}


def test_none_is_a_word_where_the_parameter_has_this_word() -> None:
    for text in ("checkpointing == none", "checkpointing in [none, nested]"):
        condition = Condition(text, names_of("train_step"))
        assert condition({"checkpointing": "none"}) and not condition({"checkpointing": "every_k"})


# ---- property ------------------------------------------------------------------------------------

NUMBERS = st.integers(-3, 3)
COMPARISONS = st.builds(
    "{} {} {}".format,
    st.sampled_from("abc"),
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    NUMBERS,
) | st.builds(
    "{} {} {}".format, st.sampled_from("abc"), st.sampled_from(["in", "not in"]), st.lists(NUMBERS)
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or"]), inner)
    return pairs | inner.map("not ({})".format)


@given(
    st.recursive(COMPARISONS, combined, max_leaves=8),
    st.fixed_dictionaries({name: st.integers(-4, 4) for name in "abc"}),
)
def test_any_combination_means_what_it_means_in_python(text: str, params: dict[str, int]) -> None:
    assert Condition(text, Names("abc"))(params) == eval(text, {}, params)


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text("seq_len<>=!()[]'\" andortify0123456789.,:*+-", max_size=60))
def test_any_text_is_a_condition_or_an_error_about_it(text: str) -> None:
    try:
        holds = Condition(text, NAMES)(RUN)
    except ConditionError as error:
        assert str(error)
    else:
        assert holds in (True, False)
