"""Tables of runs in blocks: intervals, paired speedups, and the notes on them."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from scipy import stats

from jobs.frame.results import list_results
from jobs.report.tables.report_table import make_report_table
from jobs.report.tables.table import ReportTable
from jobs.results.run_states import observe
from jobs.sweep.views import Table
from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import (
    GRID,
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    by_mode,
    failed,
    load,
    ok,
    plot_of,
    report_table,
    rows_of,
    table,
)

BLOCKS = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 5}\n"
ONE_SIZE = "grid: {size: [1], mode: [fast, exact]}\n"
VIEW: dict[str, Any] = {"rows": ["size"], "columns": ["mode"], "baseline": {"mode": "fast"}}
# Times of the baseline, first and second process of each round, and of the candidate.
FAST = [2.00, 2.02, 2.04, 2.00, 1.98, 2.00, 2.10, 2.08, 2.01, 2.02]
EXACT = [1.00, 1.02, 1.01, 1.05, 1.00]
ROUNDS = [(FAST[2 * i], FAST[2 * i + 1], EXACT[i]) for i in range(5)]


def times(params: dict[str, Any], repeat: int) -> float:
    return (FAST if params["mode"] == "fast" else EXACT)[repeat]


def measured(params: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return three samples, whose median is that of the process."""
    ms = times(params, repeat)
    return ok(0.9 * ms, ms, 3 * ms)


def note(made: ReportTable) -> str:
    return ". ".join(made.notes)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of the mean by scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return float(low), float(high)


