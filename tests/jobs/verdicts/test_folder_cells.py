"""Comparison of two results folders that were not measured in turn."""

from __future__ import annotations

import cProfile
import errno
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import CommandError
from jobs.processes import ProcessHandle
from jobs.report.compare_text import markdown_comparison
from jobs.results import unwritable
from jobs.results.manifest import write_handles
from tests.jobs.compared_folders import Fate, Pair, only
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, H200, TOY, Outcome, failed, ok

ONE = "grid: {size: [1]}\n"
REPEATED = ONE + "repeats: 3\n"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two results folders of a sweep with one run."""
    return Pair(tmp_path, ONE)


def spread(scale: float, deviation: float, **fields: Any) -> Fate:
    """Times of three repeats with a standard deviation, relative to the middle one."""
    return lambda params, repeat: ok(scale * math.exp((repeat - 1) * deviation)) | fields


@pytest.mark.parametrize(
    ("repeats", "ratio", "deviation", "margin", "verdict", "code"),
    [
        # Without repeats, a floor of 25% decides.
        (1, 2.0, 0.0, 0.01, "slower", 1),
        (1, 1.2, 0.0, 0.01, "unsure", 3),
        (1, 0.5, 0.0, 0.01, "faster", 0),
        (1, 1.0, 0.0, 0.3, "same", 0),
        (1, 0.9, 0.0, 0.3, "unsure", 0),  # it is not slower by more than the margin
        (3, 1.1, 0.005, 0.01, "slower", 1),
        (3, 0.9, 0.005, 0.01, "faster", 0),
        (3, 1.06, 0.005, 0.01, "unsure", 3),  # within the floor
        (3, 1.1, 0.05, 0.01, "unsure", 3),  # within the noise of the repeats
        (2, 2.0, 0.005, 0.01, "slower", 1),  # too few repeats for a p value
    ],
)
def test_a_difference_must_exceed_the_noise_and_the_floor(
    tmp_path: Path,
    repeats: int,
    ratio: float,
    deviation: float,
    margin: float,
    verdict: str,
    code: int,
) -> None:
    pair = Pair(tmp_path, ONE + f"repeats: {repeats}\n")
    pair.fill(spread(1.0, deviation), spread(ratio, deviation))
    found = pair.compared(margin)
    cell = only(found)
    assert (cell.verdict, found.exit_code) == (verdict, code)
    judged = cell.judged
    assert judged is not None
    if deviation <= 0.005:
        floor = 0.07 if repeats == 3 else 0.25
        ends = ratio / (1 + floor), ratio * (1 + floor)
        assert (judged.low, judged.high) == pytest.approx(ends)


def test_an_interval_without_1_that_is_unsure_has_a_reason(tmp_path: Path) -> None:
    pair = Pair(tmp_path, REPEATED)
    pair.fill(spread(1.0, 0.03), spread(1.12, 0.03))
    cell = only(pair.compared())
    judged = cell.judged
    assert judged is not None and judged.low is not None and judged.p is not None
    assert (cell.verdict, judged.low > 1) == ("unsure", True)
    assert cell.detail == f"p {100 * judged.p:.2g}%"


def test_one_process_beside_repeated_ones_is_judged_by_their_noise(tmp_path: Path) -> None:
    """Runs 1 to 3 have repeats before, and run 4 has none."""
    pair = Pair(tmp_path, "grid: {size: [1, 2, 3, 4]}\nrepeats: 3\n")
    noisy = spread(1.0, 0.005)
    pair.fill(
        lambda params, repeat: noisy(params, repeat) if params["size"] < 4 or not repeat else None,
        lambda params, repeat: ok(1.1 if params["size"] == 4 else 1.0) if not repeat else None,
    )
    assert [says for _, says in sorted(pair.verdicts().items())] == ["unsure"] * 3 + ["slower"]


def test_one_slower_cell_among_many_is_not_established(tmp_path: Path) -> None:
    pair = Pair(tmp_path, f"grid: {{size: {list(range(1, 21))}}}\nrepeats: 3\n")
    pair.fill(
        spread(1.0, 0.02),
        lambda params, repeat: spread(1.1 if params["size"] == 1 else 1.0, 0.02)(params, repeat),
    )
    found = pair.compared()
    assert found.exit_code == 3 and [c.verdict for c in found.cells].count("slower") == 1
    assert any(note.startswith("Undecided: 20 cells") for note in found.notes)


def test_allocations_that_differ_within_a_folder_raise_the_floor(tmp_path: Path) -> None:
    """Also two of them: the t test alone would call the candidate slower."""
    pair = Pair(tmp_path, ONE + "repeats: 12\n")

    def times(scale: float) -> Fate:
        return lambda params, repeat: (
            ok(scale * (1 + 0.2 * (repeat % 2))) | {"environment": {"boot_id": str(repeat)}}
        )

    pair.fill(times(1.0), times(1.19))
    cell = only(pair.compared())
    assert cell.judged is not None and cell.judged.floor == pytest.approx(0.2)
    assert (cell.verdict, cell.judged.allocations, cell.judged.rounds) == ("unsure", 12, 24)
    assert cell.judged.p is not None and cell.judged.p < 0.005


@pytest.mark.parametrize(
    ("device", "uuids", "floor"),
    [(H200, "aa", 0.05), (H200, "ab", 0.07), (H200, ("", ""), 0.07), (CPU, ("", ""), 0.25)],
)
def test_the_same_gpus_have_a_smaller_floor_and_cpus_a_larger_one(
    tmp_path: Path, device: str, uuids: tuple[str, str], floor: float
) -> None:
    pair = Pair(tmp_path, REPEATED)
    before, after = (spread(1.0, 0.005, gpus=[{"uuid": uuid} if uuid else {}]) for uuid in uuids)
    pair.fill(before, after, (device, device))
    judged = only(pair.compared()).judged
    assert judged is not None and judged.high == pytest.approx(1 + floor)


def conditions(clock: int, **throttle: float) -> dict[str, Any]:
    return {"forward": {"sm_clock_mhz": [345, clock, 1980], "throttle": throttle}}


def test_what_differs_is_told_above_the_table(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    sides: list[Outcome] = [
        ok(time)
        | {
            "gpus": [{"uuid": f"GPU-{driver}"}],
            "environment": {
                "host": f"vm {driver}",
                "driver": driver,
                "loaded": {"torch": "2.11.0", "triton": triton, "cudnn": cudnn},
                "git": {"commit": "4bb999b00", "dirty": driver == "580"},
            },
            "source_hash": driver,
            "conditions": given,
        }
        for time, driver, triton, cudnn, given in (
            (1.0, "570", "3.6.0", 91900, conditions(1980)),
            (1.32, "580", "3.7.1", 92000, conditions(1500, sw_power_cap=0.4)),
        )
    ]
    pair.fill(sides[0], sides[1], (H200, H200))
    found = pair.compared()
    assert found.heading == [
        "other GPUs",
        "other hosts",
        "driver: 570 before, 580 after",
        "cuDNN: 91900 before, 92000 after",
        "Triton: 3.6.0 before, 3.7.1 after",
        "commit: 4bb999b before, 4bb999b with changes after",
        "source hash: another one in 2 of 2 runs",
        "SM clock: 1980 MHz before, 1500 MHz after",
        "slowed down by sw_power_cap: 0% of processes before, 100% after",
    ]
    pair.after.submit(pair.loaded, sides[0], H200)
    assert not pair.compared().heading


WRONG = failed("wrong") | {"source_hash": "new"}
NEW = ok(1.0) | {"source_hash": "new"}


@pytest.mark.parametrize(
    ("before", "after", "text", "code"),
    [
        ([NEW], [WRONG], "wrong", 1),
        ([NEW], [NEW, WRONG], "wrong", 1),  # a later wrong attempt does not replace the time
        ([NEW], [WRONG, NEW], "wrong", 1),
        ([WRONG], [WRONG], "wrong, before, too", 1),
        ([WRONG, NEW], [NEW], "fixed, before: wrong", 0),
        ([NEW], [WRONG | {"source_hash": "old"}, NEW], "unsure", 3),
    ],
)
def test_a_wrong_attempt_of_the_same_code_outweighs_times(
    pair: Pair, before: list[Outcome], after: list[Outcome], text: str, code: int
) -> None:
    for folder, outcomes in ((pair.before, before), (pair.after, after)):
        for outcome in outcomes:
            folder.submit(pair.loaded, outcome)
    found = pair.compared()
    assert (only(found).text, found.exit_code) == (text, code)
    assert any("Why wrong: python -m jobs logs" in note for note in found.notes) == (text[0] == "w")


def test_what_became_of_runs_without_two_times(tmp_path: Path) -> None:
    fine, oom, error = ok(1.0), failed("oom"), failed("error")
    fates: list[tuple[Outcome, list[Outcome], str]] = [
        (fine, [oom] * 3, "broken, oom"),
        (fine, [None] * 3, "broken, missing"),
        (fine, [oom, oom, fine], "broken, 2 of 3 processes: oom"),
        (fine, [oom, fine, fine], "same, 1 of 3 processes: oom"),
        (failed("timeout"), [fine] * 3, "fixed, timeout"),
        (failed("killed"), [fine] * 3, "fixed, killed"),
        (None, [fine] * 3, "new, missing"),  # nothing was broken
        (failed("cancelled"), [fine] * 3, "new, cancelled"),
        (error, [oom] * 3, "not measured, error"),
        (error, [None] * 3, "not measured, error"),
        (fine, [ok(0.0)] * 3, "not measured, time of 0 ms"),
        (fine, [fine] * 3, "same"),
    ]
    pair = Pair(tmp_path, f"grid: {{size: {list(range(1, len(fates) + 1))}}}\nrepeats: 3\n")
    pair.fill(
        lambda params, repeat: fates[params["size"] - 1][0],
        lambda params, repeat: fates[params["size"] - 1][1][repeat],
    )
    found = pair.compared(margin=0.3)
    assert [cell.text for cell in found.cells] == [text for *_, text in fates]
    assert found.exit_code == 1


def test_new_and_gone_runs_and_phases(tmp_path: Path) -> None:
    old, young = (
        {"status": "ok", "measurements": {"samples_ms": {"forward": [1.0], phase: [1.0]}}}
        for phase in ("old", "young")
    )
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    pair.before.submit(pair.loaded, old)
    others = [None, young, young, failed("error")]
    pair.after.submit(TOY + "grid: {size: [2, 3, 4]}\n", others)
    assert pair.verdicts() == {
        (1, ""): "gone",
        (2, "forward"): "unsure",
        (2, "old"): "gone",
        (2, "young"): "new",
        (3, ""): "new",
        (4, ""): "not measured",
    }
    found = pair.compared()
    few, every = (markdown_comparison(found, every=every) for every in (False, True))
    assert few.startswith("1 run in both folders, 3 only in one of them.") and "| gone" not in few
    assert "| interval or floor" in few and "95%" not in few
    assert "| gone" in every and "| new" in every


def test_a_run_still_to_come_is_not_broken(pair: Pair) -> None:
    pair.before.submit(pair.loaded, ok(1.0))
    pair.after.submit(TOY + "grid: {size: [2]}\n", ok(1.0))
    manifest = pair.after.submit(pair.loaded, None)
    manifest.handles[0] = ProcessHandle.of_this_process()  # this process stands for a live job
    write_handles(manifest)
    assert pair.verdicts() == {(1, ""): "not measured", (2, ""): "new"}
    assert pair.compared().exit_code == 3


def test_the_time_of_a_process_is_the_median_of_its_slowest_rank(pair: Pair) -> None:
    ranks = [[1.0, 2.0, 9.0], [3.0, 2.0, 1.0]]  # slowest: 3, 2, 9
    several = {"status": "ok", "measurements": {"samples_ms": {"forward": ranks}}}
    pair.fill(several, ok(9.0, 1.0, 2.0, 4.0, 8.0))
    cell = only(pair.compared())
    assert (cell.before, cell.after) == pytest.approx((3.0, 4.0))


def test_copies_of_the_same_records_are_told(pair: Pair) -> None:
    pair.before.submit(pair.loaded, ok(1.0))
    shutil.copytree(pair.before.path, pair.after.path)
    assert "1 run has the same records in both folders." in pair.compared().notes


def test_notes_on_both_folders_are_printed(pair: Pair) -> None:
    """Also notes that are no damaged files, such as a worker that could not write its results."""
    pair.fill(ok(1.0), ok(1.0))
    for folder in (pair.before, pair.after):
        (submission,) = (folder.path / "submissions").iterdir()
        unwritable.mark(submission, 0, OSError(errno.ENOSPC, ""))
    done = call("aggregate", "compare", pair.before.path, pair.after.path)
    assert done.returncode == 3
    for folder in (pair.before, pair.after):
        assert f"note: {folder.path}: cannot write results to {folder.path}: No sp" in done.stderr


def test_runs_without_a_device_have_that_of_the_other_folder(tmp_path: Path) -> None:
    text = "grid: {size: [1, 2, 3]}\nresources: {gpus_per_node: 1}\n"
    pair = Pair(tmp_path, text)
    unsupported = failed("unsupported")
    pair.fill(lambda p, _: unsupported if p["size"] == 3 else None, ok(1.0), (H200, H200))
    verdicts = ["new", "new", "fixed"]
    assert [(c.device, c.verdict) for c in pair.compared().cells] == [(H200, v) for v in verdicts]


def test_other_kinds_of_device_are_not_compared(pair: Pair) -> None:
    pair.fill(ok(1.0), ok(9.0), (CPU, "cpu: another"))
    with pytest.raises(
        CommandError, match=r"same kind of device: got cpu: Test.* and cpu: another"
    ):
        pair.compared()


def test_a_folder_without_records_is_an_error(pair: Pair) -> None:
    pair.fill(ok(1.0), None)
    for order in ((pair.before, pair.after), (pair.after, pair.before)):
        done = call("aggregate", "compare", *(folder.path for folder in order))
        assert (done.returncode, "after has no records" in done.stderr) == (2, True), done.stdout
    alone = call("aggregate", "compare", pair.after.path)
    assert (alone.returncode, "has no records" in alone.stderr) == (2, True)


def calls(folder: Path, count: int) -> int:
    """Return how many calls the comparison of two folders with `count` runs makes."""
    folder.mkdir()
    pair = Pair(folder, f"grid: {{size: {list(range(1, count + 1))}}}\n")
    pair.fill(ok(1.0), ok(1.0))
    profile = cProfile.Profile()
    profile.runcall(lambda: markdown_comparison(pair.compared(), every=False))
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.slow
def test_work_of_a_comparison_is_proportional_to_its_runs(tmp_path: Path) -> None:
    few, many = (calls(tmp_path / str(count), count) for count in (100, 1000))
    assert many < 12 * few
