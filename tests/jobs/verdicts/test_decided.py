"""When a worker stops to measure a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.results.judgements import Judgement
from jobs.results.record_reader import read_records
from jobs.results.run_states import observe
from jobs.verdicts.decided import judge_block
from tests.jobs.compared_folders import MODES, Fate, blocks, measure, noisy
from tests.jobs.results_folder import Outcome, failed, ok

ONE = "grid: {size: [1], mode: [fast, exact]}\n"


def judged(tmp_path: Path, outcome: Fate, rounds: int = 5, *phases: str) -> Judgement:
    """Return the judgement on a block with this number of rounds."""
    tmp_path.mkdir(exist_ok=True)
    folder = blocks(tmp_path, outcome, ONE + MODES.replace("5", str(rounds)))
    (block,) = observe(folder.path).manifests[-1].blocks
    return judge_block(read_records(folder.path)[0], block, phases=phases)


def test_a_block_is_decided_from_the_third_round(tmp_path: Path) -> None:
    slow = noisy(1.3)
    assert judged(tmp_path / "two", slow, 2).undecided
    assert judged(tmp_path / "three", slow, 3).is_decided


def test_cells_that_cannot_be_decided_do_not_keep_a_block_open(tmp_path: Path) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        return failed("wrong" if repeat == 2 else "error") if params["mode"] == "fast" else ok(1)

    assert judged(tmp_path, outcome).is_decided


def test_a_phase_that_no_run_has_is_never_decided(tmp_path: Path) -> None:
    found = judged(tmp_path, noisy(1.3), 5, "forwards")
    assert found.undecided == ["forwards: no run has this phase"]


def test_rounds_of_other_devices_and_hosts_do_not_count(tmp_path: Path) -> None:
    """A round that was measured on two hosts is one round."""
    folder = blocks(tmp_path, noisy(1.3, sigma=0.2), ONE + MODES)
    (manifest,) = observe(folder.path).manifests
    for boot in ("a", "b"):
        measure(folder, noisy(1.3), boot, device="cpu: another")
    found = judge_block(read_records(folder.path)[0], manifest.blocks[0])
    assert found.is_decided and found.rounds == 5
