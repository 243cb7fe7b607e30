"""Comparisons of measured times: within one results folder, or of two folders.

In one folder, each run is compared with the baseline of its block. docs/verdicts.md explains the
verdicts and the exit codes.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.errors import CommandError
from jobs.formatting import counted, relative
from jobs.frame.recorded import recorded_value
from jobs.results.manifest import Manifest
from jobs.results.run_states import Observation
from jobs.verdicts.block_cells import BlockCells, block_cells, gpus_of
from jobs.verdicts.cell import Cell
from jobs.verdicts.folder_cells import (
    Side,
    common_results,
    folder_cells,
    same_attempts,
    sweep_margin,
)
from jobs.verdicts.judge import MARGIN, decide
from jobs.verdicts.pairs import Pair

NO_ROUNDS = (
    "it has no paired rounds. To measure runs in turn, add the key `blocks` to the sweep, or "
    "submit it with --against REV to compare with another version of the code"
)


@dataclass(frozen=True)
class Comparison:
    """The verdicts of a comparison, and what they rest on."""

    cells: list[Cell]
    heading: list[str]  # lines above the table
    notes: list[str] = field(default_factory=list)  # lines below the table

    @property
    def exit_code(self) -> int:
        """0: every cell is same or faster; 1: slower or broken; 3: undecided or unpaired.

        Cells that are fixed, new or gone have no influence, and neither have runs that cannot be
        measured.
        """
        verdicts = [cell.judged for cell in self.cells if cell.judged is not None]
        code = decide(verdicts) if verdicts else 0
        if code == 1 or any(cell.verdict == "broken" for cell in self.cells):
            return 1
        if any(cell.verdict == "unpaired" or cell.pending for cell in self.cells):
            return 3
        if not verdicts and not any(cell.verdict == "fixed" for cell in self.cells):
            return 3
        return code


def require_margin(margin: float) -> None:
    """Raise CommandError if a margin is not valid."""
    if not 0 < margin < 1:  # also False for NaN
        raise CommandError(f"--margin must be greater than 0 and less than 1, got {margin}")


def compare_blocks(
    observation: Observation, margin: float | None = None, chosen: Collection[str] | None = None
) -> Comparison:
    """Compare each run in a results folder with the baseline of its block.

    Args:
        observation: the folder, read with `read_short`. Its stale tasks are told, see `with_stale`.
        margin: relative difference up to which two times count as the same. None: that of the
            sweep, or 0.01.
        chosen: ids of the runs that are compared. None: all.

    Raises:
        CommandError: if the folder has no records or no blocks, or no chosen run is in a block.
    """
    folder = observation.folder
    _require_records(folder, len(observation.records))
    has_blocks = any(manifest.blocks for manifest in observation.manifests)
    if not has_blocks and all(record.block is None for record in observation.records):
        raise CommandError(
            f"{folder} cannot be compared with itself: {NO_ROUNDS}. To compare two folders, name "
            "both"
        )
    used = margin or sweep_margin(observation) or MARGIN
    found = block_cells(observation, used, chosen)
    if not found.cells:
        raise CommandError(f"{folder} has no run in a block, other than baselines, to compare")
    return Comparison(
        found.cells,
        [*_block_heading(observation, found), *_only_run(observation, found.cells)],
        [
            *_basis(observation, found),
            *_decision(found.cells, used, observation.manifests),
            *_broken(found.cells, folder),
        ],
    )


def compare_folders(
    before: Side,
    after: Side,
    margin: float | None = None,
    chosen: Collection[str] | None = None,
) -> Comparison:
    """Compare the times of all runs in two results folders.

    Args:
        margin: relative difference up to which two times count as the same, for paired runs. None:
            that of the sweep of `after`, or 0.01.
        chosen: ids of the runs that are compared. None: all.

    Raises:
        CommandError: if a folder has no records, or the folders have no run in common.
    """
    if before.folder == after.folder:
        raise CommandError(
            f"BEFORE and AFTER must be different folders, got {before.folder} twice. To compare "
            "the runs of its blocks, name it once"
        )
    for side in (before, after):
        _require_records(side.folder, side.records)
    used = margin or after.margin or MARGIN
    cells = folder_cells(before, after, used, chosen)
    common = common_results(before, after)
    if not common and not any(cell.judged for cell in cells):
        raise CommandError(_unrelated(before, after))
    heading = []
    apart = len(before.results) + len(after.results) - 2 * common
    if apart:
        heading.append(f"{counted(common, 'run')} in both folders, {apart} only in one of them.")
    notes = []
    if any(cell.verdict == "unpaired" for cell in cells):
        notes.append(
            "Unpaired: the folders were not measured in turn, so there is no verdict. Intervals "
            "come from stored noise floors, see docs/verdicts.md. For a verdict, submit with "
            "--against."
        )
        known = {c.device: None for c in cells if c.verdict == "unpaired" and c.low is not None}
        unknown = {c.device: None for c in cells if c.verdict == "unpaired" and c.low is None}
        if missing := ", ".join(unknown):
            some = "some benchmarks on " if known.keys() & unknown.keys() else ""
            notes.append(
                f"No noise floor is stored for {some}{missing}, so ratios have no interval: any "
                "of them may be noise."
            )
    if repeated := same_attempts(before, after):
        have = "has" if repeated == 1 else "have"
        notes.append(f"{counted(repeated, 'run')} {have} the same records in both folders.")
    notes += [*_decision(cells, used), *_broken(cells, after.folder)]
    return Comparison(cells, heading, notes)


def _require_records(folder: Path, count: int) -> None:
    if not count:
        raise CommandError(
            f"{folder} has no records, so there is nothing to compare; "
            f"python -m jobs status {folder} shows why"
        )


def _unrelated(before: Side, after: Side) -> str:
    what = f"{before.folder} and {after.folder} have no run in common"
    runs = {run for run, _ in before.results} & {run for run, _ in after.results}
    if not runs:
        return f"{what}: their benchmarks, versions or parameters differ"
    here, there = (
        ", ".join(sorted({device for _, device in side.results if device}))
        for side in (before, after)
    )
    return f"{what} on the same kind of device: got {here} and {there}"


def _block_heading(observation: Observation, found: BlockCells) -> list[str]:
    """Return the lines that say what is compared with what, and which commit is which."""
    baselines = list(dict.fromkeys(cell.baseline for cell in found.cells))
    checkouts = {
        name: checkout
        for manifest in observation.manifests
        for name, checkout in manifest.checkouts.items()
    }
    lines = []
    for label in baselines:
        other = checkouts.get(label.removeprefix("code="))
        if other is None:
            continue
        pairs = [pair for pair in found.pairs if pair.baseline_checkout == other.name]
        state = other.state.get("commit")
        where = f"commit {state[:10]}" if isinstance(state, str) else "commit unknown"
        changed = ", with changes" if other.state.get("dirty") else ""
        name = "" if isinstance(state, str) and state.startswith(other.name) else f"{other.name}, "
        candidates = {pair.candidate for pair in pairs}
        since = (
            " It has changed since." if candidates & {run for run, _ in observation.stale} else ""
        )
        lines.append(
            f"before: the other checkout ({name}{where}{changed}); "
            f"after: the working tree as measured ({_commits(observation, candidates)}).{since}"
        )
    plain = [label for label in baselines if label.removeprefix("code=") not in checkouts]
    if len(plain) == 1:
        lines.append(f"before: the baseline of the block ({plain[0]}); after: the run.")
    elif plain:
        lines.append("before: the baseline of the block; after: the run.")
    return lines


def _only_run(observation: Observation, cells: list[Cell]) -> list[str]:
    """Return a line that names the run if all cells are of one run in two versions of the code.

    The table then has no column for a parameter.
    """
    runs = {cell.run.id: cell.run for cell in cells}
    if len(runs) > 1 or any(cell.baseline_run and not cell.baseline_run.checkout for cell in cells):
        return []
    names = observation.manifests[-1].sweep.parameters()
    return [f"run: {run.label(names)}" for run in runs.values()]


def _broken(cells: list[Cell], folder: Path) -> list[str]:
    """Return a line that says how to see why the first broken run failed."""
    broken = [cell.run.id for cell in cells if cell.verdict == "broken"]
    place = shlex.quote(str(relative(folder)))
    return [f"Why broken: python -m jobs logs {run[:8]} --in {place}" for run in broken[:1]]


def _commits(observation: Observation, runs: set[str]) -> str:
    found = dict.fromkeys(
        recorded_value(record, "commit")
        for record in observation.records
        if record.run in runs and record.block is not None
    )
    return f"commit {', '.join(found)}" if found else "not measured"


def _basis(observation: Observation, found: BlockCells) -> list[str]:
    """Return the lines that say how much was measured, and where."""
    judged = [cell.judged for cell in found.cells if cell.judged is not None]
    if not judged:  # nothing is measured, or all that is measured is broken
        return []
    rounds = sorted({verdict.rounds for verdict in judged})
    allocations = {each.allocation for pair in found.pairs for each in pair.rounds}
    gpus = gpus_of(observation.records, found.pairs)
    number = len({gpu for one in gpus for gpu in one})
    parts = [
        _span(rounds, "round"),
        f"{_processes(found.pairs)} processes",
        counted(number, "GPU") if number else "CPU",
        counted(len(allocations), "allocation"),
    ]
    columns = (
        "ratio: after / before, the geometric mean over rounds; before, after: medians over "
        "processes. Their quotient can differ from the ratio."
    )
    return [f"{', '.join(parts)}.", columns, _floor_text(found.cells)]


def _processes(pairs: Iterable[Pair]) -> int:
    """Return the number of processes in the rounds of some pairs."""
    candidates: dict[tuple[str, str, str], int] = {}
    baselines: dict[tuple[str, str, str], int] = {}
    for pair in pairs:
        of_candidate = (pair.block, pair.candidate, pair.device)
        of_baseline = (pair.block, pair.baseline, pair.device)
        # All phases of a run are timed in the same processes.
        candidates[of_candidate] = max(candidates.get(of_candidate, 0), len(pair.rounds))
        count = sum(len(round.baseline) for round in pair.rounds)
        baselines[of_baseline] = max(baselines.get(of_baseline, 0), count)
    return sum(candidates.values()) + sum(baselines.values())


def _floor_text(cells: Iterable[Cell]) -> str:
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
    return f"A/A floor (difference that the same code shows): {', '.join(texts)}."


def _floor(floor: float) -> str:
    """Return a floor in percent. Above 100% its value says nothing but that noise is large."""
    return f"{floor:.2%}" if floor <= 1 else ">100%"


def _decision(cells: list[Cell], margin: float, manifests: Sequence[Manifest] = ()) -> list[str]:
    """Return the lines on the margin, the adjustment for many cells, and undecided cells.

    `manifests` are those of the folder whose blocks are compared, from the oldest to the newest.
    """
    judged = [cell.judged for cell in cells if cell.judged is not None]
    if not judged:
        return []
    lines = [f"Margin of the verdict same: {margin:.2%}."]
    slower = sum(verdict.verdict == "slower" for verdict in judged)
    if slower and decide(judged) != 1:
        lines.append(
            f"{counted(slower, 'cell')} slower, but not after the adjustment for "
            f"{counted(len(judged), 'cell')}: more rounds are needed."
        )
    unsure = [verdict for verdict in judged if verdict.verdict == "unsure"]
    if not unsure:
        return lines
    needed = sorted(v.rounds_needed for v in unsure if v.rounds_needed is not None)
    single = sum(verdict.rounds == verdict.allocations for verdict in unsure)
    open_ended = len(unsure) - len(needed) - single
    several = any(verdict.allocations > 1 for verdict in unsure)
    if needed:
        total = needed[-1] * max(verdict.allocations for verdict in unsure)
        per = " in each allocation" if several else ""
        lines.append(
            f"{_span(sorted({needed[0], needed[-1]}), 'round')}{per} would probably decide "
            f"{len(needed)} of {len(unsure)} unsure: {_more_rounds(manifests, total)}"
        )
    if single:
        lines.append(f"{single} unsure with a single round: at least 2 rounds are needed.")
    if open_ended > 0:
        lines.append(
            f"{open_ended} unsure that 1000 rounds would not decide: the difference is near the "
            "margin or the A/A floor. Use longer runs, a quieter machine or another --margin, see "
            "docs/verdicts.md#measured."
        )
    return lines


def _more_rounds(manifests: Sequence[Manifest], rounds: int) -> str:
    """Return the command that measures more rounds of the latest submission with blocks."""
    for manifest in reversed(manifests):
        words = shlex.split(manifest.command)
        if not manifest.blocks or not {"jobs.submit", "submit"} & set(words):
            continue
        kept = [word for word in words if not word.startswith("blocks.rounds=")]
        # After a commit, --against HEAD would be another version of the code.
        for i, word in enumerate(kept):
            option, equals, given = word.partition("=")
            if option == "--against" and not Path(given if equals else kept[i + 1]).is_dir():
                kept[i : i + 1 if equals else i + 2] = ["--against", *manifest.checkouts]
        return shlex.join([*kept, f"blocks.rounds={rounds}"])
    return f"submit again with blocks.rounds={rounds}."


def _span(numbers: list[int], noun: str) -> str:
    """Return the range of sorted numbers with a noun, such as `3 to 5 rounds`."""
    last = counted(numbers[-1], noun)
    return last if len(numbers) == 1 else f"{numbers[0]} to {last}"
