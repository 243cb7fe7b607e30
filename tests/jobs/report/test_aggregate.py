"""aggregate.py: tables in every form that it writes, plots, notes, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.cli.application import COMMANDS, app
from jobs.report.tables.markdown import markdown_table
from tests.benchmarks import toy
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, TOY, ResultsFolder, failed, ok, write

SPECIAL = """\
name: toy
benchmark: tests.benchmarks.toy
grid: {size: [1, 2], label: ['50%_a', 'b&<c>#']}
repeats: 2
tables:
  - {name: first, title: Time & cost of 100%_, rows: [size], columns: [label]}
  - {name: second, rows: [size, label], statistic: mean_std}
plots:
  - {name: line, x: size, series: [label]}
"""


@pytest.fixture
def special(folder: ResultsFolder) -> ResultsFolder:
    folder.submit(SPECIAL, lambda params, repeat: ok(1.0 * params["size"], 3.0))
    return folder


def cli(*arguments: str | Path) -> tuple[int, str, str]:
    words = [str(a) for a in arguments]
    result = CliRunner().invoke(app, words if words[0] in COMMANDS else ["tables", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_markdown(special: ResultsFolder) -> None:
    code, out, _ = cli(special.path)
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["size", "50%_a", r"b&\<c>#"]  # else Markdown takes it for a tag
    assert cells[2:4] == [["1", "2.000", "2.000"], ["2", "2.500", "2.500"]]
    assert cells[-1] == ["2", r"b&\<c>#", "2.500 ± 0.5774"]
    assert "### Time & cost of 100%_ (ms)" in out
    assert CPU in out
    assert "median of 4 samples" in out


def test_a_kernels_name_stays_one_markdown_cell() -> None:
    name = r"void f<float>(int*, A|B) \ `x`"
    table = markdown_table({"size": ["1"], "kernel": [name], "a|b": ["1"]})
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    assert [len(row) for row in cells] == [3] * 3
    assert [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells[2]] == ["1", name, "1"]
    assert r"f\<float>(int\*," in table


WIDE = {
    "run": ["one", "two"],
    "mode": ["fast", "exact"],
    "dtype": ["bfloat16 and float32"] * 2,
    "time (ms)": ["1.234 ±0.4%", "1.235 (1 of 2 repeats; timeout)"],
    "speed": ["1.95x [1.93, 1.97]", "962x (noise)"],
    "peak memory (GiB)": ["1.25", ""],
}


@pytest.mark.parametrize("width", [200, 130, 100, 80, 60, 40])
def test_a_table_fits_a_terminal_and_tells_what_it_does_not_show(width: int) -> None:
    """No cell is broken. A column that is missing is counted."""
    text = markdown_table(WIDE, width=width, least=["speed", "peak memory (GiB)"])
    assert max(map(len, text.splitlines())) <= width
    absent = [name for name in WIDE if name not in text]
    told = re.search(r"(\d+) columns? not shown: --format csv", text)
    assert len(absent) == (int(told[1]) if told else 0)
    shown = [cell for name in WIDE if name not in absent for cell in WIDE[name]]
    assert all(any(cell in line for line in text.splitlines()) for cell in shown)
    whole = markdown_table(WIDE)
    assert (text == whole) == (max(map(len, whole.splitlines())) <= width)


def test_no_command_prints_a_line_wider_than_the_terminal(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 80
    monkeypatch.chdir(folder.path.parent)
    grid = "grid: {size: [1, 2], label: [a, b, c, d], mode: [fast, exact]}\n"
    keys = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 3}\n"
    view = "tables: [{name: t, rows: [size], columns: [label, mode], baseline: {mode: fast}}]\n"
    why = failed("error", message="too many words " * 20)
    folder.submit_rounds(
        TOY + grid + keys + view,
        lambda params, repeat: why if params["label"] == "d" else ok(1.0 + repeat),
    )
    commands = [("aggregate", name) for name in ("tables", "compare", "attempts")]
    commands += [("jobs", "hours"), ("jobs", "status")]
    in_pipe = [call(*command, "out").stdout for command in commands]
    monkeypatch.setattr("jobs.cli.output.UNLIMITED", width)
    for command, whole in zip(commands, in_pipe, strict=True):
        lines = call(*command, "out").stdout.splitlines()
        # Notes on stderr and commands to copy are not broken.
        kept = [line for line in lines if not line.startswith("note: ") and " -m " not in line]
        assert max(map(len, kept)) <= width, command
        assert max(map(len, whole.splitlines())) > width, command


def test_latex_is_escaped(special: ResultsFolder) -> None:
    code, out, _ = cli(special.path, "--format", "latex")
    assert code == 0 and out.count(r"\end{tabular}") == 2
    assert "% Time & cost of 100%_ (ms)\n" in out
    head = r"size & 50\%\_a & b\&\ensuremath{<}c\ensuremath{>}\# \\"
    rows = [" ".join(line.split()) for line in out.splitlines() if line[:1] not in ("%", "\\", "")]
    assert rows[0] == head and [row.endswith(r"\\") for row in rows] == [True] * 8
    assert [row.replace(r"\&", "").count("&") for row in rows] == [2] * 8


def test_skipped_lines_are_told_on_stderr(special: ResultsFolder) -> None:
    (path,) = (special.path / "records").glob("*.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    code, out, err = cli(special.path)
    assert code == 0
    assert f"{path}:8: skipped" in err
    assert "2.500 (1 of 2 repeats; missing)" in out


def test_what_tables_cannot_show_is_told(folder: ResultsFolder) -> None:
    text = """\
        name: toy
        benchmark: tests.benchmarks.toy
        fixed: {size: 1}
        tables:
          - {name: empty, where: size > 5}
          - {name: unmeasured, value: fact.nothing}
          - {name: phases, phase: [forwrd, forward]}
          - {name: facts, value: [time, fact.host_ms.forwrd]}
        plots: [{name: p, x: size, where: size > 5}]
        """
    outcome = ok(1.0)
    outcome["measurements"]["facts"] = {"host_ms": {"forward": 2.0}}
    folder.submit(text, outcome)
    code, out, err = cli(folder.path, "--plot", folder.path / "plots")
    assert (code, out.count("###")) == (0, 2)
    assert "note: plot p is not drawn: no run has a value for it\n" in err
    assert "note: table empty is empty: no run satisfies the condition 'size > 5'\n" in err
    assert "note: table unmeasured is left out: " in err
    assert "note: table phases: no run has phase 'forwrd'; did you mean 'forward'?" in err
    fact = "'fact.host_ms.forwrd'; did you mean 'fact.host_ms.forward'?"
    assert f"note: table facts: no run has {fact}" in err
    assert "–" in cli(folder.path, "--table", "unmeasured")[1]


def test_tables_of_some_runs(folder: ResultsFolder) -> None:
    folder.submit(TOY + "grid: {size: [1, 2, 3]}\n", ok(1.0))
    code, out, _ = cli(folder.path, "--where", "size > 1", "--format", "csv")
    assert code == 0 and [line[0] for line in out.splitlines() if line[:1].isdigit()] == ["2", "3"]
    assert cli(folder.path, "--where", "size > 3")[0] == 2


def test_views_of_another_benchmark_show_none_of_the_folders_runs(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    folder.submit(TOY + "fixed: {size: 1}\n", ok(1.0))
    views = "name: other\nbenchmark: tests.benchmarks.counter\nfixed: {size: 1}\n"
    path = write(tmp_path, views + "tables: [{name: t, rows: [depth]}]\n", "other.yaml")
    note = "note: table t is empty: no run has benchmark 'tests.benchmarks.counter'\n"
    assert cli(folder.path, "--views", path) == (0, "", note)


def test_views_may_name_parameters_that_are_younger_than_all_runs(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.submit(TOY + "fixed: {size: 1}\n", ok(2.0))

    class Params(toy.Params):
        depth: int = 4
        width: int

    monkeypatch.setattr(toy, "Params", Params)
    views = TOY + "fixed: {size: 1, width: 2}\ntables: [{name: t, rows: [NAME]}]\n"
    path = write(tmp_path, views.replace("NAME", "depth"), "younger.yaml")
    code, out, _ = cli(folder.path, "--views", path, "--format", "csv")
    assert code == 0 and "depth,time\n4,2.000\n" in out
    write(tmp_path, views.replace("NAME", "width"), "younger.yaml")
    code, _, err = cli(folder.path, "--views", path)
    assert code == 2
    assert err.startswith("sweep toy, table t: no run has a parameter 'width' (valid: causal, ")


def test_a_plot_of_any_words_and_of_no_numbers_is_drawn(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    """What looks like a formula is none; of null and 2, which is less, nobody knows."""
    text = """\
        name: toy
        benchmark: tests.benchmarks.toy
        grid: {size: [2, 3], label: ["$x_{$", _], window: [null, 2], causal: [true, false]}
        plots:
          - {name: p, title: "$y_{$", x: window, series: [label], facet: [size, causal]}
          - {name: q, x: label, series: [window], facet: [causal]}
          - {name: r, x: causal, series: [label], facet: [window]}
        """
    folder.submit(text, ok(1.0))
    for form, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
        code, _, err = cli(folder.path, "--plot", tmp_path / "plots", "--plot-format", form)
        assert code == 0
        assert err.splitlines() == [f"{tmp_path}/plots/{name}.{form}" for name in "pqr"]
        content = (tmp_path / f"plots/p.{form}").read_bytes()
        assert content.startswith(start) and b"/Type3" not in content
