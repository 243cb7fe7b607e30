"""The figures of the report: plots and timelines."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jobs.errors import TableError
from jobs.report.figures import Drawing, Figure
from jobs.report.run_pictures import pictures_of
from jobs.sweep.views import Plot
from jobs.writeup.studies import Study, read_studies
from systems.plot_data import SUFFIX, Interval, Spans, Stack, write_figure
from tests.jobs.results_folder import H200, TOY, ResultsFolder, failed, ok, plot_of

PLOTS = """\
grid: {size: [1, 2, 4, 8], mode: [fast, exact], causal: [true, false]}
plots:
  - {name: p, x: size, series: [mode], facet: [causal], phase: forward}
  - {name: bars, x: mode, series: [size], where: causal == true, phase: forward}
  - {name: frontier, x: size, against: fact.memory_bytes, series: [mode, causal], phase: forward}
"""


PNG = b"\x89PNG"
ROWS = {"rank 0": {"a$": [(1.0, 3.0)]}, "rank $1$": {}, 99 * "long ": {}}


@pytest.fixture
def study(folder: ResultsFolder) -> Study:
    def outcome(params: dict, _: int) -> dict:
        if params["size"] == 8:
            return failed("timeout")
        time = params["size"] ** 3 * (1.0 if params["mode"] == "fast" else 2.0)
        return ok(time, facts={"memory_bytes": 10 / params["size"]})

    folder.submit(TOY + PLOTS, outcome, H200)
    return read_studies([folder.path])[0][H200]["toy"]


def draw(study: Study, plot: Plot) -> Drawing | None:
    return Figure.of_plot(study.observation, plot, study.results).draw(set())


def texts(image: Drawing | None) -> list[str]:
    """Return the texts of a figure, which must be valid SVG."""
    assert image is not None and image.name.endswith(".svg")
    found = ElementTree.fromstring(image.content).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in found]


def test_lines_bars_and_points_against_another_metric(study: Study) -> None:
    lines = draw(study, study.plots["p"])
    assert {"causal true", "causal false", "size", "fast", "exact", "4"} <= set(texts(lines))
    assert texts(lines).count("fast") == 1 and "8" not in texts(lines)  # no run of size 8 succeeded
    assert draw(study, study.plots["p"]) == lines  # the same bytes
    assert {"fast", "exact", "size 1", "size 4"} <= set(texts(draw(study, study.plots["bars"])))
    frontier = texts(draw(study, study.plots["frontier"]))
    assert frontier.count("4") >= 4  # the points of four lines are labelled
    assert {"fast, causal", "exact, no causal"} <= set(frontier)


@pytest.mark.parametrize(
    "view",
    [
        {"x": "size", "facet": ["label", "causal"]},
        {"x": "label", "series": ["causal"]},
        {"x": "size", "series": ["label"]},
    ],
)
def test_long_names_are_not_cut_and_cover_nothing(
    folder: ResultsFolder, view: dict[str, Any]
) -> None:
    """They are above the panels, below bars, and in the legend."""
    labels = [f"my_kernels/attention.py:Attention_no_{i}" for i in (1, 2)]
    grid = f"grid: {{size: [1, 2], label: {labels}, causal: [true, false]}}\n"
    folder.submit(TOY + grid, ok(1.0))
    figure = plot_of(folder, **view)
    figure.draw_without_rendering()
    boxes = [each.get_tightbbox() for each in (*figure.axes, *figure.legends)]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in box.corners())


def test_a_plot_without_values_has_no_figure(folder: ResultsFolder) -> None:
    folder.submit(TOY + PLOTS, failed("error"), H200)
    study = read_studies([folder.path])[0][""]["toy"]
    assert draw(study, study.plots["p"]) is None
    wrong = study.plots["p"].model_copy(update={"where": "no_such == 1"})
    with pytest.raises(TableError, match="no_such"):
        draw(study, wrong)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            Stack(
                title="t", x_title="x & $x$", y_title="y", x=[0, 1, 2],
                layers={"weights": [1, 1, 1], "<b>$": [0, 2, 0]},
                phases=[Interval(name="forward", start=0, end=2)],
            ),
            {"weights", "<b>$", "x & $x$", "forward"},
        ),
        (Spans(title="t", x_title="ms", rows=ROWS), {"rank 0", "rank $1$", "a$", "ms"}),
        (Spans(title="t", x_title="ms", rows={}), {"ms"}),
        (Stack(title="t", x_title="x", y_title="y", x=[], layers={}, phases=[]), {"x", "y"}),
    ],
)  # fmt: skip
def test_timelines(tmp_path: Path, data: Stack | Spans, named: set[str]) -> None:
    timeline = Figure("t", "size 1/../2 " * 99, data)
    taken: set[str] = set()
    image, again = timeline.draw(taken), timeline.draw(taken)
    assert named <= set(texts(image))
    assert image is not None and again is not None and taken == {image.name, again.name}
    assert len(taken) == 2 and all((tmp_path / name).parent == tmp_path for name in taken)
    picture = timeline.draw(taken, "png")
    assert picture is not None and picture.content.startswith(PNG)


def test_pictures_of_a_run(study: Study) -> None:
    folder = study.observation.folder
    artifacts = folder / "artifacts"
    artifacts.mkdir()
    right = Stack(title="t", x_title="x", y_title="y", x=[0], layers={"a": [1]}, phases=[])
    damaged = [
        '{"kind": "stack"}',
        right.model_copy(update={"layers": {"a": []}}).model_dump_json(),
        right.model_copy(update={"layers": {"a": [1e308]}}).model_dump_json(),
    ]
    for i, text in enumerate(damaged):
        (artifacts / f"damaged{i}{SUFFIX}").write_text(text)
    (artifacts / "damaged0.png").write_bytes(PNG)
    write_figure(right, artifacts / f"right{SUFFIX}")
    (artifacts / "right.png").write_bytes(PNG)  # drawn from the data
    (artifacts / "text.png").write_text("<svg onload=alert()>")
    (artifacts / "link.png").symlink_to(artifacts / "right.png")
    (artifacts / "folder.png").mkdir()
    os.mkfifo(artifacts / f"pipe{SUFFIX}")
    (artifacts / os.fsdecode(b"\xff.png")).write_bytes(PNG)
    pictures, problems = pictures_of(folder, "artifacts")
    assert pictures == {"damaged0": PNG, "right": right}
    named = {"damaged1", "damaged2", "text", "link", "folder", "pipe", "\\udcff"}
    assert len(problems) == len(named)
    assert all(any(name in problem for problem in problems) for name in named)
    outside, problems = pictures_of(folder, "../x")
    assert not outside and len(problems) == 1