def expected_speedup(rounds: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the speedup and its interval by scipy."""
    logs = [math.log(math.sqrt(first * second) / exact) for first, second, exact in rounds]
    low, high = interval(logs)
    return math.exp(np.mean(logs)), math.exp(low), math.exp(high)


def test_cells_have_the_interval_over_processes_and_speedups_that_of_the_rounds(
    folder: ResultsFolder,
) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    (row,) = table(folder, **VIEW)
    fast, exact = interval(FAST), interval(EXACT)
    ratio, low, high = expected_speedup(ROUNDS)
    assert row == {
        "size": "1",
        # The median over processes of the medians of their samples: the mean is 2.025.
        "fast": f"2.015 ±{(fast[1] - fast[0]) / sum(fast):.1%}",
        "exact": f"1.010 ±{(exact[1] - exact[0]) / sum(exact):.1%}",
        "exact vs fast": f"{ratio:.2f}x [{low:.2f}, {high:.2f}]",
    }


def test_the_interval_of_few_noisy_processes_is_not_cut_at_0(folder: ResultsFolder) -> None:
    few = {"fast": [1.0, 9.0, 1.0, 9.0], "exact": [1.0, 9.0]}
    two_rounds = BLOCKS.replace("5", "2")
    folder.submit_rounds(TOY + ONE_SIZE + two_rounds, lambda p, n: ok(few[p["mode"]][n]))
    assert table(folder, **VIEW)[0]["exact"] == "5.000 ±1016%"


def test_means_over_processes_add_up(folder: ResultsFolder) -> None:
    """The mean of the processes' means, so that the columns of a sum agree with it."""
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    rows = {
        name: table(folder, **VIEW, statistic=name)[0]["exact"]
        for name in ("mean", "min", "max", "mean_std")
    }
    of_process = (0.9 + 1 + 3) / 3
    assert rows["mean"].startswith(f"{of_process * np.mean(EXACT):.3f} ±")
    assert rows["mean"].endswith("%")
    assert rows["min"] == f"{0.9 * min(EXACT):.4f}"
    assert rows["max"] == f"{3 * max(EXACT):.3f}"
    deviation = of_process * np.std(EXACT, ddof=1)
    assert rows["mean_std"] == f"{of_process * np.mean(EXACT):.3f} ± {deviation:.5f}"


def test_a_speedup_of_extremes_is_the_ratio_of_the_cells(folder: ResultsFolder) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    made = report_table(folder, **VIEW, statistic="min")
    assert rows_of(made)[0]["exact vs fast"] == f"{min(FAST) / min(EXACT):.2f}x"
    assert "not paired" not in note(made)


def test_a_rate_has_the_inverse_speedup_of_its_time(folder: ResultsFolder) -> None:
    folder.submit_rounds(
        TOY + ONE_SIZE + BLOCKS,
        lambda params, repeat: ok(times(params, repeat), flops={"forward": 4e9}),
    )
    (of_time,), (of_rate,) = (table(folder, **VIEW, value=value) for value in ("time", "tflops"))
    assert of_time["exact vs fast"] == of_rate["exact vs fast"]
    assert of_time["exact vs fast"].startswith("1.99x [")


def test_times_of_several_allocations_vary_with_hosts_but_not_their_ratio(
    folder: ResultsFolder,
) -> None:
    factors = {"a": 1.0, "b": 1.3, "c": 1.1}
    for boot, factor in factors.items():
        folder.submit_rounds(
            TOY + ONE_SIZE + BLOCKS, lambda p, repeat, f=factor: ok(f * times(p, repeat)), boot
        )
    made = report_table(folder, **VIEW)
    (row,) = rows_of(made)
    low, high = interval([factor * float(np.mean(EXACT)) for factor in factors.values()])
    assert row["exact"].endswith(f" ±{(high - low) / (low + high):.0%}")
    assert row["exact vs fast"].startswith("1.99x [1.98, 2.00]")  # as in one allocation
    assert "45 processes on 1 GPU in 15 rounds" in note(made)


def test_notes_tell_what_a_table_rests_on(folder: ResultsFolder) -> None:
    slow = {"forward": {"throttle": {"sw_power_cap": 0.4}, "power_w": [600, 690, 700]}}
    hot = {"forward": {"throttle": {"hw_thermal_slowdown": 1.0}}, "backward": {"throttle": {}}}
    calm = {"forward": {"throttle": {}}, "backward": {"throttle": {"sw_power_cap": 1.0}}}
    conditions = [slow, hot, calm, {}, slow]
    git = {"environment": {"git": {"commit": "4bb999b0123", "dirty": False}}}
    for number in range(5):
        folder.submit_rounds(
            TOY + GRID + BLOCKS,
            lambda params, repeat: measured(params, repeat) | git,
            rounds=[number],
            conditions=conditions[number],
        )
    made = report_table(folder, **VIEW)
    assert made.notes == [
        f"{H200}; median over processes of the median of each; ±: half of the 95% interval of the "
        "mean over processes",
        # 6 processes a round. Power: rounds 0 and 4. Heat: round 1. Round 3 has no conditions.
        "30 processes on 1 GPU in 5 rounds; commit 4bb999b; 12 of 24 power-capped; "
        "6 of 24 throttled by heat or hardware",
        "an interval without a word: faster or slower, significant at 0.5%, see docs/verdicts.md",
    ]


def test_a_speedup_with_an_interval_wider_than_itself_is_noise(folder: ResultsFolder) -> None:
    noisy = {"fast": [1.0] * 10, "exact": [0.1, 1.0, 0.1, 1.0, 0.1]}
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, lambda p, repeat: ok(noisy[p["mode"]][repeat]))
    assert table(folder, **VIEW)[0]["exact vs fast"] == "4.0x (noise)"


def test_a_note_explains_the_words_in_the_table_and_no_others(folder: ResultsFolder) -> None:
    """Size 1 is the same, size 2 faster, size 3 unsure, and size 4 by how much differs by host."""
    unsure, by_host = [1.0, 1.1, 1.0, 1.1, 0.9], [0.98] * 3 + [0.9] * 2

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        in_round = repeat // 2 if params["mode"] == "fast" else repeat  # the baseline runs twice
        host = {"environment": {"boot_id": "a" if in_round < 3 else "b"}}
        if params["mode"] == "fast":
            return ok(1.0) | host
        return ok([1.0, 0.5, unsure[in_round], by_host[in_round]][params["size"] - 1]) | host

    folder.submit_rounds(
        TOY + "grid: {size: [1, 2, 3, 4], mode: [fast, exact]}\n" + BLOCKS, outcome
    )
    for sizes, words in (
        ([1, 2], {"same", "without"}),
        ([2], {"without"}),
        ([3], {"unsure"}),
        ([4], {"on each"}),
    ):
        last = report_table(folder, **VIEW, where=f"size in {sizes}").notes[-1]
        assert {each for each in ("same", "unsure", "without", "on each") if each in last} == words
    assert table(folder, **VIEW)[0]["exact vs fast"] == "1.000x [1.000, 1.000] same"


