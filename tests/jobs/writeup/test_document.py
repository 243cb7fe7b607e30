"""Answers and statuses of the report, from results folders with every kind of outcome."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import pytest

from jobs import ROOT
from jobs.results.unreadable import UnreadableResults
from jobs.sweep.load import load_sweep
from jobs.writeup.answer import Answer
from jobs.writeup.assemble import make_document
from jobs.writeup.build import build_report
from jobs.writeup.document import (
    IMPOSSIBLE,
    NO_NUMBERS,
    SOME_NUMBERS,
    Document,
    PartResult,
    State,
)
from jobs.writeup.markdown import markdown_report
from jobs.writeup.page import html_report
from jobs.writeup.problem import Exhibit, Part, Problem, read_problems
from jobs.writeup.studies import read_studies
from jobs.writeup.traced import without_marks
from tests.jobs.results_folder import CPU, GRID, H200, TOY, ResultsFolder, by_mode, failed, load, ok

# The run of size 1 needs a GPU, that of size 2 none.
ON_GPU_AND_CPU = TOY + (
    "cases: [{fixed: {size: 1}, resources: {gpus_per_node: 1}}, "
    "{fixed: {size: 2}, resources: {gpus_per_node: 0}}]\n"
)
HOSTILE = "<script>document.title='run'</script>\"'&|*`"
H100 = "NVIDIA H100"
PNG = b"\x89PNG"
SPEED = '{{ value("time", "forward", size=1, mode="fast") | n(3) }} ms'
OOM = SPEED.replace("size=1", "size=2")
MISSING = OOM.replace("fast", "exact")


def problem(*answers: str, **keys: object) -> Problem:
    parts = [
        Part(part=chr(97 + i), question=f"Question {i}?", answer=answer, **keys)  # type: ignore[arg-type]
        for i, answer in enumerate(answers)
    ]
    return Problem(id="toy_problem", title="A toy", names={2025: "toy"}, sweep="toy", parts=parts)


def document(*problems: Problem, folders: Sequence[ResultsFolder]) -> Document:
    paths = [folder.path for folder in folders]
    studies, notes = read_studies(paths)
    return make_document(problems, studies, list(map(str, paths)), notes)


def part_of(answer: str, *folders: ResultsFolder, **keys: object) -> PartResult:
    """Return the part of a problem with this answer, from results folders."""
    keys = {"show": [Exhibit(table="toy")], **keys}
    shown = document(problem(answer, **keys), folders=folders)
    return shown.problems[0].parts[0]


def answer_of(answer: str, folder: ResultsFolder, **keys: object) -> Answer:
    """Return the answer on the only device of a results folder."""
    (view,) = part_of(answer, folder, **keys).views
    return view.answer


def texts(part: PartResult) -> dict[str, str]:
    return {view.device: without_marks(view.text) for view in part.views}


def unpacked(page: str, name: str) -> Any:
    """Return the figures, the records or the HTML of the tables of a page."""
    found = re.search(r'id="packed">([^<]*)<', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))[name]


@pytest.fixture
def other(tmp_path: Path) -> ResultsFolder:
    """A second results folder."""
    return ResultsFolder(tmp_path / "other")


@pytest.fixture
def measured(folder: ResultsFolder) -> ResultsFolder:
    """A folder with the outcomes ok, oom, error and none."""
    outcomes = {
        (1, "fast"): ok(4.0, 4.0, 4.0),
        (1, "exact"): ok(8.0, 8.0, 8.0),
        (2, "fast"): failed("oom", memory="gpu", phase="backward"),
        (2, "exact"): None,
    }
    folder.submit(TOY + GRID, lambda params, _: outcomes[params["size"], params["mode"]], H200)
    return folder


def test_states(measured: ResultsFolder) -> None:
    shown = document(
        problem(
            SPEED,
            f"From {OOM}.",
            f"{SPEED} and {MISSING}.",
            "{% if value('time', 'forward', size=2, mode='fast') > 3 %}slow{% endif %}",
            "{{ nothing_like_this }}",
        ),
        folders=[measured],
    )
    (result,) = shown.problems
    states = [part.state for part in result.parts]
    assert states == [
        State.answered, State.missing, State.partly, State.missing, State.missing
    ]  # fmt: skip
    assert result.state is State.partly
    assert result.states_of_parts == "answered (a), partly (c), not measured (b, d, e)"
    (first,) = result.parts[0].views
    assert without_marks(first.text) == "4.00 ms" and "NVIDIA H200" in first.answer.basis
    assert result.parts[4].views[0].answer.problem == "'nothing_like_this' is undefined"


def test_an_answer_without_lookups_does_not_count_as_measured(measured: ResultsFolder) -> None:
    shown = document(problem("By definition.", SPEED), folders=[measured])
    (result,) = shown.problems
    assert [part.state for part in result.parts] == [State.derived, State.answered]
    assert result.state is State.answered
    assert result.states_of_parts == "answered (b), no measurement needed (a)"
    assert shown.devices == [H200] and result.states_on(H200) == "answered"
    derived = problem("By definition.")
    _, result = document(problem(SPEED), derived, folders=[measured]).problems
    assert result.state is State.derived and result.states_on(H200) == ""


def test_what_no_problem_shows_has_a_section_of_its_own(measured: ResultsFolder) -> None:
    answers = ["{{ value('time', 'forward', size=9) }}", "By definition."]
    of_other_runs, derived = (problem(answer, more=["toy"]) for answer in answers)
    of_other_sweep = problem(SPEED).model_copy(update={"sweep": "flash"})
    made = document(of_other_runs, derived, of_other_sweep, folders=[measured])
    (own,) = made.problems  # without results, nor what needs none
    assert own.parts[0].part.part == "toy" and own.parts[0].views[0].tables
    assert made.is_own and made.left_out == 0
    with_problem = document(problem(SPEED), of_other_sweep, folders=[measured])
    assert not with_problem.is_own and with_problem.left_out == 1


def test_failures_of_runs_that_a_part_does_not_ask_for(folder: ResultsFolder) -> None:
    """A failed study on a CPU is shown as a sweep of one's own, and fails no answer on GPUs."""
    folder.submit(load_sweep(ROOT / "sweeps" / "cpu" / "ddp.yaml"), failed("error"))
    (own,) = document(*read_problems(), folders=[folder]).problems
    assert own.parts[0].part.part == "ddp" and own.parts[0].command.endswith("sweeps/cpu/ddp.yaml")


