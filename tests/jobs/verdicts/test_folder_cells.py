"""Comparison of two results folders that were not measured in turn."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import CommandError
from jobs.processes import ProcessHandle
from jobs.results import unwritable
from jobs.results.manifest import write_handles
from jobs.verdicts.folder_cells import read_sides
from jobs.verdicts.short_records import read_short
from tests.jobs.compared_folders import (
    MODES,
    Pair,
    block_records,
    compared_folders,
    noisy,
    only,
    prepared,
    write_records,
)
from tests.jobs.harness import call
from tests.jobs.results_folder import H200, TOY, Outcome, ResultsFolder, failed, load, ok


def test_one_process_a_side_gives_no_verdict_on_times(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1, 2, 3]}\n")
    pair.fill(lambda *_: ok(1.0), lambda params, repeat: ok([0.2, 1.0, 5.0][params["size"] - 1]))
    assert set(pair.verdicts().values()) == {"unpaired"}
    assert pair.compared().exit_code == 3


ATTENTION = """
name: attention
benchmark: attention
fixed: {implementation: naive, head_dim: 64}
grid: {seq_len: [128], num_heads: [1, 16]}
"""


@pytest.mark.parametrize(
    ("after", "text", "interval"),
    [
        # 0.5 ms: one head 1.5% and at most 6.2%, several heads 3.2% and at most 6.6%
        (0.75, "unpaired, at least 1.41x slower", (1.5 / 1.015, 1.5 * 1.015)),
        (0.515, "unpaired", (1.03 / 1.015, 1.03 * 1.015)),
        (0.25, "unpaired, at least 1.88x faster", (0.5 / 1.015, 0.5 * 1.015)),
    ],
)
def test_noise_floors_bound_an_unpaired_difference(
    tmp_path: Path, after: float, text: str, interval: tuple[float, float]
) -> None:
    loaded = load(tmp_path, ATTENTION)
    folders = ResultsFolder(tmp_path / "before"), ResultsFolder(tmp_path / "after")
    for folder, time in zip(folders, (0.5, after), strict=True):
        folder.submit(loaded, lambda params, repeat, time=time: ok(time), H200)  # type: ignore[misc]
    found = compared_folders(*folders)
    one, several = sorted(found.cells, key=lambda cell: int(cell.run.params["num_heads"]))
    assert one.text == text
    assert (one.low, one.high) == pytest.approx(interval)
    assert one.low is not None and several.low is not None and several.low < one.low
    assert found.exit_code == 3


def test_a_device_without_noise_floors_is_listed_without_intervals(tmp_path: Path) -> None:
    """Nothing is known to be within the noise, so nothing may be left out."""
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    pair.fill(lambda *_: ok(1.0), lambda params, repeat: ok(8.7 if params["size"] == 1 else 1.0))
    shown = call("aggregate", "compare", pair.before.path, pair.after.path).stdout
    rows = [line.split() for line in shown.splitlines() if "forward" in line]
    assert [(row[7], row[-2]) for row in rows] == [("8.700", "unpaired"), ("1.000", "unpaired")]
    assert "not listed" not in shown
    assert "No noise floor is stored for cpu: Test Processor, so ratios have no interval" in shown


@pytest.mark.parametrize(
    ("uuids", "hours", "usual"),
    [(("a", "a"), 0, 0.009), (("a", "b"), 0, 0.015), (("a", "a"), 2, 0.015), (("", ""), 0, 0.015)],
)
def test_the_same_gpus_minutes_apart_have_smaller_floors(
    tmp_path: Path, uuids: tuple[str, str], hours: float, usual: float
) -> None:
    loaded = load(tmp_path, ATTENTION.replace("[1, 16]", "[1]"))
    folders = ResultsFolder(tmp_path / "before"), ResultsFolder(tmp_path / "after")
    folders[1].clock = folders[0].clock + 3600 * hours
    for folder, uuid in zip(folders, uuids, strict=True):
        outcome = ok(0.5) | {"gpus": [{"uuid": uuid} if uuid else {}]}
        folder.submit(loaded, lambda params, repeat, outcome=outcome: outcome, H200)  # type: ignore[misc]
    cell = only(compared_folders(*folders))
    assert cell.high == pytest.approx(1 + usual)


def test_rounds_that_two_folders_share_are_paired(tmp_path: Path) -> None:
    """One folder has the records of the baseline, the other those of the candidate."""
    text = "grid: {size: [1], mode: [fast, exact]}\n" + MODES
    before, after = ResultsFolder(tmp_path / "before"), ResultsFolder(tmp_path / "after")
    manifest = prepared(before, tmp_path, text)
    records = block_records(before, manifest, noisy(lambda run: 1.2))
    other = prepared(after, tmp_path, text)
    write_records(before, manifest, [r for r in records if r.params["mode"] == "exact"])
    write_records(after, other, [r for r in records if r.params["mode"] == "fast"])
    found = compared_folders(before, after)
    paired = [cell for cell in found.cells if cell.judged]
    assert [(c.verdict, c.run.params["mode"]) for c in paired] == [("slower", "fast")]


def test_what_became_of_runs_that_have_no_number(tmp_path: Path) -> None:
    fine = ok(1.0)
    fates: list[tuple[Outcome, Outcome, str]] = [
        (fine, failed("oom"), "broken"),
        (fine, None, "broken"),
        (failed("timeout"), fine, "fixed"),
        (None, fine, "fixed"),
        (failed("error"), failed("oom"), "not measured"),
        (failed("error"), None, "not measured"),
        (fine, fine, "unpaired"),
    ]
    pair = Pair(tmp_path, f"grid: {{size: {list(range(1, len(fates) + 1))}}}\n")
    pair.fill(
        lambda params, repeat: fates[params["size"] - 1][0],
        lambda params, repeat: fates[params["size"] - 1][1],
    )
    found = pair.verdicts()
    assert [says for _, says in sorted(found.items())] == [says for *_, says in fates]
    assert pair.compared().exit_code == 1


def test_new_and_gone_runs_and_phases(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\n")
    both = {"forward": [1.0], "old": [1.0]}
    pair.before.submit(
        pair.loaded,
        lambda params, repeat: {"status": "ok", "measurements": {"samples_ms": both}},
    )
    other = load(tmp_path, TOY + "grid: {size: [2, 3, 4]}\n")
    changed = {"forward": [1.0], "young": [1.0]}
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
        (2, "forward"): "unpaired",
        (2, "old"): "gone",
        (2, "young"): "new",
        (3, ""): "new",
        (4, ""): "not measured",
    }
    few = call("aggregate", "compare", pair.before.path, pair.after.path).stdout
    assert few.startswith("1 run in both folders, 3 only in one of them.") and "| gone" not in few
    every = call("aggregate", "compare", pair.before.path, pair.after.path, "--all").stdout
    assert "| gone" in every and "| new" in every


def test_a_run_still_to_come_is_not_broken(tmp_path: Path) -> None:
    """A run whose job is still live is `not measured`, not `broken`."""
    pair = Pair(tmp_path, "grid: {size: [1, 2]}\nruns_per_job: 2\n")
    pair.before.submit(pair.loaded, lambda params, repeat: ok(1.0))
    manifest = pair.after.submit(
        pair.loaded, lambda params, repeat: ok(1.0) if params["size"] == 1 else None
    )
    manifest.handles[0] = ProcessHandle.of_this_process()  # this process stands for a live job
    write_handles(manifest)
    assert pair.verdicts() == {(1, "forward"): "unpaired", (2, ""): "not measured"}


def test_the_slowest_rank_and_the_median_process_are_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\nrepeats: 3\n")

    def ranks(params: dict[str, Any], repeat: int) -> Outcome:
        samples = [[1.0, 2.0, 9.0], [3.0, 2.0, 1.0]]  # slowest: 3, 2, 9; median 3
        scaled = [[time * (repeat + 1) for time in rank] for rank in samples]
        return {"status": "ok", "measurements": {"samples_ms": {"forward": scaled}}}

    pair.fill(ranks, ranks)
    cell = only(pair.compared())
    assert (cell.before, cell.after) == (6.0, 6.0)


def test_the_median_is_that_of_all_samples(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(lambda *_: ok(9.0, 1.0, 2.0, 4.0), lambda *_: ok(5.0, 1.0, 7.0))
    cell = only(pair.compared())
    assert (cell.before, cell.after) == (3.0, 5.0)
    (record,) = read_short(pair.before.path).records
    assert record.measurements is not None
    assert list(record.measurements.samples_ms["forward"]) == [3.0]  # all samples need much memory


def test_copies_of_the_same_records_are_told(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.before.submit(pair.loaded, lambda *_: ok(1.0))
    shutil.copytree(pair.before.path, pair.after.path)
    assert "1 run has the same records in both folders." in pair.compared().notes


def test_notes_on_both_folders_are_printed(tmp_path: Path) -> None:
    """Also notes that are no damaged files, such as a worker that could not write its results."""
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(lambda *_: ok(1.0), lambda *_: ok(1.0))
    for folder in (pair.before, pair.after):
        (submission,) = (folder.path / "submissions").iterdir()
        unwritable.mark(submission, 0, OSError(errno.ENOSPC, ""))
    done = call("aggregate", "compare", pair.before.path, pair.after.path)
    assert done.returncode == 3
    for folder in (pair.before, pair.after):
        assert f"note: {folder.path}: cannot write results to {folder.path}: No sp" in done.stderr


def test_runs_without_a_device_are_compared_in_the_order_of_their_folder(tmp_path: Path) -> None:
    """A run that no GPU has measured has the devices of the other folder, if it is there."""
    text = "grid: {size: [1, 2, 3]}\nresources: {gpus_per_node: 1}\n"
    pair = Pair(tmp_path, text)
    unsupported = failed("unsupported")
    pair.before.submit(pair.loaded, lambda p, _: unsupported if p["size"] == 3 else None, H200)
    other = load(tmp_path, TOY + text.replace("[1, 2, 3]", "[2, 1, 3]"))
    pair.after.submit(other, lambda *_: ok(1.0), H200)
    cells = pair.compared().cells
    assert [(c.run.params["size"], c.device, c.verdict) for c in cells] == [
        (3, H200, "fixed"), (1, H200, "fixed"), (2, H200, "fixed"),
    ]  # fmt: skip


def test_of_two_folders_that_cannot_be_read_the_first_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="/first; give a results folder"):
        read_sides(tmp_path / "first", tmp_path / "second")