def test_speedups_of_runs_outside_of_blocks_are_told_as_not_paired(folder: ResultsFolder) -> None:
    fast, exact = (ok(1.0) | {"environment": {"boot_id": boot}} for boot in "ab")
    folder.submit(TOY + ONE_SIZE, by_mode(fast, exact))
    made = report_table(folder, **VIEW)
    assert made.columns["exact vs fast"] == ["1.00x"]
    last = "speedups are not paired: the runs were not measured in the same blocks"
    assert made.notes[-1] == last


def test_a_table_may_have_paired_and_other_speedups(folder: ResultsFolder) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    folder.submit(
        TOY + "grid: {size: [2], mode: [fast, exact]}\n",
        ok(1.0, 1.0) | {"environment": {"boot_id": "b"}},
        H200,
    )
    made = report_table(folder, **VIEW)
    assert made.columns["exact vs fast"][1] == "1.00x"
    assert made.columns["exact"][1] == "1.000"
    assert (
        "speedups without an interval are not paired: the runs were not measured in the same blocks"
        in made.notes
    )
    assert "not in blocks: median of 2 samples" in note(made)
    assert "17 processes on 1 GPU (15 in 5 rounds)" in note(made)


def test_a_value_that_is_no_time_has_no_interval_if_all_processes_agree(
    folder: ResultsFolder,
) -> None:
    folder.submit_rounds(
        TOY + ONE_SIZE + BLOCKS,
        lambda params, repeat: ok(
            1.0,
            peak_memory_bytes={"forward": 2**30},
            facts={"error": 0.5, "share": 0.5 + 0.01 * repeat, "exposed_ms": repeat - 1.0},
        ),
    )
    (row,) = table(folder, **VIEW, value="peak_memory")
    assert row == {"size": "1", "fast": "1.000", "exact": "1.000", "exact vs fast": "1.00x"}
    values = ["fact.error", "fact.share", "fact.exposed_ms"]
    (row,) = table(folder, rows=["size"], where="mode == exact", value=values)
    assert row["error"] == "0.5000"
    assert row["share"].startswith("0.5200 ±")
    assert row["exposed (ms)"] == "1.000 ±196%"  # mean 1, standard deviation 1.58


def test_a_speedup_of_one_round_has_no_interval(folder: ResultsFolder) -> None:
    one_round = BLOCKS.replace("5", "1")
    folder.submit_rounds(TOY + ONE_SIZE + one_round, measured)
    made = report_table(folder, **VIEW)
    assert made.columns["exact vs fast"] == ["2.01x"]
    assert made.columns["exact"] == ["1.000"]
    assert made.notes[-1] == "paired speedups without an interval are from a single round"


def test_a_failed_round_is_left_out_of_the_speedup_and_told_in_the_cell(
    folder: ResultsFolder,
) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        if params["mode"] == "exact" and repeat == 3:
            return failed("timeout")
        return measured(params, repeat)

    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, outcome)
    (row,) = table(folder, **VIEW)
    ratio, low, high = expected_speedup(ROUNDS[:3] + ROUNDS[4:])
    assert row["exact"].endswith("(4 of 5 repeats; timeout)")
    assert row["exact vs fast"] == f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"


def test_an_undecided_block_lacks_only_the_fewest_rounds(folder: ResultsFolder) -> None:
    """Its later rounds are executed only until it is decided."""
    auto = TOY + ONE_SIZE + BLOCKS.replace("rounds: 5", "rounds: auto, max_rounds: 5")
    for number, missing in enumerate(
        [" (1 of 3 repeats; missing)", " (2 of 3 repeats; missing)", ""]
    ):
        folder.submit_rounds(auto, measured, rounds=[number])
        (row,) = table(folder, **VIEW)
        assert re.sub(r" ±[0-9.]+%", "", row["exact"])[5:] == missing


def test_the_baseline_of_a_table_need_not_be_that_of_the_block(folder: ResultsFolder) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    (row,) = table(folder, **{**VIEW, "baseline": {"mode": "exact"}})
    ratio, low, high = (1 / value for value in expected_speedup(ROUNDS))
    assert row["fast vs exact"] == f"{ratio:.3f}x [{high:.3f}, {low:.3f}]"


