"""The strict YAML parser: ambiguous syntax is an error with a position, and it never raises."""

from __future__ import annotations

import json
import re
import time

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jobs.sweep.strict_yaml import MAX_NODES, parse


def problems(text: str) -> list[tuple[int, int, str]]:
    return [(p.position.line, p.position.column, p.message) for p in parse(text, "f").problems]


TRAPS = [
    ("a: 1e-4", 4, "1.0e-4"),
    ("a: 1:30:00", 4, "in decimal"),
    ("a: 010", 4, "leading 0"),
    ("a: 0x1F", 4, "decimal"),
    ("a: on", 4, "boolean"),
    ("a: Yes", 4, "boolean"),
    ("a: n", 4, "boolean"),
    ("a: 2024-01-31", 4, "date"),
    ("a: .inf", 4, "infinity"),
    ("a: .nan", 4, "NaN"),
    ("a: 1.0e999", 4, "too large"),
    ("a: 1_0.5", 4, "without _"),
    (f"a: {'9' * 30}", 4, "64 bits"),
    (f"a: {'9' * 5000}", 4, "64 bits"),  # more digits than int() accepts
    ("off: 1", 1, "boolean"),
    ("null: 1", 1, "must be text"),
    ("1: 1", 1, "must be text"),
    ("[a]: 1", 1, "must be text"),
    ("a: !!str 1", 4, "'!!str'"),
    ("a: &x !!python/name:os.system ''", 4, "python/name"),
    ("a: {b: !mine 1}", 8, "'!mine'"),
    ('? !!str "a"\n: 1', 3, "'!!str'"),
    ("a: {<<: {b: 1}}", 5, "merge"),
    ("a: &x [*x]", 4, "nested more than"),
    ("{b: 1, b: 3}", 8, "duplicate key 'b', first set on line 3"),
    ('a: "\\ud800"', 4, "surrogate"),
]


@pytest.mark.parametrize(("text", "column", "words"), TRAPS)
def test_trap_is_an_error_at_its_place(text: str, column: int, words: str) -> None:
    lead = "# a comment\n\n"
    found = problems(lead + text)
    assert [(line, at) for line, at, _ in found][:1] == [(3, column)]
    assert words in found[0][2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'010'", "010"),
        ("|\n  1:30:00", "1:30:00"),
        ("1.0e-4", 1e-4),
        (".5", 0.5),
        ("1_000_000", 1_000_000),
        ("18446744073709551615", 2**64 - 1),
        ("10:80", "10:80"),
        ("{on: 1, n: 2, y: 3}", {"on": 1, "n": 2, "y": 3}),  # keys, though no values
    ],
)
def test_what_is_no_trap_is_read(text: str, value: object) -> None:
    document = parse(f"a: {text}", "f")
    assert document.problems == []
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a:\n\t- 1\n", 2, 1),
        ("a: *nobody\n", 1, 4),
        ("a: 1\n---\nb: 1\n", 2, 1),
        ("ok: 1\nb: x\0y\n", 2, 5),
        ('ok: 1\nb: "\\U00110000"\n', 2, 7),  # PyYAML raises ValueError here
        ("a: " + "[" * 4000, 1, None),
    ],
)
def test_broken_syntax_has_a_place(text: str, line: int, column: int | None) -> None:
    ((at_line, at_column, _message),) = problems(text)
    assert at_line == line
    assert column is None or at_column == column


def test_alias_is_a_value_of_its_own_at_each_place() -> None:
    document = parse("a: &x {b: [1]}\nc: *x\n", "f")
    assert document.problems == []
    assert document.data == {"a": {"b": [1]}, "c": {"b": [1]}}
    assert document.data["a"] is not document.data["c"]


def test_billion_laughs_end_soon_with_one_error() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.process_time()
    found = problems("\n".join(lines))
    assert time.process_time() - start < 20
    assert [message for *_, message in found] == [
        f"not valid YAML: more than {MAX_NODES} keys and values, counting each use of an alias"
    ]


# ---- properties ----------------------------------------------------------------------------------

TOKENS = st.sampled_from(
    ["a", "b", ": ", "- ", "\n", "  ", "[", "]", "{", "}", ",", "&x ", "*x", "!", "!!str ", "!<",
     "|", "|2", ">", "'", '"', "\\", "\\U00110000", "\\x", "%", "%YAML 1.1", "%TAG ! x", "---",
     "...", "?", "\t", "\0", "\ufeff", "é", "1", "0", "#", "@", "`", "<<: ", "\r", "\u2028",
     "\x85", "~", "e", ".", "_", "on"]
)  # fmt: skip


@settings(max_examples=500)
@given(st.one_of(st.text(), st.lists(TOKENS, max_size=30).map("".join)))
def test_any_text_is_data_or_problems_never_an_exception(text: str) -> None:
    document = parse(text, "f")
    for problem in document.problems:
        assert problem.position.line >= 1
        assert problem.position.column >= 1


@settings(max_examples=500)
@given(st.text("0123456789-+.:_eExXobnyftruslai ", min_size=1, max_size=7))
def test_what_is_read_is_what_yaml_reads(scalar: str) -> None:
    """Every accepted scalar has its value in YAML 1.1, except that 1.5e3 is a number here."""
    document = parse(f"a: {scalar}", "f")
    if document.problems:
        return
    ours, theirs = document.data["a"], yaml.safe_load(f"a: {scalar}")["a"]
    if isinstance(theirs, str) and isinstance(ours, float):
        assert ours == float(theirs)
        return
    assert (type(ours), ours) == (type(theirs), theirs)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=8))
    | st.floats(allow_nan=False, allow_infinity=False).map(float),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text(min_size=1, max_size=5), PLAIN, max_size=4))
def test_json_is_read_as_it_is(data: dict[str, object]) -> None:
    """JSON is valid YAML. `jobs replay` writes its sweep as JSON."""
    text = json.dumps(data)
    assume(not re.search(r"\de", text))  # numbers such as 1e-07 are errors
    document = parse(text, "f")
    assert document.problems == []
    assert document.data == data