def test_the_first_round_shows_the_figures_of_its_trial(folder: ResultsFolder) -> None:
    blocks = "blocks: {interleave: [mode], baseline: {mode: exact}, rounds: 2}\n"
    sweep = TOY + GRID + blocks
    drawn = ok(4.0) | folder.artifacts("of_trial", PNG, "timeline.png")
    folder.submit_rounds(sweep, drawn, rounds=[0], trial=True)
    folder.submit_rounds(sweep, ok(4.0))
    part = part_of(
        "", folder, show=[Exhibit(table="toy"), Exhibit(images="timeline", where="size == 1")]
    )
    titles = {figure.title for figure in part.views[0].figures}
    assert titles == {"toy: timeline (mode fast)", "toy: timeline (mode exact)"}


def test_the_state_of_a_part_is_the_best_of_its_devices(
    measured: ResultsFolder, other: ResultsFolder
) -> None:
    older = ok(6.0, 6.0) | {"source_hash": "0123"}
    other.submit(TOY + GRID, older, H100)
    shown = document(problem(SPEED, f"{SPEED} and {MISSING}"), folders=[other, measured])
    first, second = shown.problems[0].parts
    assert first.state is State.answered
    assert [view.heading for view in first.views] == [H200, f"{H100} (stale)"]
    # All numbers of older code say more than some numbers of the present code.
    assert second.state is State.stale
    assert shown.devices == [H200, H100]  # not that with most numbers
    assert f'aria-pressed="true">{H200}</button>' in html_report(shown)  # the one that is open
    assert shown.problems[0].states_on(H100) == "stale"
    assert shown.problems[0].states_on(H200) == "answered (a), partly (b)"
    partly, stale = second.views
    assert stale.heading == f"{H100} (stale)"
    of_one = part_of(SPEED + MISSING.replace("forward", "backward"), other)
    assert [view.heading for view in of_one.views] == [f"{H100} (partly, stale)"]
    assert partly.heading == f"{H200} (partly)"
    assert partly.text == NO_NUMBERS


def test_a_device_without_some_numbers_has_its_complete_paragraphs(
    measured: ResultsFolder, other: ResultsFolder
) -> None:
    other.submit(TOY + "grid: {size: [1], mode: [fast]}\n", ok(6.0), H100)
    text = (
        SPEED + '.\n\n{{ value("time", "forward", size=1, mode="exact") | n(3) }} ms was not '
        "measured everywhere."
    )
    h200, h100 = part_of(text, measured, other).views  # that with most numbers first
    assert h200.device == H200 and SOME_NUMBERS not in h200.text
    assert without_marks(h100.text) == f"6.00 ms.\n\n{SOME_NUMBERS}"


