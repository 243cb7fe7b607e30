"""Chooses at random which warpgroup or asynchronous operation proceeds.

An agent is a warpgroup, or the part of a program before `gl.warp_specialize`. It runs in a thread
of its own, and only one agent runs at a time. Before each action that others can see, an agent
calls `Schedule.switch`. This executes some asynchronous operations, and continues an agent. Both
are chosen at random by weights, so that some agents are much faster than others.

In tests/systems/parallel/test_peer_order.py, agents are ranks and their streams.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SPREAD = 3.0  # standard deviation of the logarithm of a weight
MOST_CHOICES = 1_000_000  # of one launch; the launches of the tests need some thousands


class Deadlock(Exception):
    """All agents wait, and no asynchronous operation is left, or a launch does not end."""


class Stopped(BaseException):
    """Raised in the threads of the other agents after an error, to end them."""


@dataclass(eq=False)
class Operation:
    """An asynchronous operation: a WGMMA, or the read or the write of a copy by TMA."""

    action: Callable[[], None]
    weight: float
    is_done: bool = False

    def complete(self) -> None:
        if not self.is_done:
            self.action()
            self.is_done = True


@dataclass(eq=False)
class Agent:
    """A thread that executes the code of a warpgroup.

    Fields:
        program: index of its program.
        is_ready: condition for which it waits.
        waits_for: description of this condition.
        wgmmas: the WGMMAs that it has started and for which it has not waited. They are executed
            in order.
        reads, writes: the same for its copies from shared to global memory, which have no order:
            the reads of shared memory, and the writes to global memory that follow them.
        additions: its additions to global memory by threads that it has not released.
        unfenced: what the next fence makes visible to TMA and WGMMA.
        polled: values that it has read last from counters in global memory.
    """

    program: int
    weight: float
    is_ready: Callable[[], bool] | None = None
    waits_for: str = ""
    is_finished: bool = False
    wgmmas: list[Operation] = field(default_factory=list)
    reads: list[Operation] = field(default_factory=list)
    writes: list[Operation] = field(default_factory=list)
    additions: list[Operation] = field(default_factory=list)
    unfenced: list[Callable[[], None]] = field(default_factory=list)
    polled: dict[tuple[int, int], int] = field(default_factory=dict)
    resumed: threading.Event = field(default_factory=threading.Event)


class Schedule:
    """The agents and asynchronous operations of one launch of a kernel."""

    def __init__(self, seed: int, n_programs: int = 1):
        self.n_programs = n_programs
        self._random = random.Random(seed)
        self._agents: list[Agent] = []
        self._running: Agent | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._n_choices = 0
        # Operations that may outlast the agent that started them
        self.detached: list[Operation] = []

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run functions in parallel, each as an agent. Raise the first error of an agent.

        Until they end, this schedule is the active one.
        """
        global _active
        _active = self
        for body in bodies:
            self.start(body)
        self._resume_another()
        try:
            self._ended.wait()
        except BaseException:  # such as KeyboardInterrupt
            self._error = Stopped()
            raise
        finally:
            _active = None
        if self._error is not None:
            raise self._error

    def start(self, body: Callable[[], None], program: int = -1) -> Agent:
        """Create an agent that calls `body`. It runs when the schedule chooses it."""
        agent = Agent(program, self._weight())
        self._agents.append(agent)
        threading.Thread(target=self._run_agent, args=(agent, body), daemon=True).start()
        return agent

    def operation(self, action: Callable[[], None], slowness: float = 1.0) -> Operation:
        """Return a new operation. One with a large slowness is usually executed late."""
        return Operation(action, self._weight() / slowness)

    @property
    def running(self) -> Agent:
        """The agent whose thread runs."""
        assert self._running is not None
        return self._running

    def switch(self, is_ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let other agents proceed. Return when `is_ready` holds."""
        me = self.running
        me.is_ready, me.waits_for = is_ready, waits_for
        chosen = self._choose()
        if chosen is me:
            return
        self._resume(chosen)
        me.resumed.wait()
        me.resumed.clear()
        if self._error is not None:
            raise Stopped

    def _weight(self) -> float:
        return self._random.lognormvariate(0, SPREAD)

    def _run_agent(self, agent: Agent, body: Callable[[], None]) -> None:
        agent.resumed.wait()
        agent.resumed.clear()
        try:
            if self._error is None:
                body()
                assert not agent.wgmmas, "the warpgroup ends before a wait for its WGMMAs"
                assert not agent.reads, "the warpgroup ends before a wait for its copies"
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        agent.is_finished = True
        self._agents.remove(agent)
        self._resume_another()

    def _resume_another(self) -> None:
        """Resume an agent, from a thread that ends. If none is left, end the run."""
        try:
            if not self._agents and self._error is None:
                for operation in self.detached:
                    operation.complete()
            elif self._error is None:
                self._resume(self._choose())
                return
        except Exception as error:
            self._error = error
        if self._agents:  # after an error, each agent stops in turn
            self._resume(self._agents[0])
        else:
            self._ended.set()

    def _resume(self, agent: Agent) -> None:
        self._running = agent
        agent.resumed.set()

    def _choose(self) -> Agent:
        """Execute asynchronous operations at random, until an agent is chosen, and return it."""
        while True:
            self._n_choices += 1
            if self._n_choices > MOST_CHOICES:
                raise Deadlock(f"the launch does not end after {MOST_CHOICES} steps")
            ready = [x for x in self._agents if x.is_ready is None or x.is_ready()]
            operations = list(self._executable())
            if not ready and not operations:
                waits = [f"program {x.program} waits for {x.waits_for}" for x in self._agents]
                raise Deadlock("; ".join(waits))
            choices: list[Agent | Operation] = [*ready, *operations]
            (chosen,) = self._random.choices(choices, [x.weight for x in choices])
            if isinstance(chosen, Agent):
                return chosen
            chosen.complete()

    def _executable(self) -> Iterator[Operation]:
        self.detached = [x for x in self.detached if not x.is_done]
        yield from self.detached
        for agent in self._agents:
            yield from [x for x in agent.wgmmas if not x.is_done][:1]
            yield from [x for x in agent.reads if not x.is_done]


_active: Schedule | None = None  # the schedule of the launch that is being executed


def active() -> Schedule:
    assert _active is not None
    return _active


def complete_except_last(operations: list[Operation], n_last: int) -> None:
    """Execute the operations except the last ones, and remove them from the list."""
    earlier = operations[: max(len(operations) - n_last, 0)]
    for operation in earlier:
        operation.complete()
    del operations[: len(earlier)]
