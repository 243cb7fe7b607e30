"""Notes on what the figures of a table rest on.

They tell the number of processes, rounds and GPUs, the commit, the A/A floor, how many processes
were slowed down by the power limit or the temperature, and how many attempts are not shown. What
the records do not contain is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jobs.formatting import counted, format_percent, format_range, plural
from jobs.report.comparison.verdicts import Round, aa_floor, floor_of_block
from jobs.report.metrics import Metric, metric_samples
from jobs.report.recorded import UNKNOWN, recorded_value
from jobs.report.results import Result
from jobs.report.statistics import statistic
from jobs.results.counting import DISTURBANCES, complete_executions, task_of
from jobs.results.record import Record
from jobs.results.run_states import Observation

POWER_CAP = "sw_power_cap"  # name in `jobs.provenance.THROTTLE_REASONS`


def basis_note(
    observation: Observation,
    results: Sequence[Result],
    phases: Sequence[str],
    floor_of: Metric | None,
    statistic_name: str,
    with_commit: bool,
) -> str:
    """Return the note on processes, rounds, GPUs, commit, A/A floor and slowed-down processes.

    An example is `60 processes on 1 GPU in blocks of 5 rounds; commit 4bb999b; A/A floor 0.4%; 12
    of 60 processes power-capped`. Runs with several ranks have executions instead of processes.
    Without phases, it is about those of all measurements. Of the metric floor_of, the A/A floor is
    told. With with_commit, the commit is told if all results have the same.
    """
    measured = [result for result in results if result.status == "ok" and result.record is not None]
    records = [result.record for result in measured if result.record is not None]
    if not records:
        return ""
    noun = process_noun(measured)
    rounds = _rounds(measured)
    parts = [" ".join(filter(None, [counted(len(records), noun), _places(records), rounds]))]
    commits = {recorded_value(record, "commit") for record in _by_environment(records)}
    if with_commit and len(commits) == 1 and UNKNOWN not in commits:
        parts.append(f"commit {commits.pop()}")
    if floor_of is not None:
        parts.append(_floors(observation, measured, phases, floor_of, statistic_name))
    parts.append(_slowed_down(records, phases, noun))
    return "; ".join(filter(None, parts))


def attempts_note(observation: Observation, results: Iterable[Result]) -> list[str]:
    """Return a note that tells how many attempts a table does not show, if there are any."""
    tasks, shown = set(), set()
    for result in results:
        tasks.add((result.run.id, result.repeat, result.device))
        shown.add(id(result.record))
    hidden = sum(
        task_of(record) in tasks and id(record) not in shown for record in observation.records
    )
    if not hidden:
        return []
    verb = "is" if hidden == 1 else "are"
    return [
        f"{counted(hidden, 'attempt')} {verb} not shown; python aggregate.py attempts FOLDER lists "
        "all"
    ]


def process_noun(results: Iterable[Result]) -> str:
    """Return the name of what a run executes, for notes.

    It is a process, or an execution if runs have several ranks, each of which is a process.
    """
    ranks = any(result.run.shape.nproc_per_node for result in results)
    return "execution" if ranks else "process"


def _by_environment(records: list[Record]) -> Iterable[Record]:
    """Return one record of each environment. Records share equal environments."""
    return {id(record.environment): record for record in records}.values()


def _places(records: list[Record]) -> str:
    """Return the number of GPUs and, if all boots are known, of hosts."""
    gpus = {str(gpu.get("uuid")) for record in records for gpu in record.gpus if gpu.get("uuid")}
    environments = [record.environment for record in _by_environment(records)]
    boots = {str(environment.get("boot_id") or UNKNOWN) for environment in environments}
    texts = [f"on {counted(len(gpus), 'GPU')}"] if gpus else []
    if UNKNOWN not in boots and (len(boots) > 1 or not gpus):
        texts.append(f"{'of' if gpus else 'on'} {counted(len(boots), 'host')}")
    return " ".join(texts)


def _rounds(results: list[Result]) -> str:
    """Return the number of rounds of a block, and of its allocations if there are several."""
    rounds: dict[str, set[tuple[str | None, str]]] = {}
    allocations: dict[str, set[str | None]] = {}
    paired = 0
    for result in results:
        if result.in_round and result.record is not None and result.record.block is not None:
            place, allocation = result.record.block, result.record.allocation
            rounds.setdefault(place.id, set()).add((allocation, place.execution))
            allocations.setdefault(place.id, set()).add(allocation)
            paired += 1
    if not rounds:
        return ""
    text = f"in blocks of {_range([len(found) for found in rounds.values()], 'round')}"
    several = [len(found) for found in allocations.values()]
    if max(several) > 1:
        text += f" in {_range(several, 'allocation')}"
    return text if paired == len(results) else f"({paired} {text})"


def _range(counts: list[int], noun: str) -> str:
    return f"{format_range(counts)} {noun if max(counts) == 1 else plural(noun)}"


def _floors(
    observation: Observation,
    results: list[Result],
    phases: Sequence[str],
    metric: Metric,
    statistic_name: str,
) -> str:
    """Return the A/A floor of each phase and device, such as `A/A floor 0.4%`.

    It comes from the blocks that the table shows, and is the smallest and the largest floor of a
    block. See `jobs.report.comparison.verdicts`.
    """
    shown = {
        (result.record.block.id, result.record.block.execution)
        for result in results
        if result.in_round and result.record is not None and result.record.block is not None
    }
    if not shown:
        return ""
    blocks: dict[tuple[str, str], dict[str, list[Round]]] = {}  # rounds by block
    for execution in complete_executions(observation.records):
        baseline = sorted(
            ((r.block.second, r) for r in execution if r.block is not None and r.block.baseline),
            key=lambda pair: pair[0],
        )
        if len(baseline) < 2:
            continue
        first = baseline[0][1]
        assert first.block is not None
        if (first.block.id, first.block.execution) not in shown:
            continue
        for phase in phases:
            values = tuple(_value(r, metric, phase, statistic_name) for _, r in baseline)
            if min(values) > 0:
                rounds = blocks.setdefault((phase, first.device), {})
                rounds.setdefault(first.block.id, []).append(Round("", values, values[0]))
    texts = []
    for key, found in blocks.items():
        pooled = aa_floor(found.values())
        floors = [floor_of_block(rounds, pooled) for rounds in found.values()]
        known = [floor for floor in floors if floor is not None]
        if known:
            ends = dict.fromkeys(map(format_percent, (min(known), max(known))))
            texts.append(" to ".join(ends) + _label(key, list(blocks)))
    return f"A/A floor {', '.join(texts)}" if texts else ""


def _label(key: tuple[str, str], keys: list[tuple[str, str]]) -> str:
    """Return the parts of a key in which it differs from other keys, in parentheses."""
    parts = [part for i, part in enumerate(key) if len({other[i] for other in keys}) > 1]
    return f" ({', '.join(parts)})" if parts else ""


def _value(record: Record, metric: Metric, phase: str, statistic_name: str) -> float:
    """Return the value of a process, or 0 if it has none."""
    samples = metric_samples(record, metric, phase)
    if samples is None or isinstance(samples, str):
        return 0.0
    return statistic(samples, statistic_name)


def _slowed_down(records: list[Record], phases: Sequence[str], noun: str) -> str:
    """Return how many processes were slowed down in a phase that the table shows."""
    named = [phase for phase in phases if phase]
    reasons: list[set[str]] = []
    for record in records:
        conditions = record.conditions
        known = [conditions[phase] for phase in named or conditions if phase in conditions]
        if known:
            reasons.append({name for each in known for name in each.get("throttle", ())})
    if not reasons:
        return ""
    capped = sum(POWER_CAP in each for each in reasons)
    throttled = sum(not each.isdisjoint(DISTURBANCES) for each in reasons)
    of = counted(len(reasons), noun)
    if len(reasons) < len(records):  # records of older code have no conditions
        of += " with a record of the clock"
    text = f"{capped} of {of} power-capped"
    return f"{text}, {throttled} throttled by heat or hardware" if throttled else text
