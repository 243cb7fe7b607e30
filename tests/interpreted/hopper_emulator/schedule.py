"""Chooses at random which warpgroup or asynchronous operation proceeds.

An agent is a warpgroup, or the part of a program before `gl.warp_specialize`. It runs in a thread
of its own. Only one agent runs at a time. At each synchronization point it calls `switch`, which
executes some asynchronous operations and continues an agent. Both are chosen at random by weights,
so that some agents are much faster than others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SPREAD = 3.0  # standard deviation of the logarithm of a weight


class Deadlock(Exception):
    """All agents wait, and no asynchronous operation is left."""


class Stopped(BaseException):
    """Raised in the threads of the other agents after an error, to end them."""


@dataclass(eq=False)
class Operation:
    """An asynchronous operation: a copy by TMA or a WGMMA."""

    execute: Callable[[], None]
    weight: float
    is_done: bool = False

    def complete(self) -> None:
        if not self.is_done:
            self.execute()
            self.is_done = True


@dataclass(eq=False)
class Agent:
    """A thread that executes the code of a warpgroup.

    Fields:
        program, n_programs: index of its program, and number of programs of the launch.
        is_ready: condition for which it waits.
        waits_for: description of this condition.
        wgmmas: the WGMMAs that it has started and for which it has not waited. They are executed
            in order.
        copies: the same for its copies from shared to global memory, which have no order.
        unfenced: stores to shared memory that TMA and WGMMA do not see yet.
    """

    program: int
    n_programs: int
    weight: float
    is_ready: Callable[[], bool] | None = None
    waits_for: str = ""
    is_finished: bool = False
    wgmmas: list[Operation] = field(default_factory=list)
    copies: list[Operation] = field(default_factory=list)
    unfenced: list[Callable[[], None]] = field(default_factory=list)
    resumed: threading.Event = field(default_factory=threading.Event)


class Schedule:
    """The agents and asynchronous operations of one launch of a kernel.

    Args:
        seed: seed of the random choices.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.agents: list[Agent] = []
        self.loads: list[Operation] = []  # copies from global to shared memory
        self.current: Agent | None = None
        self.error: BaseException | None = None
        self._ended = threading.Event()

    def weight(self) -> float:
        return self.random.lognormvariate(0, SPREAD)

    def operation(self, execute: Callable[[], None]) -> Operation:
        return Operation(execute, self.weight())

    def run(self, bodies: Sequence[Callable[[], None]], n_programs: int) -> None:
        """Run functions in parallel, each as an agent. Raise the first error of an agent."""
        for body in bodies:
            self.start(body, -1, n_programs)
        self._continue_one()
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def start(self, body: Callable[[], None], program: int, n_programs: int) -> Agent:
        """Create an agent that calls `body`. It runs when the schedule chooses it."""
        agent = Agent(program, n_programs, self.weight())
        self.agents.append(agent)
        threading.Thread(target=self._run_agent, args=(agent, body), daemon=True).start()
        return agent

    def _run_agent(self, agent: Agent, body: Callable[[], None]) -> None:
        agent.resumed.wait()
        agent.resumed.clear()
        try:
            if self.error is None:
                body()
                assert not agent.wgmmas, "the warpgroup ends before a wait for its WGMMAs"
                assert not agent.copies, "the warpgroup ends before a wait for its copies"
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        agent.is_finished = True
        self.agents.remove(agent)
        self._continue_one()

    def switch(self, is_ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let other agents proceed. Return when `is_ready` holds."""
        me = self.agent()
        me.is_ready, me.waits_for = is_ready, waits_for
        chosen = self._choose()
        if chosen is me:
            return
        self._resume(chosen)
        me.resumed.wait()
        me.resumed.clear()
        if self.error is not None:
            raise Stopped

    def agent(self) -> Agent:
        """Return the agent that is running."""
        assert self.current is not None
        return self.current

    def _continue_one(self) -> None:
        """Continue an agent, without waiting. End if there is none."""
        if not self.agents:
            self._ended.set()
            return
        try:
            chosen = self.agents[0] if self.error is not None else self._choose()
        except Deadlock as error:
            self.error = error
            chosen = self.agents[0]
        self._resume(chosen)

    def _resume(self, agent: Agent) -> None:
        self.current = agent
        agent.resumed.set()

    def _choose(self) -> Agent:
        """Execute asynchronous operations at random, until an agent is chosen, and return it."""
        while True:
            ready = [x for x in self.agents if x.is_ready is None or x.is_ready()]
            operations = list(self._executable())
            if not ready and not operations:
                waits = [f"program {x.program} waits for {x.waits_for}" for x in self.agents]
                raise Deadlock("; ".join(waits))
            choices: list[Agent | Operation] = [*ready, *operations]
            (chosen,) = self.random.choices(choices, [x.weight for x in choices])
            if isinstance(chosen, Agent):
                return chosen
            chosen.complete()

    def _executable(self) -> Iterator[Operation]:
        self.loads = [x for x in self.loads if not x.is_done]
        yield from self.loads
        for agent in self.agents:
            yield from [x for x in agent.wgmmas if not x.is_done][:1]
            yield from [x for x in agent.copies if not x.is_done]


_active: Schedule | None = None  # the schedule of the launch that is being executed


def active() -> Schedule:
    assert _active is not None
    return _active


def execute(schedule: Schedule, bodies: Sequence[Callable[[], None]], n_programs: int) -> None:
    """Make a schedule the active one, and run functions in it, see `Schedule.run`."""
    global _active
    _active = schedule
    try:
        schedule.run(bodies, n_programs)
    finally:
        _active = None


def complete_but(operations: list[Operation], pending: int) -> None:
    """Execute the operations except the last `pending` ones, and remove them from the list."""
    earlier = operations[: max(len(operations) - pending, 0)]
    for operation in earlier:
        operation.complete()
    del operations[: len(earlier)]
