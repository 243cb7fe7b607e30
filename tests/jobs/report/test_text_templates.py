"""Texts under tables: their numbers are those of the records, or they say that there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.errors import TableError
from jobs.report.report_table import ReportTable
from jobs.sweep.expand import expand
from tests.jobs.results_folder import (
    GIB,
    TOY,
    Outcome,
    ResultsFolder,
    errors,
    failed,
    load,
    ok,
    report_table,
    write,
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


def table(folder: ResultsFolder, text: str, **view: Any) -> ReportTable:
    return report_table(folder, rows=["size"], text=text, **view)


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
    assert table(folder, text).text == expected


USES = [
    "X", "X | n", "X | n(2)", "X | pct", "X / 2", "2 / X", "1 - X * 3", "-X", "(X + X) | n",
    "X // 2", "X % 2", "X ** 2", "2 ** X", "X | round(2)", "X | abs", "[X, 1] | sum", "max(1, X)",
    "min(X, 1)", "(1 / X) | pct",
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
    assert table(folder, text).text.splitlines() == [f"{use}: not measured" for use in USES]


def test_a_text_that_compares_what_is_not_measured_takes_no_side(folder: ResultsFolder) -> None:
    text = "exact is {{ 'slower' if %s > %s else 'faster' }}"
    assert table(folder, text % (EXACT, FAST)).text == "exact is slower"
    equal = f"{{{{ 'same' if {FAILED} == 2 else 'other' }}}}"
    assert "compares" in table(folder, equal).text
    for pair in ((EXACT, FAILED), (FAILED, EXACT)):
        assert "compares" in table(folder, text % pair).text
        assert "faster" not in table(folder, text % pair).text
    there = f"{{% if {FAILED} %}}measured{{% else %}}nothing{{% endif %}}"
    assert table(folder, there).text == "nothing"


def test_repeats_are_one_run(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "out")
    folder.submit(
        load(tmp_path, TOY + "fixed: {size: 1}\nrepeats: 3\n"),
        lambda params, repeat: failed("timeout") if repeat == 0 else ok(float(repeat)),
    )
    assert table(folder, '{{ value("time") }} {{ state() }}').text == "1.500 ok"
    assert table(folder, '{{ value("time", repeat=2) }}').text == "2.000"
    assert table(folder, "{{ state(repeat=0) }}").text == "timeout"


def test_the_tables_where_does_not_hold_for_its_text(folder: ResultsFolder) -> None:
    assert table(folder, f"{{{{ {FAST} }}}}", where="size == 1").text == "4.000"


def test_a_run_that_no_sweep_has_is_told_to_who_makes_the_report(folder: ResultsFolder) -> None:
    made = table(folder, '{{ value("time", size=9, mode="fast") }}')
    assert made.text == "not measured"
    assert made.warnings == ["text: value('time'): no run has size=9, mode=fast"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('\n{{ value("time", "forward", size=1) }}', "line 2: value('time'): 2 runs have size=1; "
         "they differ in mode: fast, exact"),
        ('{{ value("time", size=1, mode="fast") }}', "which phase? there are forward, backward"),
        ('{{ value("tme", size=1, mode="fast") }}', "did you mean 'time'"),
        ('{{ value("time", sise=1) }}', "no parameter 'sise'; did you mean 'size'"),
        ('{{ value("time", "forward", "avg", size=1) }}', "no statistic 'avg'"),
        ('{{ valeu("time") }}', "'valeu' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__ }}", "unsafe"),
        ('{{ published("flsh.csv", "forward_ms") }}', "did you mean 'flash.csv'"),
        ('{{ published("flash.csv", "forward_ms", seq_len=128) }}', "which differ in head_dim"),
        ('{{ published("flash.csv", "forward_ms", seq_len=7) }}', "no forward_ms of seq_len=7"),
        ('{{ published("../../README.md", "a") }}', "no published figures '../../README.md'"),
        ('{{ published("README.md", "a") }}', "no published figures 'README.md' (valid: "),
        ('{% set u = "GiB" %}{{ value("time", unit=u) }}', "'time' cannot be shown in 'GiB'"),
        ('{{ "{x}".format(1) }}', "line 1: 'x'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ 10 ** (10 ** 5) }}", "Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_an_error(folder: ResultsFolder, text: str, words: str) -> None:
    with pytest.raises(TableError) as caught:
        table(folder, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a {{ value('time' }}", "text: line 1: "),
        ("{% if %}", "text: line 1: "),
        ("{{ 1 | int }}", "text: line 1: No filter named 'int'"),
        ("{{ valeu('time') }}", "text: no function 'valeu'; did you mean 'value'"),
        ("{{ value('tme') }}", "value 'tme' is not known; did you mean 'time'"),
        ("{{ value('time', statistic='mean_std') }}", "no statistic 'mean_std'"),
        ("{{ state(sise=1) }}", "no parameter 'sise'; did you mean 'size'"),
        ("{{ state(mode='fsat') }}", "did you mean 'fast'"),
    ],
)
def test_what_can_be_told_without_records_is_told_before_anything_runs(
    tmp_path: Path, text: str, words: str
) -> None:
    sweep = TOY + f'fixed: {{size: 1}}\ntables:\n  - name: t\n    text: "{text}"\n'
    (problem,) = errors(write(tmp_path, sweep))
    assert problem.startswith("sweep.yaml:6:11: ")
    assert words in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ value() }}", "line 1: value(): missing a required argument: 'name'"),
        ("{{ state('fast') }}", "line 1: state(): too many positional arguments"),
        ("{{ value('time', 'forward', 'avg') }}", "line 1: no statistic 'avg'"),
        ("{{ value('time', unit='GiB') }}", "'time' cannot be shown in 'GiB' (valid: us, ms, s)"),
        ("{{ value(none) }}", "value 'None' is not known"),
        ("{{ value('mfu', unit='s') }}", "'mfu' cannot be shown in 's' (valid: none but its own)"),
        ("{{ state(size=-1) }}", "size: given -1, expected greater than or equal to 1"),
        ("{{ published('flsh.csv', 'gpu') }}", "did you mean 'flash.csv'"),
        ("{{ published('flash.csv', 'ms', seq_len=1) }}", "flash.csv has no column 'ms'"),
        ("{{ published('flash.csv', 'gpu', seq_len=1) }}", "flash.csv has no gpu of seq_len=1"),
        ("{% include 'a' %}", "line 1: a text cannot include another"),
        ("{{ " + 300 * "(" + "1" + 300 * ")" + " }}", "text: nested too deeply"),
        ("{{ 10 ** (10 ** 5) }}", "text: Exceeds the limit"),
    ],
)
def test_a_call_that_cannot_be_right_is_told_before_anything_runs(
    tmp_path: Path, text: str, words: str
) -> None:
    (problem,) = errors(
        write(tmp_path, TOY + f'fixed: {{size: 1}}\ntables: [{{name: t, text: "{text}"}}]\n')
    )
    assert problem.startswith("sweep.yaml:4:26: text: ")
    assert words in problem


def test_what_a_call_takes_from_elsewhere_is_not_judged_before_it_is_there(tmp_path: Path) -> None:
    text = (
        "{% set u = 's' %}{{ value('time', 'forward', unit=u, **{'size': 1}) }}"
        "{{ value(*['time']) }}{{ published('flash.csv', u, seq_len=1) }}"
    )
    sweep = TOY + f'fixed: {{size: 1}}\ntables: [{{name: t, text: "{text}"}}]\n'
    assert expand(load(tmp_path, sweep)).runs


def test_a_phase_that_nothing_measured_is_told_to_who_makes_the_report(
    folder: ResultsFolder,
) -> None:
    made = table(folder, '{{ value("time", "forwrd", size=1, mode="fast") }}')
    assert made.text == "not measured"
    (warning,) = made.warnings
    assert warning.startswith("text: value('time'): no phase 'forwrd'; did you mean 'forward'?")


def test_a_text_that_fits_several_runs_is_told_before_anything_runs(tmp_path: Path) -> None:
    text = "{{ value('time', 'forward', size=1) }}\\n\\n{{ state(size=1, mode='fast') }}"
    sweep = TOY + GRID + f'tables:\n  - name: t\n    text: "{text}"\n'
    (problem,) = errors(write(tmp_path, sweep))
    assert problem == (
        "sweep.yaml:6:11: text: line 1: value(): 2 runs have size=1; "
        "they differ in mode: fast, exact"
    )
    expand(load(tmp_path, sweep, filter="mode == fast"))
    expand(load(tmp_path, sweep.replace("size=1)", "size=1, mode='exact')")))


def test_a_right_text_is_no_error(tmp_path: Path) -> None:
    text = "{% set s = 2 %}{{ (value('time', 'forward', size=s) / 2) | n }} {{ state(device='a') }}"
    loaded = load(tmp_path, TOY + f'fixed: {{size: 1}}\ntables: [{{name: t, text: "{text}"}}]\n')
    assert loaded.sweep.tables[0].text == text
