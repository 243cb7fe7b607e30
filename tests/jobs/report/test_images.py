"""Images of a report: plots and PNG artifacts of runs, copied and linked in Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import TOY, Outcome, ResultsFolder, failed, load, ok

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG of "


class RunImages:
    """A results folder whose runs leave images as artifacts."""

    def __init__(self, tmp_path: Path):
        self.folder = ResultsFolder(tmp_path / "out")

    def left(self, name: str, content: str, *files: str) -> dict[str, str]:
        """Write artifacts of a run. Return the entry of its record that names them."""
        folder = self.folder.path / "artifacts" / name
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_bytes(PNG + content.encode())
        return {"artifacts": f"artifacts/{name}"}


@pytest.fixture
def run_images(tmp_path: Path) -> RunImages:
    return RunImages(tmp_path)


def links(markdown: str) -> dict[str, str]:
    """Return the path of each image in a Markdown text, by title."""
    return dict(re.findall(r"!\[(.*)\]\((.*)\)", markdown))


def test_a_page_beside_the_folder_shows_plots_and_the_runs_images(
    tmp_path: Path, run_images: RunImages
) -> None:
    text = "grid: {size: [1, 2], mode: [fast, exact], label: ['a/b']}\n"
    plots = "plots: [{name: line, title: 'Time, {mode}', x: size, series: [mode]}]\n"

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        size, mode = params["size"], params["mode"]
        if mode == "exact":
            return ok(1.0)
        outcome = ok(1.0) if size == 1 else failed("oom", memory="gpu")
        return outcome | run_images.left(f"run-{size}", f"size {size}", "memory.png", "trace.json")

    run_images.folder.submit(load(tmp_path, TOY + text + plots), outcome)
    page, images = tmp_path / "results" / "toy.md", tmp_path / "results" / "toy"
    code, out, err = cli(run_images.folder.path, "--plot", images)
    page.write_text(out)
    assert code == 0
    shown = {title: (page.parent / path).read_bytes() for title, path in links(out).items()}
    assert list(shown) == ["Time, fast, exact", "memory (size 1)", "memory (size 2)"]
    assert shown["memory (size 1)"] == PNG + b"size 1"
    assert shown["memory (size 2)"] == PNG + b"size 2"  # artifacts of failed runs are shown too
    assert sorted(path.name for path in images.iterdir()) == [
        "line.png", "memory-1.png", "memory-2.png",
    ]  # fmt: skip
    assert out.index("### toy") < out.index("![")
    assert "memory-2.png" in err


def test_images_of_one_name_do_not_replace_each_other(
    tmp_path: Path, run_images: RunImages
) -> None:
    text = "fixed: {size: 1}\ngrid: {label: ['a/b', 'a:b']}\nrepeats: 2\n"  # shows the first one
    plots = "plots: [{name: line, x: label}]\n"

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        name = f"{params['label'][1:2] == '/'}-{repeat}"
        return ok(1.0) | run_images.left(name, name, "line.png")

    run_images.folder.submit(load(tmp_path, TOY + text + plots), outcome)
    _, out, _ = cli(run_images.folder.path, "--plot", tmp_path / "p")
    pictures = {title: (tmp_path / path).read_bytes() for title, path in links(out).items()}
    assert pictures.pop("line").startswith(b"\x89PNG\r\n")
    assert {title: content.removeprefix(PNG) for title, content in pictures.items()} == {
        "line (label a/b)": b"True-0",
        "line (label a:b)": b"False-0",
    }


def test_only_markdown_links(tmp_path: Path, run_images: RunImages) -> None:
    text = "fixed: {size: 1}\nplots: [{name: line, x: size}]\n"
    run_images.folder.submit(load(tmp_path, TOY + text), lambda params, repeat: ok(1.0))
    for form in ("csv", "html", "latex"):
        code, out, _ = cli(run_images.folder.path, "--plot", tmp_path / "p", "--format", form)
        assert (code, links(out)) == (0, {})
    assert "![" not in cli(run_images.folder.path)[1]


def test_a_folder_without_images_says_so(tmp_path: Path, run_images: RunImages) -> None:
    gone = {"artifacts": "artifacts/gone"}  # as after copying only the records
    run_images.folder.submit(load(tmp_path, TOY + "fixed: {size: 1}\n"), lambda *_: ok(1.0) | gone)
    code, out, err = cli(run_images.folder.path, "--plot", tmp_path / "p")
    assert (code, links(out)) == (0, {})
    assert "has no plots, and no run produced images" in err
    assert not (tmp_path / "p").exists()
