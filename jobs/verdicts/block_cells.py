"""Compares each run of a results folder with the baseline of its block."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

from jobs.formatting import format_scalar
from jobs.results.counting import judged_executions
from jobs.results.record import Record
from jobs.results.run_states import Observation, TaskState
from jobs.run import Run, varying
from jobs.status import Status
from jobs.verdicts.cell import Cell
from jobs.verdicts.judge import Round, aa_floor, floor_of_block, judge
from jobs.verdicts.pairs import Pair, paired_rounds

PhaseOnDevice = tuple[str, str]  # phase, name of the device
INCOMPLETE = "no complete round"
# Statuses with which a candidate fails by itself, and not because it was stopped.
_LASTING = (Status.error, Status.wrong, Status.oom, Status.timeout)


@dataclass(frozen=True)
class BlockCells:
    """The comparison of the runs in a folder with the baselines of their blocks."""

    cells: list[Cell]
    pairs: list[Pair]  # those of the cells, with at least one round


def aa_floors(pairs: Iterable[Pair]) -> dict[PhaseOnDevice, float]:
    """Return the A/A floor of each phase on each kind of device, see `aa_floor`."""
    blocks: dict[PhaseOnDevice, dict[tuple[str, str], tuple[Round, ...]]] = {}
    for pair in pairs:
        of_phase = blocks.setdefault((pair.phase, pair.device), {})
        # The candidates of a block have the same baseline, but some may have failed in a round.
        key = (pair.block, pair.baseline)
        of_phase[key] = max(of_phase.get(key, ()), pair.rounds, key=len)
    floors = {key: aa_floor(of_phase.values()) for key, of_phase in blocks.items()}
    return {key: floor for key, floor in floors.items() if floor is not None}


def block_cells(
    observation: Observation, margin: float, chosen: Collection[str] | None = None
) -> BlockCells:
    """Compare each run with the baseline of its block.

    The A/A floors come from all blocks in the folder, also from those that are not chosen. If that
    of a block alone is smaller, it applies to this block. `margin` is the relative difference up to
    which two times count as the same, and `chosen` are the run ids to compare, or None for all.

    There is a cell for each run, baseline, kind of device and phase. A run without times has one
    cell with the phase "". The folder is read with `read_short`.
    """
    tasks = _by_run(observation.tasks)
    pairs = [
        pair
        for pair in paired_rounds(observation.records)
        if pair.candidate in tasks and pair.baseline in tasks
    ]
    floors = aa_floors(pairs)
    runs = {run_id: states[0].run for run_id, states in tasks.items()}
    baselines = _Baselines(observation, runs)
    # Not those of older code or of an earlier execution: the run may be broken since.
    measured = {
        (record.run, record.device)
        for _, execution in judged_executions(observation.records)
        for record in execution
        if record.measurements is not None and record.measurements.samples_ms
    }
    kept = [pair for pair in pairs if chosen is None or pair.candidate in chosen]
    cells: list[Cell] = []
    for _, group in groupby(kept, lambda p: (p.block, p.candidate, p.baseline, p.device)):
        of_run = list(group)
        if not any(pair.rounds for pair in of_run):
            of_run = [replace(of_run[0], phase="")]
        for pair in of_run:
            cell = Cell(
                runs[pair.candidate],
                pair.device,
                pair.phase,
                "not measured",
                baselines.label(pair.baseline, pair.candidate),
                baseline_run=runs[pair.baseline],
            )
            if pair.rounds:
                floor = floors.get((pair.phase, pair.device))
                cells.append(judged_cell(cell, pair, margin, floor))
            else:
                cells.append(_cell_without_rounds(cell, pair, measured))
    cells += _unmeasured(observation, tasks, kept, chosen, baselines)
    return BlockCells(cells, [pair for pair in kept if pair.rounds])


def judged_cell(cell: Cell, pair: Pair, margin: float, floor: float | None) -> Cell:
    """Return a cell with the verdict on the rounds of a pair.

    A candidate that failed in more rounds than it was measured in is broken. Failures that were
    repaired do not count, see `Pair`. The pair has at least one round. For `margin` and `floor`,
    see `judge.judge`.
    """
    judged = judge(pair.rounds, margin, floor_of_block(pair.rounds, floor))
    left_out = sum(pair.left_out.values())
    detail = f"{left_out} of {left_out + judged.rounds} rounds: {_reason(pair)}" if left_out else ""
    failed = sum(
        count - pair.repaired.get(reason, 0)
        for reason, count in pair.left_out.items()
        if reason in _LASTING
    )
    if failed > judged.rounds:
        return replace(cell, verdict="broken", detail=detail)
    return replace(
        cell,
        verdict=judged.verdict,
        before=median(time for round in pair.rounds for time in round.baseline),
        after=median(round.candidate for round in pair.rounds),
        ratio=judged.ratio,
        low=judged.low,
        high=judged.high,
        detail=detail,
        judged=judged,
    )


def _cell_without_rounds(cell: Cell, pair: Pair, measured: set[tuple[str, str]]) -> Cell:
    """Return the cell of a run that has no round with both times, such as broken.

    `measured` has the runs and devices that have a time of any phase, in the executions that count.
    """
    is_measured = (pair.candidate, pair.device) in measured
    baseline_is_measured = (pair.baseline, pair.device) in measured
    reason = _reason(pair)
    status = reason.removeprefix("baseline: ")
    known = status in Status.__members__
    if baseline_is_measured and not is_measured and known and status != Status.unsupported:
        return replace(cell, verdict="broken", detail=reason)
    if is_measured and not baseline_is_measured and known:
        return replace(cell, verdict="fixed", detail=reason)
    interrupted = known and Status(status).runs_again_on_submit
    return replace(cell, detail=reason, pending=interrupted)


def _reason(pair: Pair) -> str:
    """Return the commonest reason why a round has not both times."""
    return max(pair.left_out, key=lambda reason: pair.left_out[reason], default=INCOMPLETE)


def _unmeasured(
    observation: Observation,
    tasks: dict[str, list[TaskState]],
    pairs: list[Pair],
    chosen: Collection[str] | None,
    baselines: _Baselines,
) -> list[Cell]:
    """Return a cell for each run in a block that has no complete round, or no times at all."""
    known = {(pair.block, pair.candidate) for pair in pairs}
    # A later submission can compare a run with another baseline. Its earlier block stays as it is.
    latest = {
        run_id: (block.id, block.baseline)
        for manifest in observation.manifests
        for block in manifest.blocks
        for run_id in block.runs
    }
    cells: dict[tuple[str, str], Cell] = {}
    for manifest in observation.manifests:
        for block in manifest.blocks:
            for run_id in block.runs:
                key = (block.id, run_id)
                selected = run_id in tasks and (chosen is None or run_id in chosen)
                obsolete = latest[run_id] != (block.id, block.baseline)
                if run_id == block.baseline or key in known or obsolete or not selected:
                    continue
                found = {state.status for state in tasks[run_id]}
                unfinished = {s for s in found if s.is_live or s.runs_again_on_submit}
                # All rounds are complete, but neither this run nor the baseline has a time.
                failed = found - unfinished - {Status.ok}
                reason = min(unfinished or failed, default=INCOMPLETE)
                cells[key] = Cell(
                    tasks[run_id][0].run,
                    "",
                    "",
                    "not measured",
                    baselines.label(block.baseline, run_id),
                    detail=str(reason),
                    pending=bool(unfinished) or not failed,
                    baseline_run=tasks[block.baseline][0].run if block.baseline in tasks else None,
                )
    return list(cells.values())


def _by_run(tasks: list[TaskState]) -> dict[str, list[TaskState]]:
    states: dict[str, list[TaskState]] = {}
    for task in tasks:
        states.setdefault(task.run.id, []).append(task)
    return states


class _Baselines:
    """Labels the baselines of blocks by what is compared, such as `implementation=sdpa_cudnn`."""

    def __init__(self, observation: Observation, runs: dict[str, Run]):
        self._runs = runs
        self._labels: dict[str, str] = {}
        for manifest in observation.manifests:
            for block in manifest.blocks:
                members = [runs[run_id] for run_id in block.runs if run_id in runs]
                if block.baseline in runs:
                    self._labels[block.baseline] = _label(runs[block.baseline], members)

    def label(self, baseline: str, candidate: str) -> str:
        """Return the label of a baseline. `candidate` is a run of its block."""
        known = self._labels.get(baseline)
        if known is not None:
            return known
        of_run = self._runs[baseline]
        return _label(of_run, [of_run, self._runs[candidate]])


def _label(baseline: Run, members: list[Run]) -> str:
    if baseline.checkout:
        return f"code={baseline.checkout}"
    names = [name for name in varying(members) if name in baseline.params]
    return " ".join(f"{name}={format_scalar(baseline.params[name])}" for name in names)


def gpus_of(records: Iterable[Record], pairs: Iterable[Pair]) -> set[tuple[str, ...]]:
    """Return the UUIDs of the GPUs on which the rounds of some pairs were measured.

    GPUs of executions that do not count, such as interrupted ones, are left out. There is a tuple
    for each set of GPUs that was used together. It is empty for the CPU.
    """
    measured = {(pair.block, round.allocation) for pair in pairs for round in pair.rounds}
    return {
        tuple(sorted(str(gpu.get("uuid", "")) for gpu in record.gpus))
        for allocation, execution in judged_executions(records)
        for record in execution
        if record.block is not None and (record.block.id, allocation) in measured
    }
