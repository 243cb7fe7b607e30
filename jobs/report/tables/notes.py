"""Notes below tables: devices, statistic, processes, versions, slowdowns, what is not shown.

What the records do not contain is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jobs.formatting import abridged, counted, format_range, plural
from jobs.frame.recorded import UNKNOWN, commit_or_reason, environment_value, loaded_version
from jobs.frame.results import Result
from jobs.frame.rows import Cell
from jobs.frame.statistics import over_processes, statistic
from jobs.report.views import Shown
from jobs.results.counting import DISTURBANCES, is_thrown_away, place_of, task_of
from jobs.results.record import Record, is_stale, throttle_reasons
from jobs.status import Status

POWER_CAP = "sw_power_cap"  # name in `jobs.provenance.THROTTLE_REASONS`
MOST_LISTED = 3  # maximum number of commits or versions that a note lists
MAX_REASONS = 5  # maximum number of reasons for missing records
_MEAN_STD = "mean ± standard deviation"


def notes_of(shown: Shown, cells: Collection[Cell] = (), phases: Sequence[str] = ()) -> list[str]:
    """Return the notes below a table. For `phases`, see `basis_note`."""
    devices = ", ".join(dict.fromkeys(each.device for each in shown.results if each.device))
    sampling = "; ".join(filter(None, (devices, _sampling(shown, cells))))
    basis = "; ".join(filter(None, [basis_note(shown.results, phases), _older_code(shown)]))
    notes = [sampling, basis, *_reasons(shown.results)]
    return list(filter(None, [*notes, _hidden_code(shown), _hidden_attempts(shown)]))


def basis_note(results: Iterable[Result], phases: Sequence[str] = ()) -> str:
    """Return the note on processes, GPUs, rounds, commits and slowed-down processes.

    An example is `60 processes on 1 GPU in 5 rounds; commit 4bb999b; 12 of 60 power-capped`.
    Slowdowns are told for some phases; empty: for all.
    """
    measured = [each for each in results if each.status == "ok"]
    records = [each.record for each in measured if each.record is not None]
    if not records:
        return ""
    text = counted(len(records), _noun(measured))
    uuids = {str(gpu["uuid"]) for record in records for gpu in record.gpus if gpu.get("uuid")}
    text += f" on {counted(len(uuids), 'GPU')}" if uuids else ""
    in_rounds = [each.record for each in measured if each.in_round and each.record is not None]
    rounds: dict[str, set[str]] = {}
    for place in map(place_of, in_rounds):
        rounds.setdefault(place.id, set()).add(place.execution)
    if rounds:
        where = f"in {format_range(list(map(len, rounds.values())), 'round')}"
        text += f" {where}" if len(in_rounds) == len(records) else f" ({len(in_rounds)} {where})"
    return "; ".join([text, *several_of(records), *_slowed_down(records, phases)])


def _older_code(shown: Shown) -> str:
    """Return how many processes are of older code, if the folder was read `with_stale`."""
    records = [each.record for each in shown.results if each.status == "ok" and each.record]
    stale = sum(is_stale(record, shown.observation.source_hashes) for record in records)
    return f"{stale} of {len(records)} with older code" if stale else ""


def _noun(results: Iterable[Result]) -> str:
    """Return the name of what a run executes: with several ranks, each of them is a process."""
    return "execution" if any(r.run.shape.nproc_per_node for r in results) else "process"


def several_of(records: Sequence[Record], least: int = 1) -> list[str]:
    """Return the commits, if there are `least`, several versions of a package, and untested ones.

    Code in another repository has its commit. Runs that loaded no package have no version.
    """
    values: dict[str, Counter[str]] = {}
    for record in records:
        code = record.environment.get("code") or [{}]
        project = environment_value(record, "git", "commit")
        place = code[-1].get("repository") if code[-1].get("commit") != project else None
        commit = f"commit of {place}" if place else "commit"
        for name, value in (
            (commit, commit_or_reason(record)),
            ("torch", loaded_version(record, "torch")),
            ("Triton", loaded_version(record, "triton")),
            ("untested", environment_value(record, "loaded", "untested")),
        ):
            if value:
                values.setdefault(name, Counter())[str(value)] += 1
    found = []
    for name, counts in sorted(values.items(), key=lambda item: not item[0].startswith("commit")):
        fewest = 1 if name == "untested" else least if name.startswith("commit") else 2
        if len(counts) < fewest or counts.keys() == {UNKNOWN}:
            continue
        several = [f"{each} ({count})" for each, count in counts.most_common()]
        texts = several if len(counts) > 1 else list(counts)
        found.append(f"{name} {abridged(texts, MOST_LISTED)}")
    return found


def _sampling(shown: Shown, cells: Collection[Cell]) -> str:
    """Return the statistic of the cells, and their spread. Empty if none has several samples.

    A cell of runs in blocks has a statistic over processes of that of each process.
    """
    name = shown.view.statistic
    of_samples = "mean" if name == "mean_std" else name
    paired = [cell for cell in cells if cell.in_rounds and cell.metric.is_timed]
    alone = [cell for cell in cells if not cell.in_rounds and cell.metric.is_sampled]
    samples = [cell.pooled for cell in alone if cell.measured and len(cell.pooled) > 1]
    parts = []
    if paired:
        over = _MEAN_STD if name == "mean_std" else over_processes(name)
        noun = plural(_noun(row.result for cell in paired for row in cell.measured))
        parts.append(f"{over} over {noun} of the {of_samples} of each")
        if any(cell.interval for cell in paired):
            parts.append(f"±: half of the 95% interval of the mean over {noun}")
    if samples:
        spread = max(statistic(each, "spread") for each in samples)
        counts = format_range(list(map(len, samples)), "sample")
        text = f"{_MEAN_STD if name == 'mean_std' else name} of {counts}"
        parts.append(f"not in blocks: {text}" if paired else text)
        parts.append(f"interquartile range at most {spread:.1%} of the median")
    if parts and any(r.run.shape.nproc_per_node for r in shown.results):
        parts.append("times of ranks: the slowest rank of each sample")
    return "; ".join(parts)


def _slowed_down(records: Sequence[Record], phases: Sequence[str]) -> list[str]:
    """Return how many processes were slowed down in a phase that the table shows."""
    shown = set(phases) - {""}
    reasons = [throttle_reasons(record, shown) for record in records if record.conditions]
    capped = sum(POWER_CAP in each for each in reasons)
    throttled = sum(not each.isdisjoint(DISTURBANCES) for each in reasons)
    found = [(capped, "power-capped"), (throttled, "throttled by heat or hardware")]
    return [f"{count} of {len(reasons)} {what}" for count, what in found if count]


def _reasons(results: Iterable[Result]) -> list[str]:
    """Return why runs have no result, the most frequent reasons first. Cells tell that of OOM."""
    whys: dict[str, str] = {}  # by run; later rounds may only say that the first one failed
    for result in results:
        failure = result.record.failure if result.record else None
        why = failure.summary if failure else result.detail
        if why and result.status is not Status.oom:
            why = why.removeprefix(f"{result.status.capitalize()}: ")
            whys.setdefault(result.run.id, f"{result.status}: {why}")
    counts = Counter(whys.values())
    found = counts.most_common(MAX_REASONS)
    more = len(counts) - MAX_REASONS
    texts = [f"{reason} ({counted(count, 'run')})" for reason, count in found]
    return [*texts, counted(more, "more reason")] if more > 0 else texts


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
    return f"{counted(hidden, 'attempt')} not shown; the command attempts lists them"
