"""Notes below a table: where, how often and with which code its numbers were measured.

What the records do not contain is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jobs.formatting import counted, format_percent, format_range, plural
from jobs.frame.metrics import Metric
from jobs.frame.recorded import (
    COMMIT_DIGITS,
    UNKNOWN,
    environment_value,
    loaded_version,
    recorded_value,
    shown_commit,
)
from jobs.frame.results import Result
from jobs.report.views import Shown
from jobs.results.counting import DISTURBANCES, is_thrown_away, place_of, task_of
from jobs.results.record import Record
from jobs.results.run_states import Observation
from jobs.verdicts.block_cells import verdicts_of

POWER_CAP = "sw_power_cap"  # name in `jobs.provenance.THROTTLE_REASONS`
MOST_LISTED = 3  # maximum number of commits or versions that a note lists
MAX_REASONS = 5  # maximum number of reasons for missing records
State = tuple[str, str]  # commit or version as tables show it, hash of uncommitted changes or ""


def notes_of(
    shown: Shown,
    dimensions: Sequence[str],
    sampling: str = "",
    phases: Sequence[str] = (),
) -> list[str]:
    """Return the notes below a table.

    They name the devices, what the numbers rest on (see `basis_note`), the commits and versions if
    there are several, and why records are missing. `sampling` tells about the samples.
    """
    found = list(differing(shown.results))
    several = several_of(found, shown, dimensions)
    with_commit = "commit" not in {*dimensions, *(name for name, _, _ in found)}
    devices = ", ".join(dict.fromkeys(each.device for each in shown.results if each.device))
    basis = basis_note(
        shown.observation,
        shown.results,
        with_commit=with_commit,
        phases=phases,
    )
    first = "; ".join(filter(None, (devices, sampling)))
    notes = [first, basis, *several, _untested(shown.results)]
    return [*filter(None, notes), *_reasons(shown.results)]


def several_of(
    found: Iterable[tuple[str, str, dict[State, set[str]]]],
    shown: Shown,
    dimensions: Sequence[str],
) -> list[str]:
    """Return notes on repositories with several commits, and on several torch or Triton versions.

    The repositories are this project and those of measured code outside this project. Uncommitted
    changes count as a separate commit, and so does an unknown commit. Versions count if they were
    loaded. There is no note on what is a row or column of the table; a parameter with such a name
    does not count. `found` is the result of `differing`.
    """
    told = [name for name in shown.told_apart if name in dimensions]
    return [
        f"Results come from {what}: {_listed(states)}"
        for name, what, states in found
        if name not in told
    ]


def _untested(results: Iterable[Result]) -> str:
    """Return a note on the versions with which the code is not tested. Empty: there are none."""
    runs: dict[State, set[str]] = {}
    for record in (each.record for each in results if each.record is not None):
        if untested := environment_value(record, "loaded", "untested"):
            runs.setdefault((str(untested), ""), set()).add(record.run)
    return f"Untested versions: {_listed(runs)}" if runs else ""


def differing(results: Iterable[Result]) -> Iterator[tuple[str, str, dict[State, set[str]]]]:
    """Yield what results have several of, such as `2 commits`, with the ids of the runs of each.

    It begins with its name in `RECORDED`.
    """
    of_environment: dict[int, tuple[Record, set[str]]] = {}  # records share equal environments
    for record in (each.record for each in results if each.record is not None):
        known = of_environment.setdefault(id(record.environment), (record, set()))
        known[1].add(record.run)
    runs: dict[tuple[str, str], dict[State, set[str]]] = {}
    for record, ids in of_environment.values():
        for name, what, state in _states(record):
            runs.setdefault((name, what), {}).setdefault(state, set()).update(ids)
    for (name, what), states in runs.items():
        if len(states) > 1:
            yield name, f"{len(states)} {what}", states


def _states(record: Record) -> Iterator[tuple[str, str, State]]:
    """Yield the commit of each repository whose code a record measured, and the loaded versions.

    Each has its name in `RECORDED` and a text for what it is one of.
    """
    environment = record.environment
    yield "commit", "commits", _commit(environment.get("git") or {})
    for entry in environment.get("code") or []:
        if entry.get("repository") is not None:
            yield "commit", f"commits of {entry['repository']}", _commit(entry)
    for name, title in (("torch", "torch"), ("triton", "Triton")):
        if loaded := loaded_version(record, name):
            yield name, f"versions of {title}", (loaded, "")


def _commit(entry: dict[str, Any]) -> State:
    return shown_commit(entry), entry.get("diff") or ""


def _listed(states: dict[State, set[str]]) -> str:
    """Return the states with their numbers of runs as text, beginning with the most frequent."""
    counts = {state: len(ids) for state, ids in states.items()}
    labels = [label for label, _ in counts]
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    texts = []
    for (label, diff), count in ordered[:MOST_LISTED]:
        which = f"{label} diff {diff[:COMMIT_DIGITS]}" if labels.count(label) > 1 else label
        texts.append(f"{which.removesuffix(' diff ')} ({counted(count, 'run')})")
    more = len(ordered) - MOST_LISTED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def attempts_note(shown: Shown) -> list[str]:
    """Return a note that tells how many attempts a table does not show, if there are any.

    Those in trials are not counted: no table ever shows them.
    """
    tasks = {(result.run.id, result.repeat, result.device) for result in shown.results}
    records = {id(result.record) for result in shown.results}
    hidden = sum(
        task_of(record) in tasks and id(record) not in records and not is_thrown_away(record)
        for record in shown.observation.records
    )
    if not hidden:
        return []
    verb = "is" if hidden == 1 else "are"
    return [
        f"{counted(hidden, 'attempt')} {verb} not shown; python aggregate.py attempts FOLDER lists "
        "all"
    ]


def launch_bound_note(
    results: Iterable[Result], phases: Iterable[str], metrics: Iterable[Metric]
) -> list[str]:
    """Return a note if sustained phases that a table shows are launch-bound, see `sustained_ms`.

    The name of a metric can contain a phase, as fact.joules_per_call.forward_sustained does.
    """
    shown = dict.fromkeys([*phases, *(part for m in metrics for part in m.name.split("."))])
    marked = [each.measurements.facts.get("launch_bound") for each in results if each.measurements]
    counts = Counter(
        phase for phases in marked if isinstance(phases, list) for phase in shown if phase in phases
    )
    if not counts:
        return []
    which = ", ".join(f"{phase} in {counted(n, 'process')}" for phase, n in counts.items())
    return [f"launch-bound, so that the host determines time and energy: {which}"]


def process_noun(results: Iterable[Result]) -> str:
    """Return the name of what a run executes, for notes.

    It is a process, or an execution if runs have several ranks, each of which is a process.
    """
    ranks = any(result.run.shape.nproc_per_node for result in results)
    return "execution" if ranks else "process"


def basis_note(
    observation: Observation,
    results: Sequence[Result],
    with_commit: bool = True,
    phases: Sequence[str] = (),
) -> str:
    """Return the note on processes, rounds, GPUs, commit, A/A floor and slowed-down processes.

    An example is `60 processes on 1 GPU in blocks of 5 rounds; commit 4bb999b; A/A floor 0.4%; 12
    of 60 processes power-capped`.

    Args:
        with_commit: whether to tell the commit, if all results have the same.
        phases: tell the A/A floors of these phases, and about slowdowns in these only. Empty: tell
            no floors, and about slowdowns in all.
    """
    measured = [each for each in results if each.status == "ok" and each.record is not None]
    own = [result.record for result in measured if result.record is not None]
    if not own:
        return ""
    noun = process_noun(measured)
    parts = [" ".join(filter(None, [counted(len(own), noun), _places(own), _rounds(measured)]))]
    commits = {recorded_value(record, "commit") for record in _by_environment(own)}
    if with_commit and len(commits) == 1 and UNKNOWN not in commits:
        parts.append(f"commit {commits.pop()}")
    in_rounds = {result.run.id for result in measured if result.in_round}
    if phases and in_rounds:
        parts.append(_floors(observation, in_rounds, phases))
    parts.append(_slowed_down(own, phases, noun))
    return "; ".join(filter(None, parts))


def _reasons(results: Sequence[Result]) -> list[str]:
    """Return why records are missing, the most frequent reasons first."""
    counts = Counter(
        f"{each.status}: {each.detail}" for each in results if not each.record and each.detail
    )
    reasons = [
        f"{reason} ({counted(count, 'run')})" for reason, count in counts.most_common(MAX_REASONS)
    ]
    if len(counts) > MAX_REASONS:
        reasons.append(f"{len(counts) - MAX_REASONS} more reasons: see python -m jobs status")
    return reasons


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
    records = [result.record for result in results if result.in_round and result.record]
    for record in records:
        place = place_of(record)
        rounds.setdefault(place.id, set()).add((record.allocation, place.execution))
    if not rounds:
        return ""
    text = f"in blocks of {_range([len(found) for found in rounds.values()], 'round')}"
    several = [len({allocation for allocation, _ in found}) for found in rounds.values()]
    if max(several) > 1:
        text += f" in {_range(several, 'allocation')}"
    return text if len(records) == len(results) else f"({len(records)} {text})"


def _range(counts: list[int], noun: str) -> str:
    return f"{format_range(counts)} {noun if max(counts) == 1 else plural(noun)}"


def _floors(observation: Observation, runs: set[str], phases: Sequence[str]) -> str:
    """Return the A/A floor of each phase and device, such as `A/A floor 0.4%`.

    It is the smallest and the largest one of the verdicts on some runs, see `jobs.verdicts.judge`.
    """
    floors: dict[tuple[str, str], list[float]] = {}
    for (candidate, _, phase, device), verdict in verdicts_of(observation).items():
        if candidate in runs and phase in phases and verdict.floor is not None:
            floors.setdefault((phase, device), []).append(verdict.floor)
    texts = []
    for key, found in floors.items():
        ends = dict.fromkeys(map(format_percent, (min(found), max(found))))
        differing = [part for i, part in enumerate(key) if len({k[i] for k in floors}) > 1]
        texts.append(" to ".join(ends) + (f" ({', '.join(differing)})" if differing else ""))
    return f"A/A floor {', '.join(texts)}" if texts else ""


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