def test_rounds_with_another_baseline_count_too(tmp_path: Path, folder: ResultsFolder) -> None:
    """The baseline of the table has two processes in the rounds of one block, one in the other."""
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, by_mode(ok(2.0), failed("timeout")))
    other = load(tmp_path, TOY + ONE_SIZE + BLOCKS, "blocks.baseline.mode=exact")
    folder.submit_rounds(other, by_mode(ok(2.0), ok(1.0)), boot="b")
    (row,) = table(folder, **VIEW)
    assert row["exact vs fast"] == "2.000x [2.000, 2.000]"


def test_csv_has_the_ends_of_intervals_in_columns(folder: ResultsFolder) -> None:
    view = "tables: [{name: t, rows: [size], columns: [mode], baseline: {mode: fast}}]\n"
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS + view, measured)
    code, out, _ = cli(folder.path, "--format", "csv")
    assert code == 0
    (row,) = pd.read_csv(io.StringIO(out), comment="#").to_dict("records")
    ratio, low, high = expected_speedup(ROUNDS)
    assert row == {
        "size": 1,
        "fast": 2.015,
        "fast low": pytest.approx(interval(FAST)[0], rel=1e-3),
        "fast high": pytest.approx(interval(FAST)[1], rel=1e-3),
        "exact": 1.01,
        "exact low": pytest.approx(interval(EXACT)[0], rel=1e-3),
        "exact high": pytest.approx(interval(EXACT)[1], rel=1e-3),
        "exact vs fast": pytest.approx(ratio, rel=1e-5),
        "exact vs fast low": pytest.approx(low, rel=1e-5),
        "exact vs fast high": pytest.approx(high, rel=1e-5),
        "exact vs fast paired": "yes",
        "exact vs fast verdict": "faster",
    }


@pytest.mark.parametrize("value", ["time", "tflops"])
@pytest.mark.parametrize(("baseline", "verdict"), [("fast", "faster"), ("exact", "slower")])
def test_csv_has_the_verdict_on_the_column(
    folder: ResultsFolder, value: str, baseline: str, verdict: str
) -> None:
    folder.submit_rounds(
        TOY + ONE_SIZE + BLOCKS, lambda p, n: ok(times(p, n), flops={"forward": 4e9})
    )
    seen = observe(folder.path)
    view = Table(name="t", **VIEW | {"baseline": {"mode": baseline}, "value": value})
    made = make_report_table(seen, view, list_results(seen), for_programs=True)
    assert made is not None
    ((cell,),) = (cells for name, cells in made.columns.items() if name.endswith("verdict"))
    assert cell == verdict


def test_a_comparison_is_printed_as_latex(folder: ResultsFolder) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    code, out, _ = cli("compare", folder.path, "--format", "latex")
    assert code == 0 and out.startswith("% before: the baseline of the block (mode=fast)")
    assert out.splitlines()[-3].split("&")[0].strip() == "exact"
    assert out.splitlines()[-3].rstrip("\\ ").endswith("faster")


def test_plots_show_the_interval_of_each_point(folder: ResultsFolder) -> None:
    folder.submit_rounds(TOY + ONE_SIZE + BLOCKS, measured)
    (axes,) = plot_of(folder, x="size", series=["mode"]).axes
    lines = [lines for lines in axes.collections if isinstance(lines, LineCollection)]
    ends = [segment[:, 1] for each in lines for segment in each.get_segments()]
    np.testing.assert_allclose(ends, [interval(FAST), interval(EXACT)])


def test_intervals_are_inside_the_axis(folder: ResultsFolder) -> None:
    """Also one that is much higher than the point."""
    skewed = [1.0, 1.0, 1.0, 1.5, 1.5]
    folder.submit_rounds(
        TOY + ONE_SIZE + BLOCKS, lambda p, n: ok(1.0 if p["mode"] == "fast" else skewed[n])
    )
    for x, series in (("size", ["mode"]), ("mode", [])):  # lines and bars
        (axes,) = plot_of(folder, x=x, series=series).axes
        assert axes.get_ylim()[1] > interval(skewed)[1] > 1.05 * max(np.median(skewed), 1.0)
