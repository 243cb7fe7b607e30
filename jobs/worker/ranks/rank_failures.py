"""Merges the outcomes of all ranks of a run into one outcome of the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from jobs.status import Status
from jobs.worker.messages import NodeReport, Outcome
from jobs.worker.outcome import died, failed, timed_out


class Cause(IntEnum):
    """Cause of the failure of a rank. The one with the lowest is assumed to have failed first."""

    crashed = 0  # killed by a signal other than SIGTERM and SIGABRT
    raised = 1  # raised an exception
    left = 2  # exited before it reported a result
    lost_peer = 3  # a collective raised an exception, because another rank had ended
    ended_by_torchrun = 4  # killed by SIGTERM from torchrun, or by SIGABRT


class Failed(NamedTuple):
    cause: Cause
    at: float  # time of the failure, in seconds since the epoch
    rank: int
    outcome: Outcome


def outcome_of_ranks(
    nodes: list[NodeReport], expired: bool, timeout_s: float, world_size: int
) -> Outcome:
    """Return the outcome of a run with several ranks, by the first condition that holds:

    - All ranks are ok: the outcomes of the ranks are merged.
    - A node was unable to execute or report its part: the outcome is what it says.
    - The run reached its timeout, and no rank failed by itself: timeout.
    - torchrun's agent was killed, and no rank failed by itself: killed.
    - A rank failed: the outcome is that of the rank with the lowest `Cause`, then the earliest.
    - Otherwise torchrun itself failed, and the outcome is its error.

    The first report is that of node 0. `expired` tells whether the run reached its timeout.
    """
    outcomes = [outcome for node in nodes for outcome in node.outcomes]
    if len(outcomes) == world_size and all(outcome.is_ok for outcome in outcomes):
        return merge_ranks(outcomes)
    for node in nodes:
        if node.unable is not None:
            return node.unable
    stacks = "\n\n".join(node.stacks for node in nodes if node.stacks)
    raised = (
        Failed(Cause.lost_peer if o.lost_peer else Cause.raised, o.ended_at, o.rank, o)
        for o in outcomes
        if not o.is_ok
    )
    failures = [*raised, *_silent(nodes, world_size)]
    first = min(failures, key=lambda f: (f.cause, f.at, f.rank), default=None)
    by_itself = first is not None and first.cause < Cause.lost_peer
    if expired and not by_itself:
        return timed_out(timeout_s, stacks)
    for node in nodes:
        # Perhaps together with the rank that others lost, which the agent then could not report
        if node.agent is None and node.exit_code < 0 and not by_itself:
            return died(node.exit_code, node.log_end, node.out_of_memory)
    if first is not None:
        assert first.outcome.failure is not None
        failure = first.outcome.failure.model_copy(update={"rank": first.rank})
        return first.outcome.model_copy(update={"failure": failure})
    for node in nodes:
        if node.exit_code != 0:  # torchrun's agent itself failed
            return died(node.exit_code, node.log_end, node.out_of_memory)
    errors = [node.agent.error for node in nodes if node.agent and node.agent.error]
    message = errors[0] if errors else f"{len(outcomes)} of {world_size} ranks reported a result"
    return failed(Status.error, "TorchrunError", message, nodes[0].log_end)


def _silent(nodes: list[NodeReport], world_size: int) -> Iterator[Failed]:
    """Yield a `Failed` for each rank that ended without an outcome, even if no report tells it."""
    known = {outcome.rank for node in nodes for outcome in node.outcomes}
    for node in nodes:
        for failure in node.agent.failures if node.agent else ():
            if failure.rank not in known:
                known.add(failure.rank)
                text = node.stacks or node.log_end
                outcome = died(failure.exit_code, text, node.out_of_memory)
                yield Failed(_cause_of(failure.exit_code), failure.at, failure.rank, outcome)
    if all(node.agent and not node.agent.error for node in nodes):
        for rank in set(range(world_size)) - known:  # torchrun treats exit code 0 as success
            yield Failed(Cause.left, 0.0, rank, died(0, nodes[0].log_end, False))


def _cause_of(exit_code: int) -> Cause:
    if exit_code >= 0:
        return Cause.left
    # After a failure, torchrun sends SIGTERM to the other ranks, and libraries abort ranks that
    # lost their peers (SIGABRT). A rank that aborts for another reason cannot be distinguished.
    ended = -exit_code in (signal.SIGTERM, signal.SIGABRT)
    return Cause.ended_by_torchrun if ended else Cause.crashed


def merge_ranks(outcomes: list[Outcome]) -> Outcome:
    """Merge the outcomes of all ranks of a run, all of which are ok.

    Each phase of `samples_ms` and `peak_memory_bytes` gets a list with one entry per rank, and the
    slowest rank counts for `measuring`. Other values are those of rank 0.
    """
    outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)
    measurements = [outcome.measurements or {} for outcome in outcomes]
    merged = dict(measurements[0])
    for name in ("samples_ms", "peak_memory_bytes"):
        by_rank = [measured.get(name, {}) for measured in measurements]
        for rank, phases in enumerate(by_rank):
            if not isinstance(phases, dict) or phases.keys() != by_rank[0].keys():
                message = (
                    f"{name} must have the same phases on every rank, got {by_rank[0]!r:.200} on "
                    f"rank 0 and {phases!r:.200} on rank {rank}"
                )
                return failed(Status.error, "RanksDisagree", message, rank=rank)
        merged[name] = {phase: [phases[phase] for phases in by_rank] for phase in by_rank[0]}
    slowest = max(outcome.measuring or 0.0 for outcome in outcomes)
    known = {"measurements": merged, "measuring": slowest}
    return outcomes[0].model_copy(update=known)
