"""Verdicts within a results folder: each run against the baseline of its block; decided blocks."""

from __future__ import annotations

import csv
import itertools
import random
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.formatting import relative
from jobs.results.judgements import Judgement
from jobs.results.manifest import Checkout, write_manifest
from jobs.results.record_reader import read_records
from jobs.results.run_states import observe
from jobs.sweep.expand import expand
from jobs.verdicts.compare import compare_blocks
from jobs.verdicts.decided import judge_block
from tests.jobs.checkout import own_repository
from tests.jobs.compared_folders import MODES, Fate, blocks, compared, measure, noisy, only
from tests.jobs.harness import call
from tests.jobs.results_folder import TOY, Outcome, ResultsFolder, by_mode, failed, load, ok

ONE_SIZE = "grid: {size: [1], mode: [fast, exact]}\n"
TWO_SIZES = "grid: {size: [1, 2], mode: [fast, exact]}\n" + MODES
ALWAYS, NEVER = {0, 1, 2, 3, 4}, set[int]()


def same_but(outcome: Outcome, when: Callable[[dict[str, Any], int], bool]) -> Fate:
    """Return the same times of both modes, but another outcome for some parameters and repeats."""
    same = noisy(1.0)
    return lambda params, repeat: outcome if when(params, repeat) else same(params, repeat)


@pytest.mark.parametrize(
    ("ratio", "verdict", "code"),
    [(1.0, "same", 0), (0.9, "faster", 0), (1.1, "slower", 1)],
)
def test_each_run_is_compared_with_the_baseline_of_its_block(
    tmp_path: Path, ratio: float, verdict: str, code: int
) -> None:
    folder = blocks(tmp_path, noisy(ratio))
    found = compared(folder)
    cell = only(found)
    assert (cell.verdict, cell.run.params["mode"], cell.baseline) == (verdict, "fast", "mode=exact")
    judged = cell.judged
    assert judged is not None and judged.rounds == 5 and judged.allocations == 1
    assert judged.low is not None and judged.high is not None and judged.low < ratio < judged.high
    done = call("aggregate", "compare", folder.path)
    assert (done.returncode, found.exit_code, done.stderr) == (code, code, "")
    (row,) = [line for line in done.stdout.splitlines() if f"| {verdict} " in line]
    assert "fast" in row
    assert "before: the baseline of the block (mode=exact)" in done.stdout
    assert "5 rounds, 15 processes, CPU, 1 allocation." in done.stdout
    assert "A/A floor" in done.stdout and f"1 {verdict}" in done.stdout


