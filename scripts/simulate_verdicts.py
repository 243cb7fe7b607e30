"""Simulate comparisons whose true ratio is known, and print how often their verdicts are wrong.

python scripts/simulate_verdicts.py                # the table of docs/verdicts.md, about a minute
python scripts/simulate_verdicts.py --blocks 1000  # faster and less accurate

A study has 10 blocks with one candidate each. Its A/A floor comes from these blocks. A block has
six processes per round: the baseline, four candidates, and the baseline again, in an order that is
reversed every round. One of the four candidates is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.verdicts.judge import (
    MARGIN,
    Round,
    Verdict,
    aa_floor,
    decide,
    floor_of_block,
    judge,
)

BLOCKS_PER_STUDY = 10
PROCESSES = 6  # per round
SLOWDOWNS = (0.01, 0.02, 0.05)
SEED = 20


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the logarithm of a time, in percent.

    `process` is measured on H200 GPUs, as is the share of processes whose clock shifts. The other
    values are assumed: the noise of CPUs, `sample`, `drift`, `ratio`, `tails` and the part of
    `shift` in the noise under a power cap.
    """

    name: str
    process: float  # of a process, at the same conditions
    sample: float = 1.0  # of one of the 100 samples of a process
    shift: float = 0.0  # size of a shift of the clock, which 31% of the processes have
    host: float = 1.5  # of a host, equal for all its processes
    drift: float = 0.2  # steady change per round
    ratio: float = 0.0  # of the ratio on one host
    tails: float | None = None  # degrees of freedom of Student's t; None: normal distribution


NOISES = (
    Noise("one head, 8k tokens, quiet", 0.1),
    Noise("one head, 8k tokens, noisy", 0.4),
    Noise("one head, 1k tokens, quiet", 0.5),
    Noise("one head, 1k tokens, noisy", 1.1),
    Noise("power-capped", 0.48, shift=1.0),
    Noise("drift of 1% per round", 0.4, drift=1.0),
    Noise("heavy tails", 0.4, tails=3),
    Noise("ratio differs by host", 0.2, ratio=0.3),
    Noise("CPU", 3.0, sample=10.0),
)


@dataclass(frozen=True)
class Design:
    """How many allocations a block has, and how many rounds in each."""

    allocations: int
    rounds: int


DESIGNS = (Design(1, 3), Design(1, 5), Design(1, 10), Design(2, 5), Design(3, 5))


@dataclass
class Outcome:
    """Counts of verdicts and sums over simulated blocks."""

    blocks: int = 0
    covered: int = 0
    half_widths: list[float] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    studies: int = 0
    failed: int = 0  # studies without a slowdown that have the exit code 1

    def share(self, *names: str) -> float:
        return sum(self.verdicts[name] for name in names) / self.blocks


def simulate(noise: Noise, design: Design, blocks: int, slowdown: float = 0.0) -> Outcome:
    """Return the verdicts on simulated blocks.

    Args:
        blocks: number of blocks, a multiple of 10.
        slowdown: true relative difference of the candidate, such as 0.02.
    """
    outcome = Outcome()
    for study in _studies(noise, design, blocks, slowdown):
        floor = aa_floor(study)
        verdicts = [judge(rounds, MARGIN, floor_of_block(rounds, floor)) for rounds in study]
        for verdict in verdicts:
            _count(outcome, verdict, 1 + slowdown)
        outcome.studies += 1
        if slowdown == 0:
            outcome.failed += decide(verdicts) == 1
    return outcome


def _count(outcome: Outcome, verdict: Verdict, ratio: float) -> None:
    assert verdict.low is not None and verdict.high is not None
    outcome.blocks += 1
    outcome.verdicts[verdict.verdict] += 1
    outcome.covered += verdict.low <= ratio <= verdict.high
    outcome.half_widths.append(np.log(verdict.high / verdict.low) / 2)


def _studies(
    noise: Noise, design: Design, blocks: int, slowdown: float
) -> Iterator[list[list[Round]]]:
    """Yield the blocks of each study, as their rounds."""
    random = np.random.default_rng(SEED)
    shape = (blocks, design.allocations, design.rounds, 3)  # baseline, baseline again, candidate
    logs = noise.process * _standard(random, shape, noise.tails)
    # The standard deviation of the median of n normal samples is sqrt(pi / 2 / n) of that of one.
    logs += noise.sample * np.sqrt(np.pi / 2 / 100) * random.standard_normal(shape)
    logs += noise.shift * random.choice([-1, 0, 1], shape, p=[0.155, 0.69, 0.155])
    logs += noise.host * random.standard_normal((*shape[:2], 1, 1))
    logs[..., 2] += noise.ratio * random.standard_normal((*shape[:2], 1))
    slope = noise.drift * random.choice([-1.0, 1.0], (*shape[:2], 1, 1))
    logs += slope * (np.arange(design.rounds)[:, None] + _moments(random, shape) / PROCESSES)
    times = np.exp(logs / 100)
    times[..., 2] *= 1 + slowdown
    rounds = [
        [
            Round(str(allocation), (first, second), candidate)
            for allocation, of_allocation in enumerate(block)
            for first, second, candidate in of_allocation
        ]
        for block in times.tolist()
    ]
    for start in range(0, blocks, BLOCKS_PER_STUDY):
        yield rounds[start : start + BLOCKS_PER_STUDY]


def _standard(
    random: np.random.Generator, shape: tuple[int, ...], tails: float | None
) -> np.ndarray:
    """Return random numbers with the standard deviation 1."""
    if tails is None:
        return random.standard_normal(shape)
    numbers: np.ndarray = random.standard_t(tails, shape) / np.sqrt(tails / (tails - 2))
    return numbers


def _moments(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return the positions of baseline, baseline again and candidate in each round."""
    positions = np.empty(shape)
    positions[..., 0], positions[..., 1] = 0, PROCESSES - 1
    positions[..., 2] = random.integers(1, PROCESSES - 1, (shape[0], 1, 1))
    positions[:, :, 1::2] = PROCESSES - 1 - positions[:, :, 1::2]
    return positions


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000, help="same-against-same blocks")
    blocks = parser.parse_args(arguments).blocks
    if blocks < 100 or blocks % 100:
        parser.error(f"--blocks must be a positive multiple of 100, got {blocks}")
    titles = ["noise", "allocations x rounds", "false", "exit 1", "covered", "half-width", "same"]
    titles += [f"finds {slowdown:.0%}" for slowdown in SLOWDOWNS] + ["2% same"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for noise in NOISES:
        # The interval of one allocation is not about the mean over hosts, see docs/verdicts.md.
        for design in DESIGNS[3:] if noise.ratio else DESIGNS:
            print(f"| {' | '.join(_row(noise, design, blocks))} |")


def _row(noise: Noise, design: Design, blocks: int) -> list[str]:
    null = simulate(noise, design, blocks)
    slow = [simulate(noise, design, blocks // 10, slowdown) for slowdown in SLOWDOWNS]
    return [
        noise.name,
        f"{design.allocations} x {design.rounds}",
        f"{null.share('faster', 'slower'):.2%}",
        f"{null.failed / null.studies:.1%}",
        f"{null.covered / null.blocks:.1%}",
        f"{np.mean(null.half_widths):.2%}",
        f"{null.share('same'):.0%}",
        *(f"{outcome.share('slower'):.0%}" for outcome in slow),
        f"{slow[1].share('same'):.1%}",
    ]


if __name__ == "__main__":
    main()
