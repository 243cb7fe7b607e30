"""Says which cells of a block are not decided yet. Workers stop to measure a block without any.

A worker imports neither numpy nor scipy. It calls `python -m jobs.verdicts.decided SUBMISSION
BLOCK`, which prints a `jobs.results.judgements.Judgement` as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from jobs.block import FEWEST_ROUNDS, Block
from jobs.results.counting import judged_executions, place_of
from jobs.results.judgements import Judgement
from jobs.results.manifest import read_manifest
from jobs.results.record import Record, present_last
from jobs.results.record_reader import RecordTail
from jobs.status import Status
from jobs.sweep.schema import Blocks
from jobs.verdicts.block_cells import judge_pairs
from jobs.verdicts.judge import MARGIN
from jobs.verdicts.pairs import paired_rounds

# Level of the tests for the verdict same. Workers test after each round, and by the noise of one
# block; a smaller level makes sure that `compare`, which knows all blocks, agrees in the end.
ONE_SIDED_OF_WORKERS = 0.02
# A candidate that ended so in the latest round is not executed again by the job.
_STUCK = (Status.unsupported, Status.oom, Status.timeout, Status.cancelled)
SUSTAINED = "_sustained"  # end of the names of phases that decide only if a sweep lists them


def judge_block(
    records: Sequence[Record],
    block: Block,
    margin: float | None = None,
    phases: Collection[str] = (),
) -> Judgement:
    """Judge a block by itself.

    Args:
        records: those of the runs of the block.
        margin: relative difference up to which two times count as the same. None: 0.01.
        phases: those that must be decided. Empty: all times but those of sustained phases.
    """
    measured = [e for _, e in judged_executions(records) if place_of(e[0]).id == block.id]
    # The folder can have rounds of other devices, which another job decides.
    latest = measured[-1] if measured else []
    device = latest[0].device if latest else ""
    stuck = {record.run for record in latest if record.status in _STUCK}
    own = [
        pair for pair in paired_rounds(records) if (pair.block, pair.device) == (block.id, device)
    ]
    wanted = [
        pair
        for pair in own
        if (pair.phase in phases if phases else not pair.phase.endswith(SUSTAINED))
        and pair.rounds
        and not pair.wrong
        and pair.candidate not in stuck
    ]
    judge_pairs(wanted, margin or MARGIN, ONE_SIDED_OF_WORKERS)
    undecided = [
        f"{pair.candidate[:8]} {pair.phase}"
        for pair in wanted
        if len(pair.rounds) < FEWEST_ROUNDS or not pair.verdict or pair.verdict.verdict == "unsure"
    ]
    if any(pair.rounds for pair in own):
        known = {pair.phase for pair in own}
        undecided += [f"{phase}: no run has this phase" for phase in phases if phase not in known]
    rounds = len({place_of(e[0]).round for e in measured if e[0].device == device})
    return Judgement(rounds=rounds, cells=len(wanted), undecided=undecided, margin=margin,
                     phases=sorted(phases))  # fmt: skip


def main(submission: str, block_id: str) -> None:
    manifest = read_manifest(Path(submission))
    block = next(block for block in manifest.blocks if block.id == block_id)
    keys = manifest.sweep.blocks or Blocks()
    records = RecordTail(manifest.folder, set(block.runs)).new()
    records.sort(key=lambda record: record.finished_at)
    records = present_last(records, {})
    print(judge_block(records, block, keys.margin, keys.phases).model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
