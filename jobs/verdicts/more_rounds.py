"""The command that measures more rounds of just the blocks whose cells are undecided."""

from __future__ import annotations

import json
import shlex
from itertools import accumulate
from pathlib import Path

from jobs.formatting import format_scalar, relative
from jobs.processes import without_options
from jobs.results.manifest import Manifest
from jobs.results.run_states import Observation
from jobs.run import Run, varying
from jobs.sweep.conditions import MAX_LENGTH
from jobs.verdicts.compared import Compared

MORE_ROUNDS = 5  # that the command adds


def command_for_more(cells: list[Compared], observation: Observation) -> str:
    """Return the command that measures more rounds of the blocks of some cells, or "".

    It is that of the latest submission that has one of the cells, for all the cells that it has.
    There is none while runs of the folder are queued or running.
    """
    if any(task.status.is_live for task in observation.tasks):
        return ""
    runs = {cell.run.id for cell in cells}
    for manifest in reversed(observation.manifests):
        blocks = [block for block in manifest.blocks if not runs.isdisjoint(block.runs)]
        if blocks and manifest.is_submit:
            break
    else:
        return ""
    kept = without_options(manifest.command, "--rounds", "--out", "--where", "--filter")
    kept = [w for w in kept if w != "--force" and not w.startswith("blocks.rounds=")]
    # After a commit, --against HEAD would be another version of the code.
    for i, word in enumerate(kept):
        option, equals, given = word.partition("=")
        if option == "--against" and not Path(given if equals else kept[i + 1]).is_dir():
            kept[i : i + 1 if equals else i + 2] = ["--against", *manifest.checkouts]
    judgements = observation.judgements
    done = [judgements[b.id].rounds if b.id in judgements else b.rounds for b in blocks]
    done += [cell.judged.rounds for cell in cells if cell.judged is not None]
    kept += ["--rounds", str(max(done) + MORE_ROUNDS), "--out", str(relative(manifest.folder))]
    own = [cell for cell in cells if cell.run.id in manifest.runs]
    condition = _condition(own, manifest)
    return shlex.join([*kept, "--where", condition] if condition else kept)


def _condition(cells: list[Compared], manifest: Manifest) -> str | None:
    """Return the condition that holds for the blocks of some cells, None for all blocks.

    If there are too many blocks for a condition, it holds for as many as it can.
    """
    keys = manifest.sweep.blocks
    compared = set(keys.interleave) if keys is not None else set()
    members = [manifest.runs[block.baseline] for block in manifest.blocks]
    names = [name for name in varying(members) if name not in compared]
    several = len({run.benchmark for run in members}) > 1
    wanted = {_equals(cell.run, names, several): None for cell in cells}
    if wanted.keys() >= {_equals(run, names, several) for run in members}:
        return manifest.sweep.filter
    given = f" and ({manifest.sweep.filter})" if manifest.sweep.filter else ""
    room = MAX_LENGTH - len(given) - len("()")
    lengths = accumulate(len(one) + len(" or ") for one in wanted)
    of_blocks = " or ".join(o for o, end in zip(wanted, lengths, strict=True) if end < room)
    return f"({of_blocks}){given}" if given else of_blocks


def _equals(run: Run, names: list[str], with_benchmark: bool) -> str:
    values = {"benchmark": run.benchmark} if with_benchmark else {}
    values |= {name: run.params[name] for name in names if name in run.params}
    texts = {
        name: json.dumps(value) if isinstance(value, str) else format_scalar(value)
        for name, value in values.items()
    }
    return " and ".join(f"{name} == {text}" for name, text in texts.items())
