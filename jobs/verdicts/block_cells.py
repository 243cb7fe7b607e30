"""Compares each run of a results folder with the baseline of its block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

from jobs.formatting import counted, format_scalar
from jobs.frame.recorded import recorded_value
from jobs.results.counting import judged_executions
from jobs.results.run_states import Observation
from jobs.run import Run, varying
from jobs.status import Status
from jobs.verdicts.compared import Compared
from jobs.verdicts.judge import MARGIN, ONE_SIDED, Round, Verdict, aa_floor, floor_of_block, judge
from jobs.verdicts.pairs import Pair, paired_rounds


def block_cells(
    observation: Observation, margin: float, chosen: Collection[str] | None = None
) -> list[Compared]:
    """Compare each run with the baseline of its block.

    All blocks in the folder are judged together, also those that are not chosen: they show how
    large the noise is. `margin` is the relative difference up to which two times count as the same,
    and `chosen` are the run ids to compare, or None for all.

    There is a cell for each run, baseline, kind of device and phase. A run without times has one
    cell with the phase "".
    """
    runs = observation.runs
    chosen = runs.keys() if chosen is None else chosen
    labels = _labels(observation)
    # Not those of older code or of an earlier execution: the run may be broken since.
    measured = {
        (record.run, record.device)
        for _, execution in judged_executions(observation.records)
        for record in execution
        if record.measurements is not None and record.measurements.samples_ms
    }
    pairs = [pair for pair in _judged_pairs(observation, margin) if pair.candidate in chosen]
    timed = {_run_of(pair) for pair in pairs if pair.rounds}
    cells: dict[tuple[tuple[str, ...], str], Compared] = {}  # by run and phase
    for pair in pairs:
        phase = pair.phase if _run_of(pair) in timed else ""
        run, base = runs[pair.candidate], runs[pair.baseline]
        label = labels.get(base.id, "")
        cell = Compared(run, pair.device, phase, "", label, baseline_run=base, rounds=pair.rounds)
        cell = _with_verdict(cell, pair, base, measured)
        cells.setdefault((_run_of(pair), phase), cell)
    return [*cells.values(), *_unmeasured(observation, pairs, chosen, labels)]


@lru_cache(maxsize=1)
def verdicts_of(observation: Observation) -> dict[tuple[str, str, str, str], Verdict]:
    """Return the verdicts in a folder by candidate, baseline (run ids), phase and kind of device.

    Tables print them, so that they say the same as `compare`.
    """
    return {
        (pair.candidate, pair.baseline, pair.phase, pair.device): pair.verdict
        for pair in _judged_pairs(observation, sweep_margin(observation))
        if pair.verdict is not None and not pair.wrong
    }


def _judged_pairs(observation: Observation, margin: float) -> list[Pair]:
    """Return the pairs of runs that count, such as those of the latest version of a benchmark."""
    known = observation.runs.keys()
    found = paired_rounds(observation.records)
    found = [pair for pair in found if {pair.candidate, pair.baseline} <= known]
    judge_pairs(found, margin)
    return found


def sweep_margin(observation: Observation) -> float:
    """Return the margin of the latest sweep of a folder that has the key `blocks`, or 0.01."""
    keys = (manifest.sweep.blocks for manifest in reversed(observation.manifests))
    return next((blocks.margin for blocks in keys if blocks), None) or MARGIN


def judge_pairs(pairs: Sequence[Pair], margin: float, one_sided: float = ONE_SIDED) -> None:
    """Give pairs their verdicts. Those without rounds get none.

    The pairs on one kind of device share what they show about noise: a variance, see `judge`, and
    each phase a floor, see `aa_floor`.
    """
    blocks: dict[tuple[str, str], dict[tuple[str, str], list[Round]]] = {}
    for pair in pairs:
        of_phase = blocks.setdefault((pair.phase, pair.device), {})
        # The candidates of a block have the same baseline, but some may have failed in a round.
        key = (pair.block, pair.baseline)
        of_phase[key] = max(of_phase.get(key, []), pair.rounds, key=len)
    floors = {key: aa_floor(of_phase.values()) for key, of_phase in blocks.items()}
    for device in {device for _, device in blocks}:
        own = [pair for pair in pairs if pair.rounds and pair.device == device]
        limits = [floor_of_block(pair.rounds, floors[pair.phase, device]) for pair in own]
        found = judge([pair.rounds for pair in own], margin, limits, one_sided)
        for pair, verdict in zip(own, found, strict=True):
            pair.verdict = verdict


def _run_of(pair: Pair) -> tuple[str, str, str, str]:
    return pair.block, pair.candidate, pair.baseline, pair.device


def _with_verdict(
    cell: Compared, pair: Pair, baseline: Run, measured: set[tuple[str, str]]
) -> Compared:
    """Return the cell of a pair with its verdict, such as faster, broken or wrong.

    `measured` has the runs and devices that have a time of any phase, in the executions that count.
    """
    if pair.wrong == "baseline":
        verdict = "fixed" if baseline.checkout else "not measured"
        return replace(cell, verdict=verdict, detail="baseline: wrong")
    if pair.wrong:
        passed = f"although {counted(len(pair.rounds), 'round')} passed" if pair.rounds else ""
        return replace(cell, verdict="wrong", detail=passed)
    judged = pair.verdict
    if judged is None:
        is_measured = (pair.candidate, pair.device) in measured
        baseline_is_measured = (pair.baseline, pair.device) in measured
        cell = replace(cell, verdict="not measured", detail=pair.reason)
        status = Status.__members__.get(pair.reason.removeprefix("baseline: "))
        if status is None:
            return cell
        if baseline_is_measured and not is_measured and status is not Status.unsupported:
            return replace(cell, verdict="broken")
        if is_measured and not baseline_is_measured:
            return replace(cell, verdict="fixed")
        return replace(cell, pending=status.runs_again_on_submit)
    left_out, details = len(pair.left_out), []
    if left_out:
        details.append(f"{left_out} of {left_out + judged.rounds} rounds: {pair.reason}")
    if pair.failures > judged.rounds:
        return replace(cell, verdict="broken", detail=details[0])
    if judged.unlike:
        details.append(_unlike(pair.rounds, judged))
    elif judged.verdict == "unsure":
        details += judged.why_unsure
    elif judged.verdict == "slower" and not judged.beyond_margin:
        details.append("by less than the margin")
    if pair.is_launch_bound:
        details.append("launch-bound")
    return replace(
        cell,
        verdict=judged.verdict,
        before=median(time for round in pair.rounds for time in round.baseline),
        after=median(round.candidate for round in pair.rounds),
        detail="; ".join(details),
        judged=judged,
    )


def _unlike(rounds: list[Round], verdict: Verdict) -> str:
    """Return what each allocation says, such as `slower 1.021 on n1, same 1.003 on n2`."""
    hosts = {each.allocation: recorded_value(each.records[-1], "host") for each in rounds}
    counts = Counter(hosts.values())
    texts = [
        f"{decision} {ratio:.3f} on "
        + (hosts[name] if counts[hosts[name]] == 1 else f"{hosts[name]} ({name})")
        for name, decision, ratio in verdict.unlike
    ]
    return f"hosts differ: {', '.join(texts)}"


def _unmeasured(
    observation: Observation, pairs: list[Pair], chosen: Collection[str], labels: dict[str, str]
) -> list[Compared]:
    """Return a cell for each run in a block that has no complete round, or no times at all."""
    statuses: dict[str, set[Status]] = {}
    for task in observation.tasks:
        statuses.setdefault(task.run.id, set()).add(task.status)
    known = {(pair.baseline, pair.candidate) for pair in pairs}
    # A later submission can compare a run with another baseline. Its earlier block stays as it is.
    latest = {
        run_id: block
        for manifest in observation.manifests
        for block in manifest.blocks
        for run_id in block.runs
    }
    cells = []
    for run_id, block in latest.items():
        if run_id == block.baseline or (block.baseline, run_id) in known or run_id not in chosen:
            continue
        found = statuses[run_id]
        unfinished = {s for s in found if s.is_live or s.runs_again_on_submit}
        # All rounds are complete, but neither this run nor the baseline has a time.
        failed = found - unfinished - {Status.ok, Status.not_needed}
        detail = str(min(unfinished or failed, default="no complete round"))
        run, baseline = observation.runs[run_id], observation.runs[block.baseline]
        cell = Compared(run, "", "", "not measured", labels[baseline.id], baseline_run=baseline)
        cells.append(replace(cell, detail=detail, pending=bool(unfinished) or not failed))
    return cells


def _labels(observation: Observation) -> dict[str, str]:
    """Return what distinguishes the baselines of blocks, such as `mode=exact`, by run id."""
    labels: dict[str, str] = {}
    for block in (block for manifest in observation.manifests for block in manifest.blocks):
        if base := observation.runs.get(block.baseline):
            members = [observation.runs[run] for run in block.runs if run in observation.runs]
            names = [name for name in varying(members) if name in base.params]
            values = " ".join(f"{name}={format_scalar(base.params[name])}" for name in names)
            labels[base.id] = f"code={base.checkout}" if base.checkout else values
    return labels
