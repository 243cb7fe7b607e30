"""Images of a report: plots and PNG artifacts of runs, copied and linked in Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import TOY, Outcome, ResultsFolder, failed, ok

PNG = b"\x89PNG of "


def links(markdown: str) -> dict[str, str]:
    """Return the path of each image in a Markdown text, by title."""
    return dict(re.findall(r"!\[(.*)\]\((.*)\)", markdown))


def test_a_page_beside_the_folder_shows_plots_and_the_runs_images(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    text = "grid: {size: [1, 2], mode: [fast, exact], label: ['a/b']}\nrepeats: 2\n"
    # The plot has the name that the image of a run would have.
    plots = "plots: [{name: memory-1, title: 'Time, {mode}', x: size, series: [mode]}]\n"

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        size, mode = params["size"], params["mode"]
        if mode == "exact":
            return ok(1.0)
        outcome = ok(1.0) if size == 1 else failed("oom", memory="gpu")
        content = PNG + f"size {size}, repeat {repeat}".encode()
        files = "memory.png", "trace.json"
        return outcome | folder.artifacts(f"run-{size}-{repeat}", content, *files)

    folder.submit(TOY + text + plots, outcome)
    page, images = tmp_path / "results" / "toy.md", tmp_path / "results" / "toy"
    code, out, err = cli(folder.path, "--plot", images)
    page.write_text(out)
    assert code == 0
    shown = {title: (page.parent / path).read_bytes() for title, path in links(out).items()}
    assert list(shown) == ["Time, fast, exact", "memory (size 1)", "memory (size 2)"]
    assert shown["memory (size 1)"] == PNG + b"size 1, repeat 0"
    assert shown["memory (size 2)"] == PNG + b"size 2, repeat 0"  # although this run failed
    assert sorted(path.name for path in images.iterdir()) == [
        "memory-1-2.png", "memory-1.png", "memory-2.png",
    ]  # fmt: skip
    assert out.index("### toy") < out.index("![")
    assert "memory-2.png" in err


def test_only_markdown_links(tmp_path: Path, folder: ResultsFolder) -> None:
    text = "fixed: {size: 1}\nplots: [{name: line, x: size}]\n"
    folder.submit(TOY + text, ok(1.0))
    for form in ("csv", "latex"):
        code, out, _ = cli(folder.path, "--plot", tmp_path / "p", "--format", form)
        assert (code, links(out)) == (0, {})
    assert "![" not in cli(folder.path)[1]


def test_a_folder_without_images_says_so(tmp_path: Path, folder: ResultsFolder) -> None:
    gone = {"artifacts": "artifacts/gone"}  # as after copying only the records
    folder.submit(TOY + "fixed: {size: 1}\n", ok(1.0) | gone)
    code, out, err = cli(folder.path, "--plot", tmp_path / "p")
    assert (code, links(out)) == (0, {})
    assert "has no plots, and no run produced images" in err
    assert not (tmp_path / "p").exists()


def test_runs_without_a_point_are_told(tmp_path: Path, folder: ResultsFolder) -> None:
    plots = "repeats: 2\nplots: [{name: line, x: size, series: [mode]}]\n"
    sizes = "grid: {size: [1, 2, 3], mode: [fast, exact]}\n"

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        if params["mode"] == "exact" and params["size"] > 1:
            # of size 2 a repeat has a time
            return ok(1.0) if params["size"] == 2 and repeat else failed("timeout")
        return ok(1.0)

    folder.submit(TOY + sizes + plots, outcome)
    err = cli(folder.path, "--plot", tmp_path / "p")[2]
    assert "size=3 mode=exact (timeout)\n" in err and "size=2" not in err