def test_a_run_without_memory_has_no_paragraph_and_lacks_no_number(measured: ResultsFolder) -> None:
    part = part_of(f"{SPEED}.\n\n{OOM}.", measured)
    assert part.state is State.answered and texts(part) == {H200: "4.00 ms."}
    part = part_of(f"{SPEED}, {OOM}.", measured)
    assert part.state is State.partly and texts(part) == {H200: IMPOSSIBLE}


def test_two_devices_have_a_plot_and_figures_each(
    tmp_path: Path, folder: ResultsFolder, other: ResultsFolder
) -> None:
    plot = "plots: [{name: p, x: size, series: [mode], phase: forward}]\n"
    for one, device in ((folder, H200), (other, H100)):
        drawn = ok(4.0) | one.artifacts("of_run", PNG + device.encode(), "timeline.png")
        one.submit(TOY + "grid: {size: [1, 2]}\n" + plot, drawn, device)
    shown = problem(SPEED, show=[Exhibit(plot="p"), Exhibit(images="timeline", where="size == 1")])
    result = document(shown, folders=[folder, other])
    part = result.problems[0].parts[0]
    titles = [[figure.title for figure in view.drawn] for view in part.views]
    assert titles == [["p", "toy: timeline"]] * 2
    text = markdown_report(result, tmp_path)
    files = [tmp_path / unquote(link) for link in re.findall(r"\]\((plots/.*?)\)", text)]
    # The figures of the other device are only in the page.
    assert len(files) == 2 and all(file.is_file() for file in files)
    assert files[1].read_bytes() == PNG + H100.encode()
    figures = unpacked(html_report(result), "figures")
    shown_pngs = [unquote_to_bytes(each).partition(b",")[2] for each in figures[1::2]]
    assert shown_pngs == [PNG + H100.encode(), PNG + H200.encode()]


def test_an_answer_names_how_a_run_failed(folder: ResultsFolder) -> None:
    message = (
        "CUDA out of memory. GPU 0 has a total capacity of 139.80 GiB of which 10.79 GiB is free. "
        "Of the allocated memory 97.44 GiB is allocated by PyTorch, and 30.84 GiB is reserved by "
        "PyTorch but unallocated."
    )
    oom = failed("oom", memory="gpu", phase="backward", requested_bytes=2**35, message=message)
    folder.submit(TOY + "grid: {size: [1, 2, 3]}\n", [oom, oom, ok(1.0)], H200)
    text = (
        "{% set f = failure('oom', size=1) %}{{ f.phase }}: {{ f.requested_bytes / 2**30 }} of "
        "{{ f.capacity }} GiB, {{ f.unused }} GiB unused\n\n"
        "{{ failure('oom', size=1).allocated_bytes }}"
    )
    answer = answer_of(text, folder)
    assert without_marks(answer.text) == "backward: 32.00 of 139.8 GiB, 30.84 GiB unused"
    for other in ("failure('oom', size=3)", "failure('error', size=1)"):  # ok, and oom
        assert not answer_of(f"{{{{ {other}.phase }}}}", folder).text
    differ = "failure(): 2 runs match; add a parameter in which they differ (size: 1, 2)"
    assert differ in answer_of("{{ failure('oom').phase }}", folder).problem


def test_numbers_have_names_families_and_no_false_conditions(measured: ResultsFolder) -> None:
    numbers: dict[str, Any] = {
        "at": {"mode": "fast"},
        "one": 'value("time", "forward", size=1, **at)',
        "modes": 'value("time", "forward", mode=["fast", "exact"], size=1)',
        "ratio": "modes / one",
        "nested": 'value("time", ["forward"], mode=["fast", "exact"], size=1)',
        "states": 'state(mode=["fast", "exact"], size=2)',
        "missing": 'value("time", "forward", size=2, mode="exact")',
        "is_slow": "missing > 1",
        "verdict": '"slow" if is_slow else "fast"',
        "halves": 'modes / value("time", "forward", mode=["fast", "exact"], size=2)',
    }
    text = (
        "{{ one | n(2) }} {{ ratio.exact | n(2) }} {{ max(ratio) | n(2) }}, "
        "{{ nested.forward.exact }}, {{ states.fast }}\n\n"
        "{{ verdict }}\n\n{{ halves.fast | n }}\n\n{{ accounting.peak_flops('', 'fp32') }}"
    )
    answer = answer_of(text, measured, numbers=numbers)
    assert without_marks(answer.text) == "4.0 2.0 2.0, 8.000, oom"
    assert (answer.missing, answer.impossible, answer.problem) == (4, 1, "")


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ({"value": "1"}, "value"),
        ({"max": "1"}, "max"),
        ({"a": "1", "bad": "a / 0"}, "bad"),
        ({"unfinished": "1 +"}, "unfinished"),
    ],
)
def test_a_wrong_number_is_named(
    measured: ResultsFolder, numbers: dict[str, Any], wrong: str
) -> None:
    table = [Exhibit(table="toy")]
    shown = document(problem(SPEED, numbers=numbers, show=table), folders=[measured])
    assert f" {wrong}: " in markdown_report(shown, measured.path)


