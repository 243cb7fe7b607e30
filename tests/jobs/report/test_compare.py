"""Comparison of two results folders: verdicts, confidence intervals, exit codes."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.processes import ProcessHandle
from jobs.report.compare import MIN_SAMPLES, bootstrap_ratio, compare, verdict
from jobs.results import unwritable
from jobs.results.manifest import write_handles
from jobs.results.run_states import observe
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, TOY, Outcome, ResultsFolder, failed, load, ok

ROOT = Path(__file__).parents[3]
Fate = Callable[[dict[str, Any], int], Outcome]


def noise(center: float, count: int = 100, sigma: float = 0.01, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return (center * np.exp(sigma * rng.standard_normal(count))).tolist()


class Pair:
    """Two results folders of one sweep."""

    def __init__(self, tmp_path: Path, text: str):
        self.loaded = load(tmp_path, TOY + text)
        self.before = ResultsFolder(tmp_path / "before")
        self.after = ResultsFolder(tmp_path / "after")

    def fill(self, before: Fate, after: Fate, devices: tuple[str, str] = (CPU, CPU)) -> None:
        self.before.submit(self.loaded, before, devices[0])
        self.after.submit(self.loaded, after, devices[1])

    def verdicts(self, tolerance: float = 0.02) -> dict[Any, str]:
        found = compare(observe(self.before.path), observe(self.after.path), tolerance)
        return {(c.run.params["size"], c.phase): c.verdict for c in found}


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "aggregate.py", "compare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.90, 0.95, "faster"),
        (1.03, 1.10, "slower"),
        (0.99, 1.01, "same"),
        (0.98, 1.02, "same"),
        (0.97, 1.01, "unsure"),
        (0.99, 1.03, "unsure"),
        (0.50, 2.00, "unsure"),
        (0.96, 0.985, "unsure"),
        (float("nan"), float("nan"), "unsure"),
    ],
)
def test_verdict_of_an_interval(low: float, high: float, says: str) -> None:
    assert verdict(low, high, 0.02) == says


def test_verdicts_on_samples(tmp_path: Path) -> None:
    after = {
        1: noise(0.8, seed=1),
        2: noise(1.25, seed=2),
        3: noise(1.0, seed=3),
        4: noise(1.03, sigma=0.3, seed=4),
        5: noise(1.001, seed=5),
        6: noise(1.06, seed=6)[: MIN_SAMPLES - 1],
        7: [0.0] * 10,
    }
    pair = Pair(tmp_path, f"grid: {{size: {list(after)}}}\n")
    pair.fill(
        lambda params, repeat: ok(*noise(1.0, seed=99)),
        lambda params, repeat: ok(*after[params["size"]]),
    )
    assert pair.verdicts() == {
        (1, "forward"): "faster",
        (2, "forward"): "slower",
        (3, "forward"): "same",
        (4, "forward"): "unsure",
        (5, "forward"): "same",
        (6, "forward"): "unsure",  # too few samples for an interval
        (7, "forward"): "faster",
    }
    assert pair.verdicts(tolerance=0.5)[2, "forward"] == "same"


def test_what_became_of_runs_that_have_no_number(tmp_path: Path) -> None:
    fine = ok(*noise(1.0))
    fates: list[tuple[Outcome, Outcome, str]] = [
        (fine, failed("oom"), "broken"),
        (fine, None, "broken"),
        (failed("timeout"), fine, "fixed"),
        (None, fine, "fixed"),
        (failed("error"), failed("oom"), "not measured"),
        (failed("error"), None, "not measured"),
        (fine, fine, "same"),
    ]
    pair = Pair(tmp_path, f"grid: {{size: {list(range(1, len(fates) + 1))}}}\n")
    pair.fill(
        lambda params, repeat: fates[params["size"] - 1][0],
        lambda params, repeat: fates[params["size"] - 1][1],
    )
    found = pair.verdicts()
    assert [says for _, says in sorted(found.items())] == [says for *_, says in fates]


def test_new_and_gone_runs_and_phases(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    both = {"forward": noise(1.0), "old": noise(1.0)}
    pair.before.submit(
        pair.loaded,
        lambda params, repeat: {"status": "ok", "measurements": {"samples_ms": both}},
    )
    other = load(tmp_path, TOY + "grid: {size: [2, 3, 4]}\n")
    changed = {"forward": noise(1.0), "young": noise(1.0)}
    pair.after.submit(
        other,
        lambda params, repeat: (
            {"status": "ok", "measurements": {"samples_ms": changed}}
            if params["size"] < 4
            else failed("error")
        ),
    )
    assert pair.verdicts() == {
        (1, ""): "gone",
        (2, "forward"): "same",
        (2, "old"): "gone",
        (2, "young"): "new",
        (3, ""): "new",
        (4, ""): "not measured",
    }


def test_a_run_still_to_come_is_not_broken(tmp_path: Path) -> None:
    """A run whose job is still live is `not measured`, not `broken`."""
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\nruns_per_job: 2\n")
    pair.before.submit(pair.loaded, lambda params, repeat: ok(*noise(1.0)))
    manifest = pair.after.submit(
        pair.loaded, lambda params, repeat: ok(*noise(1.0)) if params["size"] == 1 else None
    )
    manifest.handles[0] = ProcessHandle.of_this_process()  # this process stands for a live job
    write_handles(manifest)
    assert pair.verdicts() == {(1, "forward"): "same", (2, ""): "not measured"}


def test_everything_broken_is_broken_though_no_record_says_on_which_device(
    tmp_path: Path,
) -> None:
    """Runs without any record on one side are compared on the devices of the other side."""
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    pair.fill(lambda params, repeat: ok(*noise(1.0)), lambda params, repeat: None)
    assert pair.verdicts() == {(1, ""): "broken", (2, ""): "broken"}


def test_other_kinds_of_device_are_not_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(
        lambda params, repeat: ok(*noise(1.0)),
        lambda params, repeat: ok(*noise(9.0)),
        (CPU, "cpu: another"),
    )
    found = compare(observe(pair.before.path), observe(pair.after.path), 0.02)
    assert sorted((c.device, c.verdict) for c in found) == [
        ("cpu: Test Processor", "gone"), ("cpu: another", "new"),
    ]  # fmt: skip


def test_a_phase_that_one_repeat_lacks_is_compared_by_the_others(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\nrepeats: 2\n")

    def some(params: dict[str, Any], repeat: int) -> Outcome:
        samples = {"forward": noise(1.0)} | ({"backward": noise(2.0)} if repeat else {})
        return {"status": "ok", "measurements": {"samples_ms": samples}}

    pair.fill(some, some)
    assert pair.verdicts() == {(1, "forward"): "same", (1, "backward"): "same"}


def test_the_slowest_rank_is_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    fast, slow = noise(1.0, seed=1), noise(2.0, seed=2)

    def ranks(*lists: list[float]) -> Fate:
        outcome = {"status": "ok", "measurements": {"samples_ms": {"forward": list(lists)}}}
        return lambda params, repeat: outcome

    pair.fill(ranks(fast, slow), ranks(slow, fast))
    assert pair.verdicts() == {(1, "forward"): "same"}


# ---- the interval --------------------------------------------------------------------------------


def interval(before: list[list[float]], after: list[list[float]]) -> tuple[float, float]:
    arrays = [[np.array(samples) for samples in side] for side in (before, after)]
    return bootstrap_ratio(arrays[0], arrays[1], np.random.default_rng(0))


def test_repeats_that_differ_widen_the_interval() -> None:
    """Differences between repeats widen the interval, even if each repeat has little noise.

    The three repeats have medians of 1.0, 1.1 and 1.2 ms. Pooling their 300 samples would give an
    interval that is too narrow.
    """
    repeats = [noise(center, sigma=0.001, seed=i) for i, center in enumerate((1.0, 1.1, 1.2))]
    low, high = interval(repeats, repeats)
    assert low < 0.92
    assert high > 1.08
    pooled = [[sample for samples in repeats for sample in samples]]
    narrow_low, narrow_high = interval(pooled, pooled)
    assert high - low > 1.5 * (narrow_high - narrow_low)


def test_repeats_of_different_length() -> None:
    """A resample has only measured values, also if repeats have different numbers of samples."""
    before = [[1.0] * 50, [1.0] * 3]
    after = [[2.0] * 7, [2.0] * 90, [2.0]]
    assert interval(before, after) == (2.0, 2.0)
    low, high = interval([[1.0] * 5], [[2.0] * 4, [4.0] * 40])
    assert (low, high) == (2.0, 4.0)


def test_coverage_of_the_interval() -> None:
    """The true ratio is in about 95% of the 95% intervals."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        before, after = (np.exp(0.05 * rng.standard_normal(40)) for _ in range(2))
        low, high = bootstrap_ratio([before], [after], rng)
        hits += low <= 1.0 <= high
    assert hits >= 180


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=9), min_size=1, max_size=4),
    st.floats(0.1, 10.0),
)
def test_interval_scales_with_the_samples(repeats: list[list[float]], factor: float) -> None:
    """The interval scales with the samples, is ordered, and is within the range of their ratios."""
    slower = [[factor * sample for sample in samples] for samples in repeats]
    low, high = interval(repeats, repeats)
    scaled_low, scaled_high = interval(repeats, slower)
    assert low <= high
    assert scaled_low == pytest.approx(factor * low)
    assert scaled_high == pytest.approx(factor * high)
    everything = [sample for samples in repeats for sample in samples]
    assert low >= min(everything) / max(everything) - 1e-12
    assert high <= max(everything) / min(everything) + 1e-12