def test_phases_that_most_rounds_measured_have_verdicts_of_their_own(tmp_path: Path) -> None:
    """A block that was continued once has two sustained measurements in five rounds."""
    draw = random.Random(0)

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        slower, round = (1.2, repeat) if params["mode"] == "fast" else (1.0, repeat // 2)
        times = {"forward": slower, "backward": 2.0}
        if round in (0, 3):
            times["forward_sustained"] = 2.0
        noisy = {phase: [t * (1 + draw.gauss(0, 0.002))] for phase, t in times.items()}
        return {"status": "ok", "measurements": {"samples_ms": noisy}}

    found = compared(blocks(tmp_path, outcome))
    assert {c.phase: c.verdict for c in found.cells} == {"forward": "slower", "backward": "same"}


def test_a_single_round_is_undecided(tmp_path: Path) -> None:
    text = ONE_SIZE + MODES.replace("5", "1")
    folder = blocks(tmp_path, noisy(2.0), text)
    found = compared(folder)
    assert (only(found).verdict, found.exit_code) == ("unsure", 3)
    assert "at least 2 rounds are needed" in " ".join(found.notes)


def test_rounds_of_two_kinds_of_device_are_not_mixed(tmp_path: Path) -> None:
    folder = blocks(tmp_path, noisy(1.1))
    measure(folder, noisy(1.0, seed=1), "another", device="cpu: B")
    found = [(cell.verdict, cell.judged and cell.judged.rounds) for cell in compared(folder).cells]
    assert found == [("slower", 5), ("same", 5)]


def test_without_aa_the_baseline_of_a_round_has_one_time(tmp_path: Path) -> None:
    text = ONE_SIZE + MODES.replace("}\n", ", aa: false}\n")
    folder = blocks(tmp_path, noisy(1.1), text)
    done = call("aggregate", "compare", folder.path)
    assert done.returncode == 1 and "5 rounds, 10 processes" in done.stdout
    assert "\n1 slower" in done.stdout and "A/A floor: not measured" in done.stdout


def test_the_margin_is_that_of_the_option_or_of_the_sweep(tmp_path: Path) -> None:
    text = ONE_SIZE + MODES.replace("}\n", ", margin: 0.2}\n")
    folder = blocks(tmp_path, noisy(1.1), text)
    assert only(compared(folder)).verdict == "same"
    assert only(compared(folder, 0.01)).verdict == "slower"
    for option in ("--margin", "--tolerance"):
        assert call("aggregate", "compare", folder.path, option, "0.01").returncode == 1


def test_what_was_wrong_once_stays_wrong(tmp_path: Path) -> None:
    """Other rounds and another GPU do not repair the same code. New code can."""
    same = noisy(1.0)
    outcome = same_but(
        failed("wrong"), lambda params, repeat: repeat == 1 and params["mode"] == "fast"
    )
    folder = blocks(tmp_path, outcome, source_hash="code")
    measure(folder, same, "second", source_hash="code")
    found = compared(folder)
    assert (only(found).text, found.exit_code) == ("wrong, although 9 rounds passed", 1)
    done = call("aggregate", folder.path)
    assert " wrong |" in done.stdout
    measure(folder, same, "third")
    assert (only(compared(folder)).verdict, compared(folder).exit_code) == ("same", 0)


def test_hosts_that_differ_are_named(tmp_path: Path) -> None:
    folder = blocks(tmp_path, noisy(1.1))
    measure(folder, noisy(1.0, seed=1), "another")
    cell = only(compared(folder))
    assert cell.verdict == "unsure"
    assert "hosts differ: slower 1.1" in cell.detail and "same 1.0" in cell.detail


@pytest.mark.parametrize(
    ("fast", "exact", "verdict", "detail", "code"),
    [
        (failed("oom"), ok(1.0), "broken", "oom", 1),
        (ok(1.0), failed("error"), "fixed", "baseline: error", 0),
        (ok(1.0), failed("wrong"), "not measured", "baseline: wrong", 3),
        (failed("unsupported"), ok(1.0), "not measured", "unsupported", 3),
        (failed("oom"), failed("oom"), "not measured", "oom", 3),
        (ok(0.0), ok(1.0), "not measured", "time of 0 ms", 3),
        (ok(1.0, phase="other"), ok(1.0), "not measured", "no such phase", 3),
    ],
)
def test_runs_without_times(
    tmp_path: Path, fast: Outcome, exact: Outcome, verdict: str, detail: str, code: int
) -> None:
    found = compared(blocks(tmp_path, by_mode(fast, exact)))
    cell = only(found)
    assert (cell.verdict, cell.detail, cell.phase) == (verdict, detail, "")
    assert found.exit_code == code


def test_a_run_that_an_edit_broke_is_broken_although_older_code_was_measured(
    tmp_path: Path,
) -> None:
    folder = blocks(tmp_path, noisy(1.0), TWO_SIZES, source_hash="older")
    outcome = same_but(
        failed("error"), lambda params, _: (params["size"], params["mode"]) == (2, "fast")
    )
    measure(folder, outcome, "another")
    found = compared(folder)
    verdicts = {(c.run.params["size"], c.phase): c.verdict for c in found.cells}
    assert verdicts == {(1, "forward"): "same", (2, ""): "broken"}  # once, not in each phase
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("failures", "verdict"),  # the rounds that fail, by allocation
    [
        ([ALWAYS, ALWAYS, NEVER], "same"),  # for example, a library was missing at first
        ([ALWAYS, ALWAYS, {0}], "broken"),  # the latest allocation has a failure, too
        ([{0, 1, 2, 3}, {0, 1, 2, 3}, NEVER], "broken"),  # it did not always fail: 8 of 15 rounds
        ([NEVER, ALWAYS, ALWAYS], "broken"),  # the latest allocation counts
    ],
)
def test_failures_of_an_allocation_that_a_later_one_repaired(
    tmp_path: Path, failures: list[set[int]], verdict: str
) -> None:
    first, *others = (
        same_but(failed("error"), lambda p, n, fails=fails: p["mode"] == "fast" and n in fails)
        for fails in failures
    )
    folder = blocks(tmp_path, first)
    for number, outcome in enumerate(others):
        measure(folder, outcome, f"boot {number}")
    assert only(compared(folder)).verdict == verdict


