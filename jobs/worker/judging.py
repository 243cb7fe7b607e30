"""Asks after a round whether a block is decided, and saves the answer in the folder of the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from jobs.block import FEWEST_ROUNDS, Block
from jobs.printing import say
from jobs.results.judgements import Judgement, write_judgement
from jobs.results.manifest import Manifest

JUDGING_S = 300.0  # time limit of a process that judges a block


def is_decided(manifest: Manifest, job_folder: Path, block: Block, rounds: int, late: bool) -> bool:
    """Return whether a block is decided after a number of complete rounds, and save this.

    `late` tells that the job has no time for another round. This is saved, too.
    """
    found = _judged(manifest, block) if rounds >= FEWEST_ROUNDS else None
    if found is None and not late:
        return False
    if found is None:
        found = Judgement(rounds=rounds, cells=0, undecided=["all"], margin=None, phases=[])
    try:
        write_judgement(job_folder, block.id, found.model_copy(update={"out_of_time": late}))
    except OSError as error:  # a full disk must not end the job
        say(f"cannot save what block {block.id} says: {error}", sys.stdout)
    return found.is_decided


def _judged(manifest: Manifest, block: Block) -> Judgement | None:
    """Judge a block in another process, which imports numpy and scipy. None if it fails."""
    command = [sys.executable, "-m", "jobs.verdicts.decided", str(manifest.path), block.id]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=JUDGING_S)
        return Judgement.model_validate_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValidationError) as error:
        say(f"cannot judge block {block.id}, so it continues: {error}", sys.stdout)
        return None
