"""Interactive figures of plots and timelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.report.plots import draw_plot
from jobs.writeup.document import ShownPlot
from jobs.writeup.figures import drawn_figure, plot_figure
from jobs.writeup.studies import Study, read_studies
from systems.plot_data import Interval, Spans, Stack
from tests.jobs.results_folder import H200, TOY, ResultsFolder, failed, load, ok

PLOTS = """\
grid: {size: [1, 2, 4, 8], mode: [fast, exact], causal: [true, false]}
tables:
  - {name: t, columns: [mode], baseline: {mode: exact}}
plots:
  - {name: p, x: size, series: [mode], facet: [causal], phase: forward}
  - {name: bars, x: mode, series: [size], where: causal == true, phase: forward}
  - {name: frontier, x: size, against: fact.memory_bytes, series: [mode, causal], phase: forward}
"""


@pytest.fixture
def study(tmp_path: Path, folder: ResultsFolder) -> Study:
    def outcome(params: dict, _: int) -> dict:
        if params["size"] == 8:
            return failed("timeout")
        time = params["size"] ** 3 * (1.0 if params["mode"] == "fast" else 2.0)
        return ok(time, facts={"memory_bytes": 10 / params["size"]})

    folder.submit(load(tmp_path, TOY + PLOTS), outcome, H200)
    return read_studies([folder.path])[0]["toy"]


def test_lines_panels_and_ratios(study: Study) -> None:
    figure = plot_figure(ShownPlot(study, study.plots["p"]))
    assert figure is not None
    assert len(figure["data"]) == 4  # two series in two panels
    fast = next(trace for trace in figure["data"] if trace["name"] == "fast")
    assert (fast["x"], fast["y"]) == ([1, 2, 4], [1.0, 8.0, 64.0])
    assert sum(trace["showlegend"] for trace in figure["data"]) == 2
    assert {note["text"] for note in figure["layout"]["annotations"]} == {
        "causal true", "causal false"
    }  # fmt: skip
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
    assert figure["ratios"]["to"] == "exact"
    assert figure["ratios"]["y"][figure["data"].index(fast)] == [0.5, 0.5, 0.5]
    json.dumps(figure, allow_nan=False)


def test_bars_of_names_and_points_against_another_metric(study: Study, tmp_path: Path) -> None:
    bars = plot_figure(ShownPlot(study, study.plots["bars"]))
    assert bars is not None and bars["layout"]["barmode"] == "group"
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in bars["data"]} == {
        "size 1": (["fast", "exact"], [1.0, 2.0]),
        "size 2": (["fast", "exact"], [8.0, 16.0]),
        "size 4": (["fast", "exact"], [64.0, 128.0]),
    }
    plot = ShownPlot(study, study.plots["frontier"])
    frontier = plot_figure(plot)
    assert frontier is not None and "ratios" not in frontier
    assert {trace["name"]: (trace["x"], trace["text"]) for trace in frontier["data"]} == {
        f"{mode}, {causal}": ([2.5, 5.0, 10.0], ["4", "2", "1"])
        for mode in ("fast", "exact")
        for causal in ("causal", "no causal")
    }
    assert draw_plot(plot.shown, tmp_path) == tmp_path / "frontier.png"


def test_a_plot_without_values_has_no_figure(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, TOY + PLOTS), lambda *_: failed("error"), H200)
    study = read_studies([folder.path])[0]["toy"]
    assert plot_figure(ShownPlot(study, study.plots["p"])) is None


def test_timelines() -> None:
    stack = Stack(
        title="t", x_title="x", y_title="y", x=[0, 1, 2],
        layers={"weights": [1, 1, 1], "<b>": [0, 2, 0]},
        phases=[Interval(name="forward", start=0, end=2)],
    )  # fmt: skip
    figure = drawn_figure(stack)
    assert [trace["name"] for trace in figure["data"]] == ["weights", "&lt;b&gt;"]
    assert len({trace["stackgroup"] for trace in figure["data"]}) == 1
    spans = Spans(title="t", x_title="ms", rows={"rank 0": {"a": [(1.0, 3.0)]}, "rank 1": {}})
    (bars,) = drawn_figure(spans)["data"]
    assert (bars["base"], bars["x"], bars["y"]) == ([1.0], [2.0], ["rank 0"])