def test_every_number_shows_its_records(measured: ResultsFolder) -> None:
    fast, exact = (f'value("time", "forward", size=1, mode="{mode}")' for mode in ("fast", "exact"))
    text = SPEED + f"; {{{{ ({exact} / 2) | n }}}}; {{{{ ({fast} + {exact}) | n }}}}"
    text += '; {{ speed("forward", {"mode": "exact"}, size=1, mode="fast") }}'
    shown = document(problem(text, show=[Exhibit(table="toy")]), folders=[measured])
    page = html_report(shown)
    records = unpacked(page, "records")
    runs = {record["run"]: record for record in records}
    assert len(runs) == 3  # the missing run has no record
    ok_run = next(r for r in runs.values() if "size=1 mode=fast" in r["params"])
    assert ok_run["samples"] == [["forward", "3", "4.000", "4.000", "4.000", "4.000", "0"]]
    assert ok_run["replay"].startswith(f"python -m jobs replay {ok_run['run']} --in ")
    assert any("RuntimeError: as asked" in r["facts"].get("failure", "") for r in runs.values())
    index = {r["params"].partition(" scale")[0]: i for i, r in enumerate(records)}
    one, two = index["size=1 mode=fast"], index["size=1 mode=exact"]
    both = f"{one},{two}"
    for behind, number in (
        (one, "4.00"), (two, "4.000"), (both, "12.00"), (both, "2.00 (not paired)"),
    ):  # fmt: skip
        assert f'<button class="n" data-r="{behind}">{number}</button>' in page


def test_hostile_texts_are_shown_as_text(tmp_path: Path, folder: ResultsFolder) -> None:
    sweep = load(
        tmp_path,
        TOY + "description: '<img src=x onerror=alert(1)>'\ngrid: {size: [1]}\ntables:\n"
        "  - {name: t, title: '<b>bold</b>', rows: [label], value: fact.text}\n",
        "label=<script>x</script>",
    )
    folder.submit(sweep, ok(1.0, facts={"text": HOSTILE}), f"GPU {HOSTILE}")
    answer = '{{ value("fact.text", size=1) }}'
    shown = document(problem(answer, show=[Exhibit(table="t")]), folders=[folder])
    page = html_report(shown)
    body = page.split("<!DOCTYPE html>")[1].split("<script")[0] + "".join(unpacked(page, "tables"))
    assert "<script" not in body
    assert "<img" not in body and "<b>" not in body
    assert "&lt;script&gt;document.title" in body
    text = markdown_report(shown, tmp_path)
    assert "\\<script" in text.replace("&lt;", "\\<") and "\n<script" not in text


def test_a_part_of_a_sweep_on_another_device_has_no_missing_rows(
    folder: ResultsFolder, other: ResultsFolder
) -> None:
    toy = TOY + "resources: {gpus_per_node: 1}\n"
    folder.submit(toy + GRID, ok(4.0), H200)
    other.submit(toy + "grid: {size: [1], mode: [fast, exact]}\n", by_mode(ok(6.0), None), H100)
    part = part_of(SPEED, folder, other, show=[Exhibit(table="toy")])
    h100, h200 = [view.tables[0].table.keys for view in part.views]
    assert h100 == [("fast",), ("exact",)] and len(h200) == 4


def measure_both(folder: ResultsFolder, gpu: str, cpu: str, ms: float) -> None:
    """Measure the run of size 1 on a GPU, and in a later submission that of size 2 on its host."""
    folder.submit(ON_GPU_AND_CPU, [ok(ms), None], gpu)
    folder.submit(ON_GPU_AND_CPU, [None, ok(ms + 1)], cpu)


