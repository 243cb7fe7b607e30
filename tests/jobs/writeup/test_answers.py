"""Answers take numbers from the records. A paragraph without its numbers is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.writeup.traced import without_marks
from tests.jobs.results_folder import CPU, GIB, H200, TOY, Outcome, ResultsFolder, failed, ok
from tests.jobs.writeup.test_document import answer_of

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
def folder(folder: ResultsFolder) -> ResultsFolder:
    folder.submit(TOY + GRID, outcome)
    return folder


def render(folder: ResultsFolder, text: str) -> str:
    found = answer_of(text, folder)
    assert not found.problem
    return without_marks(found.text)


FORWARD = 'value("time", phase="forward", size=2, mode={})'
FAST, EXACT = FORWARD.format('"fast"'), FORWARD.format('"exact"')
OPEN = 'state(size=4, mode="fast")'  # did not end
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
        ('{{ state(size=1, mode="fast") }} {{ state(size=3, mode="fast") }}', "ok oom"),
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
    "X // 2", "X % 2", "X ** 2", "2 ** X", "X | round(2)", "[X, 1] | sum", "max(1, X)",
    "min(X, 1)", "(1 / X) | pct", "'{:.1f}'.format(X)", "max((X, 1))", "'a' if X > 1 else 'b'",
    "'a' if 1 > X else 'b'", "'a' if X == 2 else 'b'",
]  # fmt: skip
STATEMENTS = ["{% if X %}a{% else %}b{% endif %}", "{% for x in X %}.{% endfor %}"]


@pytest.mark.parametrize(
    "missing",
    [
        FAILED,
        MISSING,
        OPEN,
        'value("time", "forwrd", size=1, mode="fast")',
        'value("time", size=9, mode="fast")',
        'value("mfu", size=1, mode="fast")',
        'value("fact.losses", size=1, mode="fast")',
        'value("predicted.x", size=1, mode="fast")',
    ],
)
def test_a_paragraph_without_its_number_is_left_out_whatever_is_done_with_it(
    folder: ResultsFolder, missing: str
) -> None:
    paragraphs = [*(f"{{{{ {use} }}}}" for use in USES), *STATEMENTS]
    text = "\n\n".join(paragraphs).replace("X", missing)
    assert render(folder, f"{text}\n\n{{{{ {FAST} }}}}") == "4.000"


def test_repeats_are_one_run(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "repeated")
    folder.submit(
        TOY + "fixed: {size: 1}\nrepeats: 3\n",
        lambda params, repeat: failed("timeout") if repeat == 0 else ok(float(repeat)),
    )
    assert render(folder, '{{ value("time") | n }} {{ state() }}') == "1.500 ok"


def test_a_gpu_counts_before_the_cpu_of_its_folder(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "devices")
    for device, ms in ((H200, 4.0), (CPU, 9.0)):
        facts = ok(ms)["measurements"] | {"facts": {"losses": [{"loss": ms}]}}
        folder.submit(TOY + "fixed: {size: 1}\n", {"status": "ok", "measurements": facts}, device)
    text = '{{ value("time") | n }} {% for item in items("losses") %}{{ item.loss }}{% endfor %}'
    assert render(folder, text) == "4.000 4.000"


def test_runs_of_two_benchmarks_are_not_one_run(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "both")
    cases = "fixed: {size: 1}\ncases: [{}, {benchmark: tests.benchmarks.counter}]\n"
    folder.submit(TOY + cases, ok(4.0))
    wrong = "add a parameter in which they differ (benchmark: tests.benchmarks.toy, "
    assert wrong in answer_of('{{ value("time", "forward") }}', folder).problem
    one = '{{ value("time", "forward", benchmark="tests.benchmarks.toy") }}'
    assert render(folder, one) == "4.000"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{{ value("time", "forward", size=1) }}', "value('time'): 2 runs have size=1; add a "
         "parameter in which they differ (mode: fast, exact)"),
        ('{{ value("time", size=1, mode="fast") }}', "phase must be one of forward, backward"),
        ('{{ value("tme", size=1, mode="fast") }}', "did you mean 'time'"),
        ('{{ value("time", sise=1) }}', "no run of toy has all of these parameters: sise"),
        ('{{ value("time", "forward", "avg", size=1) }}', "statistic 'avg' is not known"),
        ('{{ valeu("time") }}', "'valeu' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ('{{ published("flsh.csv", "forward_ms") }}', "did you mean 'flash.csv'"),
        ('{{ published("flash.csv", "forward_ms", seq_len=128) }}', "which differ in head_dim"),
        ('{{ published("flash.csv", "forward_ms", seq_len=7) }}', "no forward_ms for seq_len=7"),
        ('{{ value("time", unit="GiB", size=1) }}', "'time' cannot be shown in 'GiB'"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_named(folder: ResultsFolder, text: str, words: str) -> None:
    assert words in answer_of(text, folder).problem
