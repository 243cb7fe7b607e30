"""The problems of the report, and the tracked report of the reference results in docs/report."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from jobs.writeup.answer import render_answer
from jobs.writeup.build import build_report
from jobs.writeup.problem import Part, Problem, read_problems
from jobs.writeup.studies import Registry
from jobs.writeup.traced import without_marks
from systems import accounting
from tests.jobs.harness import ROOT

PROBLEMS = read_problems()
PARTS = [
    pytest.param(problem, part, id=f"{problem.id}-{part.part or 'only'}")
    for problem in PROBLEMS
    for part in problem.parts
]


def test_no_two_problems_have_the_same_anchor() -> None:
    anchors = [anchor for problem in PROBLEMS for anchor in problem.anchors]
    assert sorted(set(anchors)) == sorted(anchors)


@pytest.mark.parametrize(("problem", "part"), PARTS)
def test_exhibits_are_declared_by_their_sweeps(problem: Problem, part: Part) -> None:
    def declared(sweep: str | None) -> tuple[set[str], set[str]]:
        loaded = load_sweep(ROOT / "sweeps" / f"{sweep or part.sweep or problem.sweep}.yaml").sweep
        return {table.name for table in loaded.tables}, {plot.name for plot in loaded.plots}

    for exhibit in part.show:
        tables, plots = declared(exhibit.sweep)
        assert exhibit.table is None or exhibit.table in tables
        assert exhibit.plot is None or exhibit.plot in plots
    if part.more:
        assert set(part.more) <= declared(None)[0]


@pytest.mark.parametrize(("problem", "part"), PARTS)
def test_answers_are_prose_whose_only_logic_is_rows_of_tables(problem: Problem, part: Part) -> None:
    statements = set(re.findall(r"{%-?\s*(\w+)", part.answer))
    assert statements <= {"for", "endfor"}
    calls = re.findall(r"\b(?:value|state|speed|items|failure|published)\(", part.answer)
    assert not calls  # they are declared in numbers
    texts = re.findall(r'"([^"]*)"', " ".join(map(str, part.numbers.values())))
    assert [text for text in texts if len(text.split()) > 4] == []  # nor sentences in numbers


@pytest.mark.parametrize(("problem", "part"), [p for p in PARTS if p.values[1].filter])
def test_the_filter_of_a_part_selects_runs(problem: Problem, part: Part) -> None:
    path = ROOT / "sweeps" / f"{part.sweep or problem.sweep}.yaml"
    assert expand(load_sweep(path, filter=part.filter)).runs


def numbers_of(name: str, part: str, text: str) -> list[float]:
    """The numbers that an answer without records has in place of the # of a text."""
    (found,) = [
        p for problem in PROBLEMS if problem.id == name for p in problem.parts if p.part == part
    ]
    answer = without_marks(render_answer(found, None, {}, None, Registry()).text)
    match = re.search(re.escape(text).replace(r"\#", r"([\d.,]*\d)"), answer.replace("\n", " "))
    assert match, answer
    return [float(number.replace(",", "")) for number in match.groups()]


@pytest.mark.parametrize(
    ("name", "part", "text", "passes", "is_shared"),
    [
        ("data_parallel_calcs", "c", "N <= #, if", [("dp", 2)], False),
        ("fsdp_calcs", "c", "both are N <= #.", [("fsdp", 1)], False),
        ("tp_calcs", "d", "they are # and # devices", [("tp", 2), ("tp", 1)], False),
        ("fsdp_tp_calcs", "c", "this is # x # =", [("fsdp", 1), ("tp", 1)], False),
        ("fsdp_tp_calcs", "d", "this is # x # =", [("fsdp", 1), ("tp", 1)], True),
    ],
)
def test_at_the_limits_rings_take_as_long_as_matmuls(
    name: str, part: str, text: str, passes: list[tuple[str, int]], is_shared: bool
) -> None:
    """`passes` has the split of each number, and its matmuls per matrix: 1 forward, 2 backward."""
    d, f, tokens, flops, link = 4096, 11008, 65536, 989.4e12, 450e9
    found, times = numbers_of(name, part, text), []
    for devices, (split, matmuls) in zip(found, passes, strict=True):
        weights, outputs = 2 * 3 * d * f, 2 * d * tokens
        sent = {
            "dp": accounting.all_reduce_seconds(weights, devices, link),
            "fsdp": accounting.all_gather_seconds(weights, devices, link),
            "tp": accounting.all_reduce_seconds(outputs, devices, link),
        }[split]
        times.append(sent / (matmuls * 2 * 3 * tokens * d * f / devices / flops))
    assert (sum(times) if is_shared else min(times)) == pytest.approx(1, rel=5e-3)
    assert max(times) < 1 + 5e-3


