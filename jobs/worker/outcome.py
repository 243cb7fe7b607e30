"""How a run ended, from what its processes wrote and how they exited. Pure: no process, no clock.

An outcome is a dict: status, and measurements or failure; where `run()` returned or raised also
what `jobs.worker.run_process.execute` tells beside them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from jobs.record import Status

Outcome = dict[str, Any]
_LOST = {
    "ServerDied": "the process that it was forked from is gone",
    "NodeLost": "the worker of another node of the job is gone",
}


def failed(
    status: Status, kind: str, message: str, traceback: str | None = None, **more: Any
) -> Outcome:
    """An outcome without measurements."""
    failure = {"type": kind, "message": message, "traceback": traceback or None} | more
    return {"status": status, "failure": failure}


def timed_out(timeout_s: float, stacks: str) -> Outcome:
    return failed("timeout", "Timeout", f"took more than {timeout_s:g} s", stacks)


def died(exit_code: int | None, traces: str, out_of_memory: bool) -> Outcome:
    """Of a process that ended without writing an outcome.

    Args:
        exit_code: negative is a signal; None where nobody could wait for it.
        traces: stacks of the crash, or the end of its log.
        out_of_memory: its memory cgroup counts a kill more than before it ran.
    """
    if exit_code is None:
        return failed("killed", "ServerDied", _LOST["ServerDied"], traces)
    if exit_code >= 0:
        message = f"left with exit code {exit_code} before it returned"
        return failed("error", f"exit code {exit_code}", message, traces)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if out_of_memory and exit_code == -signal.SIGKILL:
        message = "the kernel killed it: its memory cgroup is full"
        return failed("oom", name, message, traces, memory="host")
    return failed("killed", name, f"ended by {name}", traces)


def of_ranks(nodes: list[Outcome], expired: bool, timeout_s: float, world_size: int) -> Outcome:
    """The one outcome of a run of several ranks: the failure that came first, with its rank.

    Args:
        nodes: what each node left (`jobs.worker.torchrun.collect`), node 0 first.
        expired: it was ended at its timeout.
    """
    outcomes = [outcome for node in nodes for outcome in node["outcomes"]]
    if len(outcomes) == world_size and all(o["status"] == "ok" for o in outcomes):
        return merge_ranks(outcomes)
    for node in nodes:
        if node["lost"]:
            return failed("killed", node["lost"], _LOST[node["lost"]])
    stacks = "\n\n".join(node["stacks"] for node in nodes if node["stacks"])
    failures = [*_raised(outcomes), *_silent(nodes, world_size)]
    first = min(failures, key=lambda failure: failure[:3], default=None)
    if expired and (first is None or first[0] >= _CONSEQUENCE):
        return timed_out(timeout_s, stacks)
    if first is not None:
        _, _, rank, outcome = first
        return outcome | {"failure": outcome["failure"] | {"rank": rank}}
    for node in nodes:
        if node["exit_code"] != 0:  # torchrun's agent itself
            return died(node["exit_code"], node["log_end"], node["out_of_memory"])
    errors = [node["agent"]["error"] for node in nodes if node["agent"] and node["agent"]["error"]]
    message = errors[0] if errors else f"{len(outcomes)} of {world_size} ranks left an outcome"
    return failed("error", "TorchrunError", message, nodes[0]["log_end"])


# Of a rank that failed: how likely others failed first (0: not), when it was seen, rank, outcome.
_Failure = tuple[int, float, int, Outcome]
_CONSEQUENCE = 3  # from this order on it follows from another rank's end, as at a timeout


def _raised(outcomes: list[Outcome]) -> Iterator[_Failure]:
    """What ranks raised. Of one another's end, they may tell sooner than that one of its own."""
    for outcome in outcomes:
        if outcome["status"] != "ok":
            order = _CONSEQUENCE if outcome["by_another"] else 1
            yield order, outcome["ended_at"], outcome["rank"], outcome


def _silent(nodes: list[Outcome], world_size: int) -> Iterator[_Failure]:
    """Ranks that ended without an outcome."""
    known = {outcome["rank"] for node in nodes for outcome in node["outcomes"]}
    for node in nodes:
        for failure in (node["agent"] or {"failures": []})["failures"]:
            rank, code = failure["rank"], failure["exit_code"]
            if rank in known:
                continue
            known.add(rank)
            outcome = died(code, node["stacks"] or node["log_end"], node["out_of_memory"])
            # torchrun ends the others by SIGTERM; libraries abort, as a lone rank may too.
            order = 2 if code >= 0 else 4 if -code in (signal.SIGTERM, signal.SIGABRT) else 0
            yield order, failure["at"], rank, outcome
    if all(node["agent"] and not node["agent"]["error"] for node in nodes):
        for rank in set(range(world_size)) - known:  # torchrun takes exit code 0 for success
            yield 2, 0.0, rank, died(0, nodes[0]["log_end"], False)


def merge_ranks(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks': times and memory as lists by rank, the rest as rank 0 has it."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome["rank"])
    first = outcomes[0]["measurements"]
    merged = dict(first)
    for name in ("samples_ms", "peak_memory_bytes"):
        by_rank = [outcome["measurements"].get(name, {}) for outcome in outcomes]
        for rank, phases in enumerate(by_rank):
            if not isinstance(phases, dict) or phases.keys() != by_rank[0].keys():
                told = f"{name} of rank 0: {by_rank[0]!r:.200}; of rank {rank}: {phases!r:.200}"
                return failed("error", "RanksDisagree", told, rank=rank)
        merged[name] = {phase: [phases[phase] for phases in by_rank] for phase in by_rank[0]}
    return outcomes[0] | {
        "measurements": merged,
        "measuring": max(outcome["measuring"] for outcome in outcomes),
    }