@pytest.mark.parametrize(("second", "code"), [(failed("unsupported"), 0), (None, 3)])
def test_what_is_still_to_come_is_undecided_but_not_what_cannot_be_measured(
    tmp_path: Path, second: Outcome, code: int
) -> None:
    outcome = same_but(second, lambda p, _: (p["size"], p["mode"]) == (2, "fast"))
    found = compared(blocks(tmp_path, outcome, TWO_SIZES))
    assert {c.run.params["size"]: c.verdict for c in found.cells} == {1: "same", 2: "not measured"}
    assert found.exit_code == code


def test_a_round_that_failed_once_is_left_out_and_told(tmp_path: Path) -> None:
    outcome = same_but(
        failed("error"), lambda params, repeat: repeat == 2 and params["mode"] == "fast"
    )
    cell = only(compared(blocks(tmp_path, outcome)))
    assert (cell.text, cell.judged and cell.judged.rounds) == ("same, 1 of 5 rounds: error", 4)


@pytest.mark.parametrize(
    ("status", "is_broken"), [("timeout", True), ("oom", True), ("killed", False)]
)
def test_a_run_is_broken_if_it_failed_by_itself_in_most_rounds(
    tmp_path: Path, status: str, is_broken: bool
) -> None:
    outcome = same_but(failed(status), lambda p, n: p["mode"] == "fast" and n in (1, 2, 3))
    found = compared(blocks(tmp_path, outcome))
    assert (only(found).verdict == "broken") == is_broken


def test_what_a_verdict_does_not_say_is_told(tmp_path: Path) -> None:
    """That it is slower by less than the margin, and that the host determined its time."""
    near = noisy(1.0097, sigma=0.0003)

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        found = near(params, repeat)
        found["measurements"]["facts"] = {"launch_bound": ["forward"]}
        return found

    cell = only(compared(blocks(tmp_path, outcome)))
    assert cell.verdict == "slower"
    assert "margin" in cell.detail and "launch-bound" in cell.detail


def test_where_selects_runs_but_keeps_their_baseline(tmp_path: Path) -> None:
    small, large = noisy(1.0), noisy(1.3)
    folder = blocks(
        tmp_path, lambda params, n: (small if params["size"] == 1 else large)(params, n), TWO_SIZES
    )
    assert call("aggregate", "compare", folder.path).returncode == 1
    chosen = call("aggregate", "compare", folder.path, "--where", "size == 1 and mode == fast")
    assert chosen.returncode == 0 and "\n1 same" in chosen.stdout


def test_csv_has_every_cell_with_exact_numbers(tmp_path: Path) -> None:
    folder = blocks(tmp_path, noisy(1.1))
    judged = only(compared(folder)).judged
    done = call("aggregate", "compare", folder.path, "--format", "csv")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    (row,) = csv.DictReader(lines)
    assert row["verdict"] == "slower" and row["mode"] == "fast" and row["baseline"] == "mode=exact"
    assert judged is not None
    assert (float(row["ratio"]), float(row["low"])) == (judged.ratio, judged.low)
    assert (row["rounds"], row["allocations"]) == ("5", "1")