def test_many_runs_with_repeats_are_compared_in_seconds(tmp_path: Path) -> None:
    pair = Pair(tmp_path, f"grid: {{size: {list(range(1, 21))}}}\nrepeats: 3\n")
    pair.fill(lambda params, repeat: ok(*noise(1.0)), lambda params, repeat: ok(*noise(1.0)))
    start = time.process_time()
    assert set(pair.verdicts().values()) == {"same"}
    assert time.process_time() - start < 8  # seconds of CPU time; about 1 on an idle machine


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        (ok(*noise(1.0, seed=5)), 0, "2 same"),
        (ok(*noise(0.5)), 0, "faster"),
        (ok(*noise(1.5)), 1, "slower"),
        (failed("oom"), 1, "broken"),
    ],
)
def test_exit_code_says_regression(tmp_path: Path, changed: Outcome, code: int, words: str) -> None:
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    pair.fill(
        lambda params, repeat: ok(*noise(1.0)),
        lambda params, repeat: changed if params["size"] == 2 else ok(*noise(1.0)),
    )
    done = call("aggregate", "compare", pair.before.path, pair.after.path)
    assert (done.returncode, done.stderr) == (code, "")
    assert words in done.stdout
    if words in ("faster", "slower"):
        (row,) = [line for line in done.stdout.splitlines() if f"| {words} " in line]
        ratio = {"faster": "0.5", "slower": "1.5"}[words]
        assert f"| {ratio}00 " in row


def test_notes_on_both_folders_are_printed(tmp_path: Path) -> None:
    """Also notes that are no damaged files, such as a worker that could not write its results."""
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(lambda *_: ok(*noise(1.0)), lambda *_: ok(*noise(1.0)))
    for folder in (pair.before, pair.after):
        (submission,) = (folder.path / "submissions").iterdir()
        unwritable.mark(submission, 0, OSError(errno.ENOSPC, ""))
    done = script(pair.before.path, pair.after.path)
    assert done.returncode == 0
    for folder in (pair.before, pair.after):
        assert f"note: {folder.path}: cannot write results to {folder.path}: No sp" in done.stderr


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(
        lambda params, repeat: ok(*noise(1.0)),
        lambda params, repeat: ok(*noise(1.0)),
        (CPU, "cpu: another"),
    )
    done = script(pair.before.path, pair.after.path)
    assert done.returncode == 2
    assert "no measured run in common" in done.stderr
    nowhere = call("aggregate", "compare", pair.before.path, tmp_path / "nowhere")
    assert nowhere.returncode == 2
    assert "holds no submission" in nowhere.stderr
