"""Which attempts of runs in blocks tables show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.frame.results import list_results
from jobs.results.run_states import observe
from tests.jobs.results_folder import (
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    failed,
    load,
    ok,
    report_table,
    table,
)

SWEEP = (
    TOY
    + "grid: {size: [1], mode: [fast, exact]}\nresources: {gpus_per_node: 1}\n"
    + "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 2}\n"
)
VIEW: dict[str, Any] = {"rows": ["size"], "columns": ["mode"], "baseline": {"mode": "fast"}}


def always(outcome: Outcome) -> Callable[[dict[str, Any], int], Outcome]:
    """Return a function of (parameters, repeat) that gives every task this outcome."""
    return lambda params, repeat: outcome


def shown(folder: ResultsFolder) -> dict[tuple[str, int], list[float | str]]:
    """Return the times, or the statuses, by mode and repeat."""
    found: dict[tuple[str, int], list[float | str]] = {}
    for result in list_results(observe(folder.path)):
        times = result.measurements.samples_ms["forward"] if result.measurements else None
        value = str(result.status) if times is None else float(times[0])  # type: ignore[arg-type]
        found.setdefault((result.run.params["mode"], result.repeat), []).append(value)
    return found


def test_a_cut_round_is_not_shown_beside_complete_ones(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        # The second round is executed in reverse order: fast 3, exact 1, and fast 2 is cut.
        cut = params["mode"] == "fast" and repeat == 2
        return None if cut else ok(1.0 + repeat)

    folder.submit_rounds(load(tmp_path, SWEEP), outcome)
    assert shown(folder) == {
        ("fast", 0): [1.0],
        ("exact", 0): [1.0],
        ("fast", 1): [2.0],
        ("fast", 2): ["missing"],
        ("exact", 1): ["missing"],
        ("fast", 3): ["missing"],
    }
    notes = ". ".join(report_table(folder, **VIEW).notes)
    assert "missing: its round is not complete (2 runs)" in notes
    assert "2 attempts are not shown; python aggregate.py attempts FOLDER lists all" in notes


def test_the_only_round_is_shown_while_it_is_not_complete(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    """Its times are not paired: the round may be executed again."""
    folder.submit_rounds(
        load(tmp_path, SWEEP),
        lambda params, repeat: None if repeat == 1 else ok(1.0 if repeat == 0 else 5.0),
        rounds=[0],
    )
    (row,) = table(folder, **VIEW)
    assert (row["fast"], row["exact"]) == (
        "1.000 (1 of 4 repeats; missing)",
        "1.000 (1 of 2 repeats; missing)",
    )
    assert row["exact vs fast"] == "1.00x"


def test_a_round_executed_again_replaces_that_of_its_allocation_only(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, SWEEP)
    for ms, boot in ((1.0, "a"), (2.0, "a"), (3.0, "b")):
        folder.submit_rounds(loaded, always(ok(ms)), boot, rounds=[0])
    assert shown(folder)["exact", 0] == [2.0, 3.0]


def test_an_ok_attempt_in_one_allocation_outdoes_a_failure_in_another(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, SWEEP)
    folder.submit_rounds(loaded, lambda params, repeat: ok(1.0), "a")
    folder.submit_rounds(
        loaded,
        lambda params, repeat: failed("oom") if params["mode"] == "exact" else ok(2.0),
        "b",
    )
    assert shown(folder)["exact", 0] == [1.0]
    assert shown(folder)["fast", 0] == [1.0, 2.0]


def other_code(name: str, ms: float, size: int = 2) -> Callable[[dict[str, Any], int], Outcome]:
    """Return outcomes of this time, with this name as the code of one size or of mode exact."""

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        changed = params["size"] == size or params["mode"] == "exact"
        return ok(ms) | {"source_hash": name if changed else "same"}

    return outcome


def test_rounds_of_older_code_are_not_shown_beside_newer_ones(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    """Not even if they were executed in another allocation, or if the newer code has few rounds."""
    loaded = load(tmp_path, SWEEP)
    folder.submit_rounds(loaded, other_code("old", 1.0), "a")
    folder.submit_rounds(loaded, other_code("new", 2.0), "b", rounds=[0])
    found = shown(folder)
    assert found["exact", 0] == [2.0]
    assert found["exact", 1] == ["missing"]
    # The code of the baseline is the same, and it has fewer later rounds.
    assert found["fast", 0] == [1.0, 2.0]
    assert found["fast", 2] == [1.0]
    notes = ". ".join(report_table(folder, **VIEW).notes)
    assert "missing: older code than that of the latest complete round (1 run)" in notes


def test_a_round_of_older_code_is_hidden_for_all_of_its_runs_once_it_is_repeated(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, SWEEP)
    folder.submit_rounds(loaded, other_code("old", 1.0), "a")
    folder.submit_rounds(loaded, other_code("new", 2.0), "b")
    found = shown(folder)
    assert found.pop(("exact", 0)) == found.pop(("exact", 1)) == [2.0]
    assert found == {("fast", repeat): [2.0] for repeat in range(4)}


SIZES = TOY + "grid: {size: [1, 2, 3], mode: [fast]}\nresources: {gpus_per_node: 1}\n"
SIZES += "blocks: {interleave: [size], baseline: {size: 1}, rounds: 2}\n"


def times_by_size(folder: ResultsFolder) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for result in list_results(observe(folder.path)):
        if result.measurements:
            (ms,) = {float(x) for x in result.measurements.samples_ms["forward"] if x is not None}
            found.setdefault(result.run.params["size"], set()).add(ms)
    return found


@pytest.mark.parametrize("reason", ["not measured", "failed", "earlier"])
def test_a_round_of_older_code_is_shown_if_a_run_of_it_has_no_other(
    tmp_path: Path, folder: ResultsFolder, reason: str
) -> None:
    """Otherwise a result would be lost, or a time without that of its baseline in the round."""
    loaded = load(tmp_path, SIZES)
    if reason == "earlier":  # rounds before those of older code do not replace them
        folder.submit_rounds(load(tmp_path, SIZES.replace("2, 3]", "3]")), always(ok(9.0)), "z")
    folder.submit_rounds(loaded, other_code("old", 1.0), "a")
    if reason == "failed":
        new = other_code("new", 2.0)
        timeout = failed("timeout") | {"source_hash": "same"}
        folder.submit_rounds(
            loaded, lambda p, repeat: timeout if p["size"] == 3 else new(p, repeat), "b"
        )
    else:
        two = load(tmp_path, SIZES.replace("2, 3]", "2]"))
        folder.submit_rounds(two, other_code("new", 2.0), "b")
    found = times_by_size(folder)
    assert found[2] == {2.0}
    assert 1.0 in found[1] and 1.0 in found[3]


@pytest.mark.parametrize("first", ["alone", "block"])
def test_rounds_outdo_attempts_outside_of_blocks(
    tmp_path: Path, folder: ResultsFolder, first: str
) -> None:
    alone = load(tmp_path, SWEEP.partition("blocks")[0])
    for which in ("alone", "block") if first == "alone" else ("block", "alone"):
        if which == "alone":
            folder.submit(alone, lambda params, repeat: ok(9.0), H200)
        else:
            folder.submit_rounds(load(tmp_path, SWEEP), lambda params, repeat: ok(1.0))
    assert shown(folder)["exact", 0] == [1.0]


def test_commits_that_are_told_apart_do_not_replace_each_other(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, SWEEP)
    for ms, commit in ((1.0, "a" * 40), (2.0, "b" * 40)):
        environment = {"git": {"commit": commit, "dirty": False}}
        outcome = ok(ms) | {"environment": environment, "source_hash": commit}
        folder.submit_rounds(loaded, always(outcome))
    rows = table(folder, rows=["commit"], columns=["mode"], where="size == 1")
    assert [(row["commit"], row["exact"]) for row in rows] == [
        ("aaaaaaa", "1.000 ±0.00%"),
        ("bbbbbbb", "2.000 ±0.00%"),
    ]