@pytest.mark.slow
def test_against_another_checkout(tmp_path: Path) -> None:
    """It says which commit is which, names the only run, and says how to see why it is broken."""
    own = own_repository(tmp_path / "own")
    old = own.git("rev-parse", "HEAD")
    new = own.commit(helper="VALUE = 'new'\n")
    submit = ("jobs.submit", "own.yaml", "--local", "--against", "HEAD~1", "--out")
    assert own.python(*submit, "out", "blocks.rounds=2").returncode == 0
    done = own.python("aggregate", "compare", "out")
    assert f"before: the other checkout (commit {old[:10]})" in done.stdout
    assert f"after: the working tree as measured (commit {new[:7]}).\n" in done.stdout
    assert "\nrun: own.bench index=0\n" in done.stdout
    # The benchmark returns a constant, so the ratio is exactly 1.
    assert done.returncode == 0 and "1 same" in done.stdout
    own.write("helper.py", "")
    edited = own.python("aggregate", "compare", "out").stdout
    assert f"(commit {new[:7]}). It has changed since.\n" in edited
    assert "note: 2 of 6 results are from older code" in edited
    assert own.python(*submit, "broken", "blocks.rounds=1").returncode == 1
    done = own.python("aggregate", "compare", "broken")
    (why,) = [line for line in done.stdout.splitlines() if line.startswith("Why broken: ")]
    shown = own.python(*why.split()[4:])
    assert "# AttributeError: module 'helper' has no attribute 'VALUE'" in shown.stdout


def test_gpus_of_interrupted_rounds_are_not_counted(folder: ResultsFolder) -> None:
    text = TOY + ONE_SIZE + MODES.replace("5", "2")
    folder.submit_rounds(text, ok(1.0), gpu="GPU-used")
    last = iter([ok(1.0)])
    folder.submit_rounds(text, lambda *_: next(last, None), gpu="GPU-interrupted", rounds=[1])
    assert any(note.startswith("2 rounds, 6 processes, 1 GPU") for note in compared(folder).notes)


def test_huge_noise_is_not_shown_with_many_digits(tmp_path: Path) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        noisy = repeat > 2 if params["mode"] == "fast" else repeat % 4 == 3
        return ok(1000.0 if noisy else 1.0)

    shown = call("aggregate", "compare", blocks(tmp_path, outcome).path).stdout
    assert "0.000" not in shown.split("ratio: ")[1]
    assert " (noise)" in shown and " to >100x " in shown
    assert "A/A floor (difference that the same code shows): forward >100%" in shown


def test_the_command_for_undecided_cells_measures_just_their_blocks(tmp_path: Path) -> None:
    """It can be run as it is. After a commit, it names the version that HEAD was."""
    text = "grid: {size: [1, 2, 3], mode: [fast, exact]}\n" + MODES
    sure, unsure = noisy(1.0), noisy(1.0, sigma=0.02)
    folder = blocks(
        tmp_path, lambda params, n: (unsure if params["size"] == 2 else sure)(params, n), text
    )
    (manifest,) = observe(folder.path).manifests
    submit = "python -m jobs.submit 'my sweep.yaml' --local --against {} "
    here = shlex.quote(str(tmp_path))
    for given, kept in (("HEAD", "0123456789"), (here, here)):
        changed = replace(
            manifest,
            command=submit.format(given) + "blocks.rounds=5 --where 'size < 4' --rounds=5",
            checkouts={"0123456789": Checkout("0123456789", "", "", [], {}, False)},
        )
        write_manifest(changed)
        found = compared(folder)
        assert found.exit_code == 3
        (line,) = [note for note in found.notes if note.startswith("Undecided: 1 cell")]
        again = f"--rounds 10 --out {relative(folder.path)} --where 'size == 2'"
        assert line.endswith(": " + submit.format(kept) + again), line


def test_the_command_for_undecided_cells_names_their_benchmark(folder: ResultsFolder) -> None:
    """Benchmarks of a sweep may have nothing in common that varies."""
    sweep = TOY + (
        "cases:\n"
        "  - {grid: {size: [1, 2], mode: [fast, exact]}}\n"
        "  - {benchmark: tests.benchmarks.counter, fixed: {size: 1}, grid: {mode: [fast, slow]}}\n"
        "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 2, aa: false}\n"
    )
    times = itertools.cycle([1.0, 1.1, 1.3, 0.9, 1.2])
    folder.submit_rounds(sweep, lambda params, _: ok(next(times)))
    (manifest,) = observe(folder.path).manifests
    write_manifest(replace(manifest, command="python -m jobs.submit two.yaml --local"))
    undecided = [run for run in manifest.runs.values() if run.benchmark.endswith("counter")]
    found = compare_blocks(observe(folder.path), chosen={run.id for run in undecided})
    (line,) = [note for note in found.notes if note.startswith("Undecided")]
    *_, condition = shlex.split(line)
    again = expand(load(folder.path.parent, sweep, filter=condition))
    assert {run.id for run in again.runs} == {run.id for run in undecided}


