"""Comparisons of measured times: within one results folder, or of two folders.

In one folder, each run is compared with the baseline of its block. docs/verdicts.md explains the
verdicts and the exit codes.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from jobs.errors import CommandError
from jobs.formatting import counted, format_range, relative
from jobs.frame.recorded import commit_or_reason
from jobs.results.record import Record, is_stale
from jobs.results.run_states import Observation
from jobs.verdicts.block_cells import block_cells, sweep_margin
from jobs.verdicts.compared import Compared
from jobs.verdicts.conditions import differences
from jobs.verdicts.folder_cells import Matched, folder_cells, matched
from jobs.verdicts.judge import LEVEL, Verdict, established
from jobs.verdicts.more_rounds import command_for_more

NO_ROUNDS = (
    "it has no paired rounds. The command tables shows times that were not measured in turn. To "
    "measure runs in turn, add the key `blocks` to the sweep, or submit it with --against REV to "
    "compare with another version of the code"
)
FAILED = ("broken", "wrong")  # verdicts on the whole run, for which the exit code is 1
DISTURBED = 0.1  # A/A floor above which a note is printed


@dataclass(frozen=True)
class Comparison:
    """The verdicts of a comparison, and what they rest on."""

    cells: list[Compared]
    heading: list[str]  # lines above the table
    notes: list[str] = field(default_factory=list)  # lines below the table

    @property
    def exit_code(self) -> int:
        """0: nothing is more than the margin slower, with 95% confidence; 1: something is; 3: else.

        A cell that is broken or wrong also gives 1, and one that is still to be measured 3. If no
        times are compared, it is 0 with a cell that is fixed, else 3.
        """
        verdicts = _verdicts(self.cells)
        if any(established(verdicts)) or any(cell.verdict in FAILED for cell in self.cells):
            return 1
        if undecided(self.cells) or any(cell.pending for cell in self.cells):
            return 3
        return 0 if verdicts or any(cell.verdict == "fixed" for cell in self.cells) else 3


def undecided(cells: Iterable[Compared]) -> list[Compared]:
    """Return the cells that may be slower by more than the margin, but are not established to."""
    timed = [(cell, cell.judged) for cell in cells if cell.judged is not None]
    slower = established([verdict for _, verdict in timed])
    return [
        cell
        for (cell, verdict), is_slower in zip(timed, slower, strict=True)
        if not is_slower and not verdict.not_slower
    ]


def _verdicts(cells: Iterable[Compared]) -> list[Verdict]:
    return [cell.judged for cell in cells if cell.judged is not None]


def compare_blocks(
    observation: Observation, margin: float | None = None, chosen: Collection[str] | None = None
) -> Comparison:
    """Compare each run in a results folder with the baseline of its block.

    Args:
        observation: the folder. Its stale tasks are told, see `with_stale`.
        margin: relative difference up to which two times count as the same. None: that of the
            sweep, or 0.01.
        chosen: ids of the runs that are compared. None: all.

    Raises:
        CommandError: if the folder has no records or no blocks, or no chosen run is in a block.
    """
    folder = observation.folder
    _require_records(observation)
    has_blocks = any(manifest.blocks for manifest in observation.manifests)
    if not has_blocks and all(record.block is None for record in observation.records):
        raise CommandError(
            f"{folder} cannot be compared with itself: {NO_ROUNDS}. To compare two folders, name "
            "both"
        )
    used = margin or sweep_margin(observation)
    cells = block_cells(observation, used, chosen)
    if not cells:
        raise CommandError(f"{folder} has no run in a block, other than baselines, to compare")
    heading = [*_block_heading(observation, cells), *_only_run(observation, cells)]
    notes = [*_basis(observation, cells), *_decision(cells, used, observation)]
    if live := sum(task.status.is_live for task in observation.tasks):
        notes.append(f"{counted(live, 'process')} of the folder are queued or running.")
    return Comparison(cells, heading, [*notes, *_broken(cells, folder)])


def compare_folders(
    before: Observation,
    after: Observation,
    margin: float | None = None,
    chosen: Collection[str] | None = None,
) -> Comparison:
    """Compare the times of all runs in two results folders.

    Args:
        margin: relative difference up to which two times count as the same. None: that of the sweep
            of `after`, or 0.01.
        chosen: ids of the runs that are compared. None: all.

    Raises:
        CommandError: if a folder has no records, or the folders have no run in common.
    """
    if before.folder == after.folder:
        raise CommandError(
            f"BEFORE and AFTER must be different folders, got {before.folder} twice. To compare "
            "the runs of its blocks, name it once"
        )
    for observation in (before, after):
        _require_records(observation)
    results = matched(before, after)
    both = [key for key, (a, b) in results.items() if a.statuses and b.statuses]
    if not both:
        raise CommandError(f"{before.folder} and {after.folder} {_unrelated(results)}")
    used = margin or sweep_margin(after)
    cells = folder_cells(before.runs | after.runs, results, used, chosen)
    measured = [
        (a.records, b.records)
        for (run, _), (a, b) in results.items()
        if a.records and b.records and (chosen is None or run in chosen)
    ]
    heading = []
    if apart := len(results) - len(both):
        heading.append(f"{counted(len(both), 'run')} in both folders, {apart} only in one of them.")
    if measured:
        heading += differences(*([r for pair in measured for r in pair[i]] for i in (0, 1)))
    notes = []
    if floors := sorted(each.floor for each in _verdicts(cells) if each.floor is not None):
        ends = dict.fromkeys(f"{floor:.1%}" for floor in (floors[0], floors[-1]))
        notes.append(
            "The folders were not measured in turn, so only a difference above the floor of "
            f"{' to '.join(ends)} counts. To find smaller ones, submit with --against."
        )
        notes.append(
            "before, after: geometric means over processes of the median of each, of several "
            "allocations over their means; ratio: after / before."
        )
    if repeated := sum(a == b for a, b in measured):
        have = "has" if repeated == 1 else "have"
        notes.append(f"{counted(repeated, 'run')} {have} the same records in both folders.")
    notes += [*_decision(cells, used), *_broken(cells, after.folder)]
    return Comparison(cells, heading, notes)


def _require_records(observation: Observation) -> None:
    if not observation.records:
        raise CommandError(
            f"{observation.folder} has no records, so there is nothing to compare; "
            f"python -m jobs status {observation.folder} shows why"
        )


def _unrelated(results: Matched) -> str:
    """Return why no run is in both folders."""
    sides = [{key for key, times in results.items() if times[i].statuses} for i in (0, 1)]
    before, after = ({run for run, _ in side} for side in sides)
    if before.isdisjoint(after):
        return "have no run in common: their benchmarks, versions or parameters differ"
    here, there = (", ".join(sorted({device for _, device in side if device})) for side in sides)
    return f"have no run in common on the same kind of device: got {here} and {there}"


def _block_heading(observation: Observation, cells: list[Compared]) -> list[str]:
    """Return the lines that say what is compared with what, and which commit is which."""
    baselines = list(dict.fromkeys(cell.baseline for cell in cells))
    checkouts = {
        f"code={name}": checkout
        for manifest in observation.manifests
        for name, checkout in manifest.checkouts.items()
    }
    lines = []
    for label in filter(checkouts.get, baselines):
        other = checkouts[label]
        commit = str(other.state.get("commit") or "unknown")
        name = "" if commit.startswith(other.name) else f"{other.name}, "
        changed = ", with changes" if other.state.get("dirty") else ""
        own = [cell for cell in cells if cell.baseline == label]
        after = [
            r for each in own for round in each.rounds for r in round.records if not r.checkout
        ]
        is_older = any(is_stale(record, observation.source_hashes) for record in after)
        since = " It has changed since." if is_older else ""
        lines.append(
            f"before: the other checkout ({name}commit {commit[:10]}{changed}); "
            f"after: the working tree as measured ({_commits(after)}).{since}"
        )
    if plain := [label for label in baselines if label not in checkouts]:
        which = f" ({plain[0]})" if len(plain) == 1 else ""
        lines.append(f"before: the baseline of the block{which}; after: the run.")
    return lines


def _only_run(observation: Observation, cells: list[Compared]) -> list[str]:
    """Return a line that names the run if all cells are of one run in two versions of the code.

    The table then has no column for a parameter.
    """
    runs = {cell.run.id: cell.run for cell in cells}
    if len(runs) > 1 or any(cell.baseline_run and not cell.baseline_run.checkout for cell in cells):
        return []
    names = observation.manifests[-1].sweep.parameters()
    return [f"run: {run.label(names)}" for run in runs.values()]


def _broken(cells: list[Compared], folder: Path) -> list[str]:
    """Return a line that says how to see why the first broken or wrong run failed."""
    failed = [cell for cell in cells if cell.verdict in FAILED]
    place = shlex.quote(str(relative(folder)))
    return [
        f"Why {cell.verdict}: python -m jobs logs {cell.run.id[:8]} --in {place}"
        for cell in failed[:1]
    ]


def _commits(records: Iterable[Record]) -> str:
    found = dict.fromkeys(map(commit_or_reason, records))
    return f"commit {', '.join(found)}" if found else "not measured"


def _basis(observation: Observation, cells: list[Compared]) -> list[str]:
    """Return the lines that say how much was measured, and where."""
    judged = _verdicts(cells)
    if not judged:  # nothing is measured, or all that is measured is broken
        return []
    rounds = [round for cell in cells for round in cell.rounds]
    allocations = {round.allocation for round in rounds}
    records = {id(record): record for round in rounds for record in round.records}
    gpus = len({str(gpu.get("uuid")) for record in records.values() for gpu in record.gpus})
    parts = [
        format_range({verdict.rounds for verdict in judged}, "round"),
        f"{len(records)} processes",
        counted(gpus, "GPU") if gpus else "CPU",
        counted(len(allocations), "allocation"),
    ]
    if stale := sum(is_stale(record, observation.source_hashes) for record in records.values()):
        parts.append(f"{stale} of {len(records)} processes with older code")
    columns = (
        "ratio: after / before, the geometric mean over rounds; before, after: medians over "
        "processes. Their quotient can differ from the ratio."
    )
    return [f"{', '.join(parts)}.", columns, _floor_text(cells)]


def _floor_text(cells: Iterable[Compared]) -> str:
    """Return the smallest and the largest A/A floor of each phase and device."""
    floors: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if cell.judged is not None and cell.judged.floor is not None:
            floors.setdefault((cell.phase, cell.device), []).append(cell.judged.floor)
    if not floors:
        return "A/A floor: not measured, so the margin is used instead."
    several = len({device for _, device in floors}) > 1
    texts = [
        f"{phase}{f' on {device}' if several else ''} "
        + " to ".join(dict.fromkeys(map(_floor, (min(found), max(found)))))
        for (phase, device), found in floors.items()
    ]
    line = f"A/A floor (difference that the same code shows): {', '.join(texts)}."
    if max(map(max, floors.values())) > DISTURBED:
        line += f" Above {DISTURBED:.0%}, something other than the code changes the times."
    return line


def _floor(floor: float) -> str:
    """Return a floor in percent. Above 100% its value says nothing but that noise is large."""
    return f"{floor:.2%}" if floor <= 1 else ">100%"


def _decision(
    cells: list[Compared], margin: float, observation: Observation | None = None
) -> list[str]:
    """Return the lines on the margin, and on undecided cells with the command that measures them.

    `observation` is the folder whose blocks are compared, or None for two folders.
    """
    if not _verdicts(cells):
        return []
    by_floor = observation is None and any(verdict.p is None for verdict in _verdicts(cells))
    what = "beyond the floor" if by_floor else f"significant at {LEVEL:.1%}"
    lines = [f"faster, slower: {what}. same: within {margin:.2%}. unsure: neither."]
    open_cells = undecided(cells)
    if not open_cells:
        return lines
    if single := sum(verdict.low is None for verdict in _verdicts(open_cells)):
        lines.append(f"{single} unsure with a single round: at least 2 rounds are needed.")
    line = f"Undecided: {counted(len(open_cells), 'cell')} may be more than {margin:.2%} slower."
    if observation is not None and (command := command_for_more(open_cells, observation)):
        line += f" To measure more rounds: {command}"
    return [*lines, line]
