"""Notes below tables: devices, statistic, processes, versions, slowdowns, what is not shown.

What the records do not contain is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jobs.formatting import counted, format_range
from jobs.frame.recorded import UNKNOWN, environment_value, recorded_value
from jobs.frame.results import Result
from jobs.frame.rows import Cell
from jobs.frame.statistics import over_processes, statistic
from jobs.report.views import Shown
from jobs.results.counting import DISTURBANCES, is_thrown_away, place_of, task_of
from jobs.results.record import Record

POWER_CAP = "sw_power_cap"  # name in `jobs.provenance.THROTTLE_REASONS`
MOST_LISTED = 3  # maximum number of commits or versions that a note lists
MAX_REASONS = 5  # maximum number of reasons for missing records


def notes_of(shown: Shown, cells: Collection[Cell] = (), phases: Sequence[str] = ()) -> list[str]:
    """Return the notes below a table. For `phases`, see `basis_note`."""
    devices = ", ".join(dict.fromkeys(each.device for each in shown.results if each.device))
    sampling = "; ".join(filter(None, (devices, _sampling(shown, cells))))
    notes = [sampling, basis_note(shown.results, phases), *_reasons(shown.results)]
    return list(filter(None, [*notes, _hidden_code(shown), _hidden_attempts(shown)]))


def basis_note(results: Iterable[Result], phases: Sequence[str] = ()) -> str:
    """Return the note on processes, GPUs, rounds, commits and slowed-down processes.

    An example is `60 processes on 1 GPU in 5 rounds; commit 4bb999b; 12 of 60 power-capped`. A run
    with several ranks is an execution. Slowdowns are told for some phases; empty: for all.
    """
    measured = [each for each in results if each.status == "ok"]
    records = [each.record for each in measured if each.record is not None]
    if not records:
        return ""
    ranks = any(each.run.shape.nproc_per_node for each in measured)
    text = counted(len(records), "execution" if ranks else "process")
    if gpus := {str(gpu.get("uuid")) for record in records for gpu in record.gpus}:
        text += f" on {counted(len(gpus), 'GPU')}"
    rounds: dict[str, set[str]] = {}
    for place in (place_of(record) for record in records if record.block is not None):
        rounds.setdefault(place.id, set()).add(place.execution)
    if rounds:
        counts = list(map(len, rounds.values()))
        text += f" in {format_range(counts)} {'round' if max(counts) == 1 else 'rounds'}"
    return "; ".join([text, *several_of(records), *_slowed_down(records, phases)])


def several_of(records: Iterable[Record], least: int = 1) -> list[str]:
    """Return the commits, at least `least`, versions if there are several, and untested ones."""
    found = []
    values = {
        "commit": (least, lambda record: recorded_value(record, "commit")),
        "torch": (2, lambda record: recorded_value(record, "torch")),
        "Triton": (2, lambda record: recorded_value(record, "triton")),
        "untested": (1, lambda record: environment_value(record, "loaded", "untested")),
    }
    for name, (fewest, of) in values.items():
        counts = Counter(str(of(record) or UNKNOWN) for record in records)
        del counts[UNKNOWN]
        if len(counts) >= fewest:
            texts = [f"{each} ({count})" for each, count in counts.most_common(MOST_LISTED)]
            more = len(counts) - MOST_LISTED
            listed = next(iter(counts)) if len(counts) == 1 else ", ".join(texts)
            found.append(f"{name} {listed}" + (f" and {more} more" if more > 0 else ""))
    return found


def _sampling(shown: Shown, cells: Collection[Cell]) -> str:
    """Return the statistic of the cells, and their spread. Empty if none has several samples."""
    name = shown.view.statistic
    timed = [cell for cell in cells if cell.measured and cell.metric.is_timed]
    paired = any(cell.interval for cell in timed)
    samples = [cell.pooled for cell in timed if cell.metric.is_sampled and len(cell.pooled) > 1]
    if not paired and not samples:
        return ""
    rows = (row for cell in timed for row in cell.measured)
    ranks = any(row.result.run.shape.nproc_per_node for row in rows)
    of_rank = " of the slowest rank" if ranks else ""
    mean_std = "mean ± standard deviation" if name == "mean_std" else ""
    if paired:
        text = f"{mean_std or over_processes(name)} over processes{of_rank}"
        return f"{text}; ±: half of the 95% interval of the mean over processes"
    spread = max(statistic(each, "spread") for each in samples)
    counts = format_range(list(map(len, samples)))
    text = f"{mean_std or name} of {counts} samples{of_rank}"
    return f"{text}; interquartile range at most {spread:.1%} of the median"


def _slowed_down(records: Sequence[Record], phases: Sequence[str]) -> list[str]:
    """Return how many processes were slowed down in a phase that the table shows."""
    reasons = []
    for conditions in (record.conditions for record in records if record.conditions):
        wanted = (set(phases) - {""} or conditions.keys()) & conditions.keys()
        reasons.append({name for each in wanted for name in conditions[each].get("throttle", ())})
    capped = sum(POWER_CAP in each for each in reasons)
    throttled = sum(not each.isdisjoint(DISTURBANCES) for each in reasons)
    found = [(capped, "power-capped"), (throttled, "throttled by heat or hardware")]
    return [f"{count} of {len(reasons)} {what}" for count, what in found if count]


def _reasons(results: Iterable[Result]) -> list[str]:
    """Return why records are missing, the most frequent reasons first."""
    counts = Counter(f"{r.status}: {r.detail}" for r in results if not r.record and r.detail)
    found = counts.most_common(MAX_REASONS)
    return [f"{reason} ({counted(count, 'run')})" for reason, count in found]


def _hidden_code(shown: Shown) -> str:
    """Return a note if the condition of a table leaves out all results of the user's own code."""
    benchmarks = {result.run.benchmark for result in shown.results}
    own = dict.fromkeys(
        reference
        for result in shown.everything
        if result.run.benchmark in benchmarks
        for reference in result.run.code
    )
    absent = own.keys() - {reference for result in shown.results for reference in result.run.code}
    where = f"not shown, because of where: {shown.view.where}"
    return f"{where}: {', '.join(filter(absent.__contains__, own))}" if absent else ""


def _hidden_attempts(shown: Shown) -> str:
    """Return a note that tells how many attempts a table does not show, except those in trials."""
    tasks = {(result.run.id, result.repeat, result.device) for result in shown.results}
    records = {id(result.record) for result in shown.results}
    hidden = sum(
        task_of(record) in tasks and id(record) not in records and not is_thrown_away(record)
        for record in shown.observation.records
    )
    if not hidden:
        return ""
    return f"{counted(hidden, 'attempt')} not shown: python aggregate.py attempts FOLDER lists them"
