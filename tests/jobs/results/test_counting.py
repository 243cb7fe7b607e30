"""Which attempts count: those that tables show, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.block import Block
from jobs.frame.results import list_results
from jobs.results.counting import (
    AGAIN,
    INCOMPLETE,
    NO_BLOCK,
    OLDER_CODE,
    OLDER_ROUND,
    allocation_of,
    complete_rounds,
    is_done,
    is_done_in_job,
    is_done_in_round,
    judged_executions,
    place_of,
    select_attempts,
    task_of,
)
from jobs.results.record import Record
from jobs.results.run_states import observe
from jobs.status import Status
from tests.jobs.results_folder import (
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    by_mode,
    failed,
    in_round,
    ok,
    record,
    report_table,
)
from tests.jobs.results_folder import run as toy_run

SWEEP = (
    TOY
    + "grid: {size: [1], mode: [fast, exact]}\nresources: {gpus_per_node: 1}\n"
    + "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 2}\n"
)
VIEW: dict[str, Any] = {"rows": ["size"], "columns": ["mode"], "baseline": {"mode": "fast"}}


def shown(folder: ResultsFolder) -> dict[tuple[str, int], list[float | str]]:
    """Return the times, or the statuses, by mode and repeat."""
    found: dict[tuple[str, int], list[float | str]] = {}
    for result in list_results(observe(folder.path)):
        times = result.measurements.samples_ms["forward"] if result.measurements else None
        value = str(result.status) if times is None else float(times[0])  # type: ignore[arg-type]
        found.setdefault((result.run.params["mode"], result.repeat), []).append(value)
    return found


def test_a_round_executed_again_replaces_that_of_its_allocation_only(folder: ResultsFolder) -> None:
    """Without the id of the boot, each job is an allocation."""
    for ms, boot in enumerate(("a", "a", "b", None, None), 1):
        outcome = ok(float(ms)) | {"environment": {"boot_id": boot}}
        folder.submit_rounds(SWEEP, outcome, rounds=[0])
    assert shown(folder)["exact", 0] == [2.0, 3.0, 4.0, 5.0]


def test_rounds_of_unknown_code_replace_none_of_known_code(folder: ResultsFolder) -> None:
    folder.submit_rounds(SWEEP, ok(1.0), source_hash="older")
    folder.submit_rounds(SWEEP, ok(2.0), "another boot", source_hash=None)
    assert set(map(tuple, shown(folder).values())) == {(1.0,)}


def test_an_ok_attempt_in_one_allocation_outdoes_a_failure_in_another(
    folder: ResultsFolder,
) -> None:
    folder.submit_rounds(SWEEP, ok(1.0), "a")
    folder.submit_rounds(SWEEP, by_mode(ok(2.0), failed("oom")), "b")
    assert shown(folder)["exact", 0] == [1.0]
    assert shown(folder)["fast", 0] == [1.0, 2.0]


def test_the_present_code_counts_as_the_latest(folder: ResultsFolder) -> None:
    def exact(outcome: Outcome, **fields: Any) -> list[float | str]:
        folder.submit(toy, outcome | fields)
        return shown(folder)["exact", 0]

    toy = TOY + "fixed: {size: 1, mode: exact}\n"
    assert exact(ok(1.0), source_hash="before") == [1.0]
    assert exact(ok(2.0)) == [2.0]
    assert exact(ok(3.0), source_hash="tried and undone") == [2.0]
    assert exact(failed("error"), source_hash="tried and undone") == [2.0]
    assert exact(failed("error")) == [2.0]  # the same code was ok
    assert exact(failed("wrong")) == exact(ok(3.0)) == ["wrong"]
    folder.submit(toy, failed("error"), H200)
    assert observe(folder.path).counts() == {"ok": 1}  # on another kind of device


@pytest.mark.parametrize(
    ("outcome", "seen"),
    [
        *((failed(status), status) for status in ("error", "oom", "wrong", "unsupported")),
        (failed("killed", "SIGSEGV"), "killed"),
        (failed("killed"), 1.0),
        (failed("error") | {"source_hash": "tried"}, 1.0),
    ],
)
def test_how_the_present_code_ended_replaces_a_result_of_older_code(
    folder: ResultsFolder, outcome: Outcome, seen: float | str
) -> None:
    toy = TOY + "fixed: {size: 1, mode: exact}\n"
    folder.submit(toy, ok(1.0) | {"source_hash": "before"})
    folder.submit(toy, outcome)
    assert shown(folder)["exact", 0] == [seen]
    status = observe(folder.path).tasks[0].status
    assert status == ("ok" if seen == 1.0 else seen)


def test_a_trial_counts_only_if_it_failed(folder: ResultsFolder) -> None:
    folder.submit_rounds(SWEEP, by_mode(ok(9.0), failed("error")), rounds=[0], trial=True)
    assert observe(folder.path).counts() == {"missing": 5, "error": 1}
    assert shown(folder)["fast", 0] == ["missing"] and shown(folder)["exact", 0] == ["error"]
    folder.submit_rounds(SWEEP, ok(1.0))
    assert set(map(tuple, shown(folder).values())) == {(1.0,)} and len(shown(folder)) == 6
    assert "1 attempt not shown" in ". ".join(report_table(folder, **VIEW).notes)


def other_code(name: str, ms: float) -> Callable[[dict[str, Any], int], Outcome]:
    """Return outcomes of this time, with this name as the code of size 2 or of mode exact."""

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        changed = params["size"] == 2 or params["mode"] == "exact"
        return ok(ms) | {"source_hash": name if changed else "same"}

    return outcome


def test_rounds_of_older_code_are_not_shown_beside_newer_ones(folder: ResultsFolder) -> None:
    """Not even if they were executed in another allocation, or if the newer code has few rounds.

    Once a round is repeated, that of older code is hidden for all of its runs.
    """
    folder.submit_rounds(SWEEP, other_code("old", 1.0), "a")
    folder.submit_rounds(SWEEP, other_code("new", 2.0), "b", rounds=[0])
    found = shown(folder)
    assert found["exact", 0] == [2.0]
    assert found["exact", 1] == ["missing"]
    # The code of the baseline is the same, and it has fewer later rounds.
    assert found["fast", 0] == [1.0, 2.0]
    assert found["fast", 2] == [1.0]
    notes = ". ".join(report_table(folder, **VIEW).notes)
    assert "missing: other code than that of the latest complete round (1 run)" in notes

    folder.submit_rounds(SWEEP, other_code("new", 2.0), "b")
    found = shown(folder)
    assert found.pop(("exact", 0)) == found.pop(("exact", 1)) == [2.0]
    assert found == {("fast", repeat): [2.0] for repeat in range(4)}


SIZES = TOY + "grid: {size: [1, 2, 3], mode: [fast]}\nresources: {gpus_per_node: 1}\n"
SIZES += "blocks: {interleave: [size], baseline: {size: 1}, rounds: 2}\n"
TIMEOUT = failed("timeout") | {"source_hash": "same"}


def test_a_round_of_older_code_is_shown_if_a_run_of_it_has_no_later_time(
    folder: ResultsFolder,
) -> None:
    """Otherwise a result would be lost, or a time without that of its baseline in the round.

    Size 3 has an earlier time and a later failure.
    """
    new = other_code("new", 2.0)
    folder.submit_rounds(SIZES.replace("2, 3]", "3]"), other_code("same", 9.0), "z")
    folder.submit_rounds(SIZES, other_code("old", 1.0), "a")
    folder.submit_rounds(
        SIZES, lambda p, repeat: TIMEOUT if p["size"] == 3 else new(p, repeat), "b"
    )
    times: dict[int, set[object]] = {}
    for result in list_results(observe(folder.path)):
        if result.measurements:
            samples = result.measurements.samples_ms["forward"]
            times.setdefault(result.run.params["size"], set()).update(samples)
    assert times[2] == {2.0}
    assert 1.0 in times[1] and 1.0 in times[3]


def test_a_failure_in_a_hidden_round_is_hidden_too(folder: ResultsFolder) -> None:
    old = other_code("old", 1.0)
    folder.submit_rounds(
        SIZES, lambda p, repeat: TIMEOUT if p["size"] == 3 else old(p, repeat), "a", rounds=[1]
    )
    folder.submit_rounds(SIZES, other_code("new", 2.0), "b", rounds=[0])
    results = list_results(observe(folder.path))
    assert {each.status for each in results} == {Status.ok, Status.missing}


@pytest.mark.parametrize(
    ("source_hash", "later", "shown"),
    [("a", "ok", "wrong"), ("a", "oom", "oom"), (None, "ok", "ok")],
)
def test_a_wrong_attempt_stands_for_ok_ones_of_its_code(
    source_hash: str | None, later: str, shown: str
) -> None:
    attempts = [attempt(outcome, source_hash=source_hash) for outcome in ("wrong", later)]
    ((found,),) = select_attempts(attempts).shown.values()
    assert found.status == shown


def test_a_wrong_attempt_on_another_device_changes_no_device(folder: ResultsFolder) -> None:
    sweep = TOY + "fixed: {size: 1}\nresources: {gpus_per_node: 1}\nrepeats: 2\n"
    wrong, right = (each | {"source_hash": "a"} for each in (failed("wrong"), ok(1.0)))
    folder.submit(sweep, lambda params, repeat: None if repeat else wrong, H200)
    folder.submit(sweep, lambda params, repeat: right if repeat else None, "NVIDIA H100")
    found = {(r.device, r.repeat): str(r.status) for r in list_results(observe(folder.path))}
    assert found["NVIDIA H100", 1] == found[H200, 0] == "wrong"
    assert "ok" not in found.values()


RUNS = ("a" * 16, "b" * 16)  # a baseline, and a run whose code changes
STATUSES = st.sampled_from([Status.ok, Status.ok, Status.oom, Status.killed])
EXECUTIONS = st.tuples(
    st.integers(0, 1),  # round
    st.sampled_from("xy"),  # boot of the host, and so the allocation
    st.sampled_from(["old", "new"]),  # code of the second run
    st.integers(1, 3),  # number of attempts, of 3
    st.tuples(STATUSES, STATUSES, STATUSES),
)
ALONE = st.tuples(st.integers(0, 1), st.sampled_from(["old", "new"]), STATUSES)


def attempts_of(history: list[tuple[Any, ...]]) -> list[Record]:
    """Return the attempts of executions of rounds, and of runs outside of blocks, oldest first."""
    found: list[Record] = []

    def add(run: int, repeat: int, code: str, status: Status, **more: Any) -> None:
        outcome = ok(1.0) if status is Status.ok else failed(status)
        made = record(toy_run(run), outcome, repeat, H200, 1000.0 + len(found))
        changes = {"source_hash": code if run else "same", "run": RUNS[run]}
        found.append(made.model_copy(update=changes | more))

    for number, each in enumerate(history):
        if len(each) == 3:
            add(each[0], 0, each[1], each[2])
            continue
        round, boot, code, count, statuses = each
        for position, run in enumerate((0, 1, 0)[:count]):
            more = {"round": round, "baseline": not run, "second": position == 2}
            place = in_round(position, 3, str(number), **more)
            repeat = round if run else 2 * round + (position == 2)
            where = {"block": place, "environment": {"boot_id": boot}}
            add(run, repeat, code, statuses[position], **where)
    return found


@given(st.lists(EXECUTIONS | ALONE, max_size=8))
def test_what_holds_for_every_history(history: list[tuple[Any, ...]]) -> None:
    attempts = attempts_of(history)
    selection = select_attempts(attempts)
    lengths = Counter(place_of(each).execution for each in attempts if each.block)
    shown = [each for found in selection.shown.values() for each in found]
    assert len({id(each) for each in shown}) == len(shown)
    in_rounds = [each for each in shown if selection.is_in_round(each)]
    assert all(lengths[place_of(each).execution] == 3 for each in in_rounds)
    # Tables never mix rounds of old and new code, and show a round once in an allocation.
    for run in RUNS:
        assert len({each.source_hash for each in in_rounds if each.run == run}) <= 1
    places = [(task_of(each), allocation_of(each)) for each in in_rounds]
    assert len(set(places)) == len(places)
    # Without a complete round, the best attempt counts.
    for task, found in selection.shown.items():
        if not any(each.run == task[0] for each in in_rounds):
            own = [each for each in attempts if task_of(each) == task]
            assert found == ([each for each in own if each.status is Status.ok] or own)[-1:]
    # A result is hidden only for a reason, and then a run has a result in a round.
    tasks = {(each.run, each.repeat) for each in attempts}
    for each in attempts:
        reason = selection.reason(each, selection.is_shown(each), tasks, ())
        is_shown = reason == "its round is complete" or reason.startswith("latest attempt")
        assert is_shown == selection.is_shown(each)
        if each.status is Status.ok and not selection.shown.get(task_of(each)):
            why = selection.withheld[task_of(each)]
            assert why in (AGAIN, INCOMPLETE, OLDER_CODE, OLDER_ROUND, NO_BLOCK)
            assert any(other.run == each.run for other in in_rounds)
    # Verdicts need rounds in which every run has its latest code.
    judged = judged_executions(attempts)
    assert len({(a, place_of(e[0]).round) for a, e in judged}) == len(judged)
    for run in RUNS:
        codes = {r.source_hash for _, execution in judged for r in execution if r.run == run}
        assert len(codes) <= 1
    # An interrupted execution changes nothing that is shown of complete rounds.
    cut = attempts_of([*history, (0, "x", "old", 1, (Status.ok,) * 3)])
    again = select_attempts(cut)
    kept = [each for found in again.shown.values() for each in found if again.is_in_round(each)]
    assert {each.started_at for each in kept} == {each.started_at for each in in_rounds}


def attempt(outcome: str, **changes: Any) -> Record:
    """Return an attempt with a status, or one that crashed by a signal."""
    status = "killed" if outcome.startswith("SIG") else outcome
    kind = outcome if outcome.startswith("SIG") else "RuntimeError"
    made = record(toy_run(0), ok(1.0) if status == "ok" else failed(status, kind))
    return made.model_copy(update=changes)


@pytest.mark.parametrize(
    ("outcomes", "done", "done_with_retry"),
    [
        ("", False, False),
        ("ok", True, True),
        ("killed", False, False),
        ("preempted", False, False),
        ("cancelled", False, False),
        ("oom", True, False),
        ("timeout", True, False),
        ("error", True, False),
        ("wrong", True, False),
        ("unsupported", True, True),
        ("ok error", True, True),  # a later failure does not undo a result
        ("ok killed", True, True),
        ("error ok", True, True),
        ("error killed", False, False),  # the latest attempt was interrupted
        ("killed error", True, False),
        ("unsupported cancelled", False, False),
        ("SIGSEGV SIGABRT", False, False),
        ("SIGSEGV SIGABRT SIGBUS", True, False),  # the next attempt would crash, too
        ("SIGSEGV killed SIGSEGV SIGSEGV", False, False),
        ("SIGKILL SIGKILL SIGKILL", False, False),  # from outside
    ],
)
def test_what_is_executed_again(outcomes: str, done: bool, done_with_retry: bool) -> None:
    attempts = [attempt(outcome) for outcome in outcomes.split()]
    assert is_done(attempts) is done
    assert is_done(attempts, retry_failed=True) is done_with_retry


@pytest.mark.parametrize(
    ("outcome", "own", "of_another", "usable"),
    [
        ("ok", True, False, True),
        ("error", True, False, False),
        ("killed", True, False, False),
        ("cancelled", False, False, False),
        ("preempted", False, False, False),
    ],
)
def test_what_a_job_keeps(outcome: str, own: bool, of_another: bool, usable: bool) -> None:
    made = attempt(outcome)
    assert is_done_in_job(made, made.submission) is own
    assert is_done_in_job(made, "another") is of_another
    assert is_done_in_job(made, "another", usable=True) is usable


HOT = {"forward": {"throttle": {"hw_thermal_slowdown": 0.1}}}
CAPPED = {"forward": {"throttle": {"sw_power_cap": 1.0}}}


@pytest.mark.parametrize(
    ("executions", "is_complete"),
    [
        (["ok ok"], True),
        (["ok"], False),
        (["ok", "ok"], False),  # attempts of different executions are not paired
        (["ok oom"], True),
        (["ok killed"], False),
        (["ok SIGSEGV"], True),
        (["ok ok", "ok killed"], False),  # the latest complete execution counts
        (["ok killed", "ok ok"], True),
        (["ok ok", "ok"], True),
        (["ok hot"], False),
        (["ok hot", "ok ok"], True),
        (["ok hot", "ok killed", "hot ok"], False),
        (["ok hot", "ok hot", "hot ok"], True),  # three times are enough
        (["ok capped"], True),  # the power limit is a property of the GPU
    ],
)
def test_rounds_that_are_executed_again(executions: list[str], is_complete: bool) -> None:
    block = Block("block", RUNS[0], RUNS, rounds=1, aa=False)
    attempts = []
    for number, outcomes in enumerate(executions):
        for position, outcome in enumerate(outcomes.split()):
            conditions = {"hot": HOT, "capped": CAPPED}.get(outcome, {})
            made = attempt(
                "ok" if conditions else outcome,
                run=RUNS[position],
                block=in_round(position, 2, str(number)),
                conditions=conditions,
                started_at=float(number),
            )
            attempts.append(made)
    assert complete_rounds(block, attempts, is_done_in_round) == ({0} if is_complete else set())