@pytest.mark.parametrize("other_cpu", [CPU, f"{CPU} of another kind"])
def test_a_device_has_results_of_cpus_only_from_its_own_folders(
    folder: ResultsFolder, other: ResultsFolder, other_cpu: str
) -> None:
    """Two hosts with GPUs of two kinds have measured the same run on their CPUs."""
    measure_both(folder, H200, CPU, 4.0)
    measure_both(other, H100, other_cpu, 6.0)
    both = '{{ value("time", size=1) | n(2) }} {{ value("time", size=2) | n(2) }}'
    assert texts(part_of(both, folder, other)) == {H200: "4.0 5.0", H100: "6.0 7.0"}


def test_results_of_cpus_in_two_folders_of_one_gpu_are_one(
    folder: ResultsFolder, other: ResultsFolder
) -> None:
    measure_both(folder, H200, CPU, 4.0)
    measure_both(other, H200, CPU, 6.0)
    assert texts(part_of('{{ value("time", size=2) | n(2) }}', folder, other)) == {H200: "7.0"}


def test_staleness_is_that_of_each_record(measured: ResultsFolder) -> None:
    """A newer result of another device in the same folder does not hide an older one."""
    older = ok(6.0) | {"source_hash": "0123"}
    measured.submit(TOY + "grid: {size: [1], mode: [fast]}\n", older, H100)
    headings = {view.heading for view in part_of(SPEED, measured).views}
    assert headings == {H200, f"{H100} (stale)"}


def test_the_state_of_a_sweep_of_ones_own(measured: ResultsFolder, other: ResultsFolder) -> None:
    other.submit(TOY + "fixed: {size: 1}\n", ok(1.0), H200)
    for folder, state in ((measured, State.partly), (other, State.answered)):
        (own,) = document(folders=[folder]).problems
        assert own.state is state


def test_two_sweeps_of_one_name_are_shown(measured: ResultsFolder, other: ResultsFolder) -> None:
    text = TOY + "fixed: {size: 1}\ntables: [{name: another, phase: forward, rows: [size]}]\n"
    other.submit(text, ok(1.0), H200)
    (own,) = document(folders=[measured, other]).problems
    assert [part.part.part for part in own.parts] == ["toy", f"toy ({other.path})"]
    assert own.parts[1].views[0].tables[0].table.heading.startswith("another")


def test_an_unreadable_folder_is_noted(measured: ResultsFolder, other: ResultsFolder) -> None:
    manifest = other.submit(TOY + "fixed: {size: 1}\n", ok(1.0), H200)
    (manifest.path / "manifest.json").write_text("{")
    shown = document(problem(SPEED), folders=[other, measured])
    assert shown.problems[0].state is State.answered
    assert any(note.startswith(f"{other.path}: not in this report") for note in shown.notes)
    with pytest.raises(UnreadableResults):
        document(problem(SPEED), folders=[other])


def test_runs_that_all_failed_are_not_called_unmeasured(folder: ResultsFolder) -> None:
    folder.submit(TOY + GRID, failed("error"), H200)
    part = part_of(SPEED, folder)
    assert part.not_measured == "All runs of this answer failed (4 error)."
    assert part.command.endswith(" --retry-failed")


@pytest.mark.slow
def test_a_report_keeps_what_is_not_its_own(tmp_path: Path, measured: ResultsFolder) -> None:
    out = tmp_path / "out"
    drawn = ok(4.0) | measured.artifacts("of_run", PNG, "timeline.png")
    (out / "plots").mkdir(parents=True)
    (out / "plots" / "mine.png").touch()
    measured.submit(TOY + GRID, drawn, H200)
    build_report([measured.path], out)
    assert len(list(out.rglob("*.png"))) > 1
    (measured.path / "artifacts" / "of_run" / "timeline.png").unlink()
    build_report([measured.path], out)
    assert [path.name for path in out.rglob("*.png")] == ["mine.png"]


def test_runs_that_the_present_sweep_does_not_have_are_told(folder: ResultsFolder) -> None:
    folder.submit(load_sweep(ROOT / "sweeps" / "cpu" / "ddp.yaml"), ok(1.0, phase="alone"), H200)
    (view,) = part_of("", folder, sweep="ddp", show=[Exhibit(table="time")]).views
    assert "have 4 runs" in view.basis[0] and view.heading == f"{H200} (not measured)"
