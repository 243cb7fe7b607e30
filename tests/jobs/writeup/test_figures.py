"""The figures of the report: plots and timelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jobs.report.run_pictures import pictures_in
from jobs.writeup.drawings import Drawing
from jobs.writeup.figures import Image, ShownPlot, draw
from jobs.writeup.studies import Study, read_studies
from systems.plot_data import SUFFIX, Interval, Spans, Stack, write_figure
from tests.jobs.results_folder import H200, TOY, ResultsFolder, failed, load, ok

PLOTS = """\
grid: {size: [1, 2, 4, 8], mode: [fast, exact], causal: [true, false]}
plots:
  - {name: p, x: size, series: [mode], facet: [causal], phase: forward}
  - {name: bars, x: mode, series: [size], where: causal == true, phase: forward}
  - {name: frontier, x: size, against: fact.memory_bytes, series: [mode, causal], phase: forward}
"""


ROWS = {"rank 0": {"a$": [(1.0, 3.0)]}, "rank $1$": {}, 99 * "long ": {}}


@pytest.fixture
def study(tmp_path: Path, folder: ResultsFolder) -> Study:
    def outcome(params: dict, _: int) -> dict:
        if params["size"] == 8:
            return failed("timeout")
        time = params["size"] ** 3 * (1.0 if params["mode"] == "fast" else 2.0)
        return ok(time, facts={"memory_bytes": 10 / params["size"]})

    folder.submit(load(tmp_path, TOY + PLOTS), outcome, H200)
    return read_studies([folder.path])[0]["toy"]


def texts(image: Image | None) -> list[str]:
    """Return the texts of a figure, which must be valid SVG."""
    assert image is not None and image.media_type == "image/svg+xml"
    found = ElementTree.fromstring(image.content).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in found]


def test_lines_bars_and_points_against_another_metric(study: Study) -> None:
    lines = draw(ShownPlot(study, study.plots["p"]))
    assert {"causal true", "causal false", "size", "fast", "exact", "4"} <= set(texts(lines))
    assert texts(lines).count("fast") == 1 and "8" not in texts(lines)  # no run of size 8 succeeded
    assert draw(ShownPlot(study, study.plots["p"])) == lines  # the same bytes
    assert {"fast", "exact", "size 1", "size 4"} <= set(
        texts(draw(ShownPlot(study, study.plots["bars"])))
    )
    frontier = texts(draw(ShownPlot(study, study.plots["frontier"])))
    assert frontier.count("4") >= 4  # the points of four lines are labelled
    assert {"fast, causal", "exact, no causal"} <= set(frontier)


def test_a_plot_without_values_has_no_figure(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, TOY + PLOTS), lambda *_: failed("error"), H200)
    study = read_studies([folder.path])[0]["toy"]
    assert draw(ShownPlot(study, study.plots["p"])) is None
    wrong = study.plots["p"].model_copy(update={"where": "no_such == 1"})
    assert draw(ShownPlot(study, wrong)) is None


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
        (
            Spans(title="t", x_title="ms", rows=ROWS),
            {"rank 0", "rank $1$", "a$", "ms"},
        ),
        (Spans(title="t", x_title="ms", rows={}), {"ms"}),
        (Stack(title="t", x_title="x", y_title="y", x=[], layers={}, phases=[]), {"x", "y"}),
    ],
)  # fmt: skip
def test_timelines(study: Study, tmp_path: Path, data: Stack | Spans, named: set[str]) -> None:
    write_figure(data, tmp_path / f"timeline{SUFFIX}")
    (tmp_path / "timeline.png").write_bytes(b"png")
    (picture,) = pictures_in(tmp_path)
    drawing = Drawing(study, study.observation.records[0], "size 1/../2", picture)
    image = draw(drawing)
    assert named <= set(texts(image))
    assert image is not None and "/" not in image.name
    picture.save(tmp_path / "other.png")
    assert (tmp_path / "other.png").read_bytes().startswith(b"\x89PNG")

    short = Stack(title="t", x_title="x", y_title="y", x=[0], layers={"a": []}, phases=[])
    for damaged in ('{"kind": "stack"}', short.model_dump_json()):
        (tmp_path / f"timeline{SUFFIX}").write_text(damaged)
        kept = draw(replace(drawing, picture=pictures_in(tmp_path)[1]))
        assert kept is not None and (kept.media_type, kept.content) == ("image/png", b"png")
