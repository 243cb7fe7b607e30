"""Short names of implementations outside this project, in tables, plots and comparisons."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import pytest

from jobs.code.short_names import short_names
from jobs.frame.results import list_results
from jobs.report.run_pictures import run_pictures
from jobs.results.run_states import observe
from systems.external.parameter import Implementation
from tests.benchmarks import toy
from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import TOY, ResultsFolder, ok, plot_of, table

SWEEP = TOY + "fixed: {size: 1}\ngrid: {kernel: [naive, ./v2/flash.py:Mine, flash.py:Mine]}\n"
V2 = "v2/flash.py:Mine"


class Params(toy.Params):
    kernel: Annotated[str, Implementation("attention", ("naive", "Mine"))]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with two files that each contain an implementation, as the current folder."""
    monkeypatch.setattr(toy, "Params", Params)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "flash.py", tmp_path / "v2" / "flash.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("def Mine(q, k, v, is_causal): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    ("shown", "short"),
    [
        (["a/flash.py:Mine", "naive"], ["Mine"]),
        (["pkg.flash:Mine", "Mine"], ["flash:Mine"]),
        (["a/flash.py:Mine", "a/b.py:Mine"], ["flash.py:Mine", "b.py:Mine"]),
        (["v1/flash.py:Mine", "v2/flash.py:Mine"], ["v1/flash.py:Mine", "v2/flash.py:Mine"]),
        (["/x/v1/a.py:F", "/x/v2/a.py:F"], ["v1/a.py:F", "v2/a.py:F"]),
        (["flash.py:Mine", "v2/flash.py:Mine"], ["flash.py:Mine", "v2/flash.py:Mine"]),
        (["a.b.c:F", "x.b.c:F", "a/c.py:F"], ["a.b.c:F", "x.b.c:F", "c.py:F"]),
        (["a/flash.py:Mine", "a/flash.py:Other"], ["Mine", "Other"]),
    ],
)
def test_a_short_name_is_the_shortest_that_is_unambiguous(
    shown: list[str], short: list[str]
) -> None:
    references = [value for value in shown if ":" in value]
    assert list(short_names([*references, "not.shown:Mine"], [1, None, *shown]).values()) == short


def test_tables_show_short_names_and_csv_shows_references(
    sources: Path, folder: ResultsFolder
) -> None:
    """The order is that of the sweep file, also for a reference with another spelling."""
    tables = "tables: [{name: t, rows: [size], columns: [kernel], baseline: {kernel: ./KERNEL}}]\n"
    ms = {"naive": 4.0, V2: 2.0, "flash.py:Mine": 1.0}
    text = SWEEP + tables.replace("KERNEL", V2)
    folder.submit(text, lambda params, _: ok(ms[params["kernel"]]))
    code, out, _ = cli(folder.path)
    assert code == 0
    assert "".join(out.splitlines()[2].split()) == (
        "|size|naive|naivevsv2/flash.py:Mine|v2/flash.py:Mine|flash.py:Mine|"
        "flash.py:Minevsv2/flash.py:Mine|"
    )
    assert "| 0.50x |" in " ".join(out.split()) and "2.00x" in out
    shown = table(folder, rows=["kernel"], where=f"kernel != '{V2}'")
    assert [row["kernel"] for row in shown] == ["naive", "Mine"]
    listed = table(folder, rows=["kernel"], list="kernels", where=f"kernel == '{V2}'")
    assert [row["kernel"] for row in listed] == ["Mine"]
    (sources / "only.yaml").write_text(
        SWEEP + f"tables: [{{name: t, rows: [kernel], where: kernel == '{V2}'}}]\n"
    )
    for output_format, name in (("md", "|     Mine |"), ("csv", f"\n{V2},")):
        _, out, _ = cli(folder.path, "--format", output_format, "--views", "only.yaml")
        assert name in out


def test_plots_comparisons_and_labels_show_short_names(
    sources: Path, folder: ResultsFolder
) -> None:
    drawn = ok(1.0, 1.0, 1.0, 1.0, 1.0) | folder.artifacts("a", b"\x89PNG", "image.png")
    folder.submit(SWEEP.replace(", flash.py:Mine", ""), drawn)
    seen = observe(folder.path)
    for view in ({"x": "kernel"}, {"x": "size", "series": ["kernel"]}):
        axes = plot_of(folder, **view).axes[0]
        ticks = [text.get_text() for text in axes.get_xticklabels()]
        lines = [str(line.get_label()) for line in axes.get_lines()]
        assert ["naive", "Mine"] in (ticks, lines)
    pictures, _ = run_pictures(list_results(seen), lambda _: folder.path)
    titles = [picture.title for picture in pictures]
    assert titles == ["image (kernel naive)", "image (kernel Mine)"]
    other = shutil.copytree(folder.path, sources / "copy")
    _, out, _ = cli("compare", folder.path, other, "--all")
    assert "| Mine " in out and V2 not in out
    _, out, _ = cli("status", folder.path, "--all")
    assert " kernel=Mine\n" in out and V2 not in out