def test_xxl_takes_the_fewest_devices_that_hold_it() -> None:
    state, saved = 16 * 126 * 2 * 16384 * 53248, 2 * 126 * (16384 + 53248)
    h100s = [next(n for n in range(100) if state + t * saved <= n * 80e9) for t in (0, 4096)]
    assert numbers_of("communication_accounting", "a", "memory of # H100s") == h100s[:1]
    assert numbers_of("communication_accounting", "a", "the model takes # H100s") == h100s[1:]

    def fits(devices: int, tokens: int) -> bool:
        return (state + tokens * saved / 2) / devices + tokens * saved / 2 < 95e9

    v5ps = [next(n for n in range(1, 100) if fits(n, tokens)) for tokens in (0, 1024, 4096)]
    text = "at least # v5p without activations, # with 1,024 tokens per device and # with 4,096."
    assert numbers_of("communication_accounting", "b", text) == v5ps
    (most,) = numbers_of("communication_accounting", "b", "which is # tokens per device")
    assert fits(10**15, int(most) - 1) and not fits(10**15, int(most))


def test_xxl_batches_by_hand() -> None:
    alpha = 4.6e14 / 1.8e11
    text = "from # tokens per device on, so a batch of # tokens"
    assert numbers_of("communication_accounting", "c", text) == [319.4, 20_445]
    (shared,) = numbers_of("communication_accounting", "c", "and the limit is # tokens")
    # 16 alpha / (2 B) + 4 alpha / F = 1
    assert 16 * alpha / 2 / (64 * shared) + 4 * alpha / 53248 == pytest.approx(1, abs=1e-3)
    # 4 stages and 16 microbatches: a stage works in 16 of 19 turns
    assert numbers_of("communication_accounting", "d", "of the time: #%") == [16]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    part = "{question: q, answer: a, show: [{table: a, plot: b}]}"
    (tmp_path / "a.yaml").write_text(f"id: a\ntitle: t\nparts: [{part}]")
    with pytest.raises(ValueError, match=r"(?s)a\.yaml.*one of table, plot and images, got "):
        read_problems(tmp_path)


# ---- the tracked report --------------------------------------------------------------------------

TRACKED = ROOT / "docs" / "report"
RENEW = "docs/report differs from what the records give: run make report"


def test_the_tracked_report_has_all_problems_and_no_mistake_of_a_template() -> None:
    report = (TRACKED / "report.md").read_text()
    assert not re.search(
        r"The answer cannot be written|^a picture is left out|^table \S+: ", report, re.M
    )
    assert re.findall(r'^## <a id="(\w+)">', report, re.M) == [each.id for each in PROBLEMS]


@pytest.mark.slow
def test_the_report_of_the_reference_results_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because each build takes tens of seconds."""
    monkeypatch.chdir(ROOT)
    begin = time.process_time()
    document = build_report([Path("logs/h100"), Path("logs/h200")], tmp_path)
    seconds = time.process_time() - begin

    # A GPU may lack runs, but one of them has all numbers of an answer. A wrong parameter or name
    # in a template lacks its number on every GPU.
    for part in (part for problem in document.problems for part in problem.parts):
        complete = [view for view in part.views if not (view.device and view.answer.missing)]
        assert complete and not part.not_measured, part.part.question

    made, tracked = ((folder / "report.md").read_text() for folder in (tmp_path, TRACKED))
    assert words(made) == words(tracked), RENEW
    images = [
        {path.relative_to(folder) for path in (folder / "plots").rglob("*.*")}
        for folder in (tmp_path, TRACKED)
    ]
    assert images[0] == images[1], RENEW
    links = re.findall(r"\]\((plots/[^)]*)\)", tracked)
    assert set(map(Path, links)) == images[1] and len(links) > 10

    assert seconds < 60  # about 18 s
    assert (tmp_path / "index.html").stat().st_size < 3e6


def words(text: str) -> list[str]:
    """Return the words of a text. Versions of tabulate differ in the width of columns."""
    return re.sub(r"[-:|]+", " ", text).split()
