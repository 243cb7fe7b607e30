"""Texts under tables take their numbers from the records, or say that a number is not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.errors import TableError
from jobs.report.texts.templates import StudyTexts
from jobs.results.run_states import observe
from jobs.sweep.views import Table
from tests.jobs.results_folder import (
    GIB,
    TOY,
    Outcome,
    ResultsFolder,
    failed,
    load,
    ok,
    text_below,
)

GRID = "grid: {size: [1, 2, 3, 4], mode: [fast, exact]}\n"


def outcome(params: dict[str, Any], repeat: int) -> Outcome:
    """exact takes twice as long as fast; size 3 runs out of memory, size 4 is missing."""
    size, factor = params["size"], 2 if params["mode"] == "exact" else 1
    if size >= 3:
        return failed("oom", memory="gpu") if size == 3 else None
    measurements = {
        "samples_ms": {
            "forward": [factor * size * ms for ms in (1.0, 2.0, 4.0)],
            "backward": [8.0],
        },
        "peak_memory_bytes": {"forward": GIB * size},
        "facts": {"weights_bytes": 2 * GIB, "kernel": "gemm", "losses": [1.0]},
    }
    return {"status": "ok", "measurements": measurements}


@pytest.fixture
def folder(tmp_path: Path, folder: ResultsFolder) -> ResultsFolder:
    folder.submit(load(tmp_path, TOY + GRID), outcome)
    return folder


def render(folder: ResultsFolder, text: str, warnings: list[str] | None = None, **view: Any) -> str:
    """Render a text as that of a table."""
    path = folder.path / "toy.md.j2"
    path.write_text(f"{{% block t %}}{text}{{% endblock %}}")
    observation = observe(folder.path)
    found: list[str] = []
    text = text_below(path, Table(name="t", **view), observation, found.append)
    assert found == (warnings or [])
    return text


FORWARD = 'value("time", phase="forward", size=2, mode={})'
FAST, EXACT = FORWARD.format('"fast"'), FORWARD.format('"exact"')
FAILED = 'value("time", phase="forward", size=3, mode="fast")'
MISSING = 'value("time", phase="forward", size=4, mode="fast")'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{{{{ {FAST} }}}}", "4.000"),
        (f"{{{{ {FAST} | n }}}} ms", "4.000 ms"),
        (f"{{{{ {FAST} | n(2) }}}} ms", "4.0 ms"),
        (f"{{{{ ({EXACT} / {FAST}) | n(2) }}}} times", "2.0 times"),
        (f"{{{{ ({FAST} / {EXACT} / 4) | pct }}}}", "12.5%"),
        (f"{{{{ max({FAST}, {EXACT}) | n }}}}", "8.000"),
        ('{{ value("time", "forward", "max", size=2, mode="fast") }}', "8.000"),
        ('{{ value("time", "forward", unit="us", size=2, mode="fast") }}', "4000"),
        ('{{ value("peak_memory", size=2, mode="fast") }} GiB', "2.000 GiB"),  # of one phase only
        ('{{ value("fact.weights_bytes", unit="GiB", size=1, mode="fast") }}', "2.000"),
        ('{{ value("fact.kernel", size=1, mode="fast") | n }}', "gemm"),
        (
            '{% for s in [1, 2] %}{{ value("time", "forward", size=s, mode="fast") | n(1) }} '
            "{% endfor %}",
            "2 4",
        ),
        ('{{ state(size=1, mode="fast") }} {{ state(size=3, mode="fast") }}', "ok oom"),
        ('{{ state(size=4, mode="fast") }}', "missing"),
        (
            '{{ published("flash_leaderboard_2025.csv", "forward_backward_ms", rank=1) }}',
            "5.364",
        ),
    ],
)
def test_numbers_are_those_of_the_records(folder: ResultsFolder, text: str, expected: str) -> None:
    assert render(folder, text) == expected


USES = [
    "X", "X | n", "X | n(2)", "X | pct", "X / 2", "2 / X", "1 - X * 3", "-X", "(X + X) | n",
    "X // 2", "X % 2", "X ** 2", "2 ** X", "X | round(2)", "X | abs", "[X, 1] | sum", "max(1, X)",
    "min(X, 1)", "(1 / X) | pct", "'{:.1f}'.format(X)", "max((X, 1))",
]  # fmt: skip


@pytest.mark.parametrize(
    "missing",
    [
        FAILED,
        MISSING,
        'value("mfu", size=1, mode="fast")',
        'value("fact.losses", size=1, mode="fast")',
        'value("predicted.x", size=1, mode="fast")',
    ],
)
def test_what_is_not_there_is_not_measured_whatever_is_done_with_it(
    folder: ResultsFolder, missing: str
) -> None:
    text = "\n".join(f"{use}: {{{{ {use.replace('X', missing)} }}}}" for use in USES)
    assert render(folder, text).splitlines() == [f"{use}: not measured" for use in USES]


def test_a_text_that_compares_what_is_not_measured_takes_no_side(folder: ResultsFolder) -> None:
    text = "exact is {{ 'slower' if %s > %s else 'faster' }}"
    assert render(folder, text % (EXACT, FAST)) == "exact is slower"
    equal = f"{{{{ 'same' if {FAILED} == 2 else 'other' }}}}"
    assert "depends on" in render(folder, equal)
    for pair in ((EXACT, FAILED), (FAILED, EXACT)):
        assert "depends on" in render(folder, text % pair)
        assert "faster" not in render(folder, text % pair)
    for text in (f"{{% for x in {FAILED} %}}.{{% endfor %}}", f"{{{{ max(*{FAILED}) }}}}"):
        assert "depends on" in render(folder, text)  # and ends
    there = f"{{% if {FAILED} %}}measured{{% else %}}nothing{{% endif %}}"
    assert render(folder, there) == "nothing"


def test_repeats_are_one_run(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "out")
    folder.submit(
        load(tmp_path, TOY + "fixed: {size: 1}\nrepeats: 3\n"),
        lambda params, repeat: failed("timeout") if repeat == 0 else ok(float(repeat)),
    )
    assert render(folder, '{{ value("time") }} {{ state() }}') == "1.500 ok"
    assert render(folder, '{{ value("time", repeat=2) }}') == "2.000"
    assert render(folder, "{{ state(repeat=0) }}") == "timeout"


def test_the_tables_where_does_not_hold_for_its_text(folder: ResultsFolder) -> None:
    assert render(folder, f"{{{{ {FAST} }}}}", where="size == 1") == "4.000"


def test_a_run_that_no_sweep_has_is_told_to_who_makes_the_report(folder: ResultsFolder) -> None:
    warnings = ["toy.md.j2: value('time'): no run has size=9, mode=fast"]
    text = '{{ value("time", size=9, mode="fast") }}'
    assert render(folder, text, warnings) == "not measured"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('\n{{ value("time", "forward", size=1) }}', "toy.md.j2:2: value('time'): 2 runs have "
         "size=1; add a parameter in which they differ (mode: fast, exact)"),
        ('{{ value("time", size=1, mode="fast") }}', "phase must be one of forward, backward"),
        ('{{ value("tme", size=1, mode="fast") }}', "did you mean 'time'"),
        ('{{ value("time", sise=1) }}', "no run has a parameter 'sise'; did you mean 'size'"),
        ('{{ value("time", "forward", "avg", size=1) }}', "statistic 'avg' is not known"),
        ('{{ valeu("time") }}', "'valeu' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__ }}", "unsafe"),
        ('{{ published("flsh.csv", "forward_ms") }}', "did you mean 'flash.csv'"),
        ('{{ published("flash.csv", "forward_ms", seq_len=128) }}', "which differ in head_dim"),
        ('{{ published("flash.csv", "forward_ms", seq_len=7) }}', "no forward_ms for seq_len=7"),
        (
            '{{ published("../../README.md", "a") }}',
            "no file of published figures '../../README.md'",
        ),
        ('{{ published("README.md", "a") }}', "no file of published figures 'README.md' (valid: "),
        ('{% set u = "GiB" %}{{ value("time", unit=u) }}', "'time' cannot be shown in 'GiB'"),
        ('{{ "{x}".format(1) }}', "toy.md.j2:1: 'x'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ 10 ** (10 ** 5) }}", "Exceeds the limit"),
        ("{% set x = 1e999 %}{{ x }}", "toy.md.j2:1: name 'inf' is not defined"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_an_error(folder: ResultsFolder, text: str, words: str) -> None:
    with pytest.raises(TableError) as caught:
        render(folder, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"{% block t %}{{ 1 }", ":1: "),
        (b"\n{% block t %}{% if %}{% endblock %}", ":2: "),
        (b"{% block t %}{{ 1 | int }}{% endblock %}", ":1: No filter named 'int'"),
        (b"{% block t %}" + b"{{ " + 300 * b"(" + b"1" + 300 * b")" + b" }}{% endblock %}", "deep"),
        (b"{% block t %}{{ state(size=1, size=1) }}{% endblock %}", "keyword argument repeated"),
        (b"{% block T %}{% endblock %}", "block 'T': the sweep has no such table (valid: t, u)"),
        (b"{% block t %}{% endblock %}\nlost", ":1: text must be in a block"),
        (b"{% set a = 1 %}{% block t %}{{ a }}{% endblock %}", ":1: text must be in a block"),
        (b"{% include 'a' %}", ":1: text must be in a block"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_template_that_is_not_valid_is_an_error(
    tmp_path: Path, source: bytes, words: str
) -> None:
    (tmp_path / "toy.md.j2").write_bytes(source)
    with pytest.raises(TableError) as caught:
        StudyTexts(tmp_path / "toy.md.j2", ["t", "u"])
    assert str(caught.value).startswith(str(tmp_path / "toy.md.j2"))
    assert str(caught.value).count("toy.md.j2") == 1
    assert words in str(caught.value)


def test_a_byte_order_mark_is_not_text(folder: ResultsFolder) -> None:
    path = folder.path / "toy.md.j2"
    path.write_bytes(b"\xef\xbb\xbf{% block t %}a{% endblock %}")
    observation = observe(folder.path)
    assert text_below(path, Table(name="t"), observation) == "a"


def test_a_template_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        StudyTexts(tmp_path / "toy.md.j2", ["t"])


def test_a_table_without_a_block_has_no_text(folder: ResultsFolder) -> None:
    path = folder.path / "toy.md.j2"
    path.write_text("{% block u %}{{ 1 / 0 }}{% endblock %}")
    assert text_below(path, Table(name="t"), observe(folder.path), tables=["t", "u"]) == ""


def test_a_phase_that_nothing_measured_is_told_to_who_makes_the_report(
    folder: ResultsFolder,
) -> None:
    what = "the run has no phase 'forwrd'; did you mean 'forward'? (valid: backward, forward)"
    text = '{{ value("time", "forwrd", size=1, mode="fast") }}'
    assert render(folder, text, [f"toy.md.j2: value('time'): {what}"]) == "not measured"