def test_the_block_of_an_earlier_baseline_does_not_wait_for_rounds(folder: ResultsFolder) -> None:
    """A later submission compares the same runs with another baseline."""
    text = TOY + "grid: {mode: [fast, exact], size: [1]}\nblocks:\n  interleave: [mode]\n"
    # The first submission was cut in its first round.
    folder.submit_rounds(text + "  baseline: {mode: fast}\n  rounds: 3\n", None)
    times = iter(1 + 0.001 * (i % 3) for i in range(99))
    folder.submit_rounds(
        text + "  baseline: {mode: exact}\n  rounds: 5\n",
        lambda params, _: ok(next(times) * (2 if params["mode"] == "fast" else 1)),
    )
    found = compared(folder)
    assert [(cell.run.params["mode"], cell.verdict) for cell in found.cells] == [("fast", "slower")]


def test_what_was_compared_is_told_once_if_its_block_becomes_larger(folder: ResultsFolder) -> None:
    text = TOY + "grid: {{mode: [fast, exact], size: {}}}\nblocks: {{interleave: {}, baseline: {}}}"
    small = text.format("[1]", "[mode]", "{mode: fast}")
    folder.submit_rounds(small, lambda params, repeat: ok(1 + 0.001 * repeat))
    folder.submit_rounds(text.format("[1, 2]", "[mode, size]", "{mode: fast, size: 1}"), None)
    found = Counter(tuple(cell.run.params.values()) for cell in compared(folder).cells)
    assert sorted(found.values()) == [1, 1, 1], found


# ---- when a worker stops to measure a block ------------------------------------------------------


def judged(tmp_path: Path, outcome: Fate, rounds: int = 5, *phases: str) -> Judgement:
    """Return the judgement on a block with this number of rounds."""
    tmp_path.mkdir(exist_ok=True)
    folder = blocks(tmp_path, outcome, ONE_SIZE + MODES.replace("5", str(rounds)))
    (block,) = observe(folder.path).manifests[-1].blocks
    return judge_block(read_records(folder.path)[0], block, phases=phases)


def test_a_block_is_decided_from_the_third_round(tmp_path: Path) -> None:
    slow = noisy(1.3, sigma=0.0)
    assert judged(tmp_path / "two", slow, 2).undecided
    assert judged(tmp_path / "three", slow, 3).is_decided


@pytest.mark.parametrize(
    ("status", "when"), [("error", ALWAYS), ("wrong", {2}), ("oom", {4}), ("error", {4})]
)
def test_cells_that_cannot_be_decided_do_not_keep_a_block_open(
    tmp_path: Path, status: str, when: set[int]
) -> None:
    undecided = noisy(1.0, sigma=0.1)

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        fails = params["mode"] == "fast" and repeat in when
        return failed(status) if fails else undecided(params, repeat)

    # An error in one round alone does not show that there will be no more rounds.
    assert judged(tmp_path, outcome).is_decided == ((status, when) != ("error", {4}))


def test_a_phase_that_no_run_has_is_never_decided(tmp_path: Path) -> None:
    found = judged(tmp_path, noisy(1.3), 5, "forwards")
    assert found.undecided == ["forwards: no run has this phase"]


def test_rounds_of_other_devices_and_hosts_do_not_count(tmp_path: Path) -> None:
    """A round that was measured on two hosts is one round."""
    folder = blocks(tmp_path, noisy(1.3, sigma=0.2), ONE_SIZE + MODES)
    (manifest,) = observe(folder.path).manifests
    for boot in ("a", "b"):
        measure(folder, noisy(1.3), boot, device="cpu: another")
    found = judge_block(read_records(folder.path)[0], manifest.blocks[0])
    assert found.is_decided and found.rounds == 5
