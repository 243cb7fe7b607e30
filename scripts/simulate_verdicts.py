"""Judge generated results of known truth with `aggregate.py compare`, and print how often it errs.

python scripts/simulate_verdicts.py          # the table of docs/verdicts.md, with more designs
python scripts/simulate_verdicts.py --blocks 400 --noise power-capped --design 1x5

A block has a baseline, which is executed twice in each round, and four candidates, of which one may
be slower. Two of three blocks have two phases, the third has one: three blocks have 20 cells.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.block import Block
from jobs.cli.application import app
from jobs.results.counting import place_of
from jobs.results.manifest import Executor, Job, Manifest, write_manifest
from jobs.results.record import RECORDS, Record
from jobs.run import Run, Shape
from jobs.sweep.schema import Sweep
from jobs.verdicts.decided import judge_block

NAME = "simulated"  # no such benchmark exists, so no result is of older code
CANDIDATES = 4
PHASES = ("forward", "backward")
SLOWDOWNS = (0.01, 0.02, 0.05)
MARGIN = 0.01
# Allocations of a block, and rounds in each. `auto` ends a block that is decided, from round 3 on.
DESIGNS = {"1x3": (1, 3), "1x5": (1, 5), "1x10": (1, 10), "2x5": (2, 5), "3x5": (3, 5),
           "auto": (1, 10)}  # fmt: skip
TITLES = ["noise", "design", "false", "exit 1", "exit 0", "covered", "half-width", "same"]
TITLES += [*(f"finds {slowdown:.0%}" for slowdown in SLOWDOWNS), "2% same", "rounds"]
Entry = dict[str, Any]  # a record, as JSON data
Cell = dict[str, str]  # a row that the command prints
Judged = tuple[list[Cell], list[int]]  # cells, and exit codes of folders
Rng = np.random.Generator


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the logarithm of a process's time, in percent.

    `process`, `correlation` and the share of processes whose clock shifts are measured on GPUs. The
    other values are assumed, and so are all of CPUs.
    """

    name: str
    process: float  # of a process, at the same conditions
    other: float | None = None  # the same for half of the blocks; None: as `process`
    correlation: float = 0.3  # of the phases of a process
    tails: float | None = None  # degrees of freedom of Student's t; None: normal distribution
    shift: float = 0.0  # size of a shift of the clock, which 31% of the processes have
    outlier: float = 0.0  # size of a deviation that 5% of the processes have, up or down
    host: float = 1.5  # of a host, equal for all its processes
    ratio: float = 0.0  # of the ratio on one host
    drift: float = 0.2  # steady change per round
    first: float = 0.0  # by how much the first process of a round is faster
    early: float = 0.0  # by how much candidates are faster in the first round of a job
    time_ms: float = 1.0
    tick_ms: float = 0.0  # resolution of the timer


NOISES = (
    Noise("one head, 8k tokens, quiet", 0.1),
    Noise("one head, 8k tokens, noisy", 0.46),
    Noise("one head, 1k tokens, quiet", 0.5),
    Noise("one head, 1k tokens, noisy", 1.1),
    Noise("power-capped", 0.48, shift=1.0),
    Noise("drift of 1% per round", 0.4, drift=1.0),
    Noise("heavy tails", 0.4, tails=3),
    Noise("ratio differs by host", 0.2, ratio=0.5),
    Noise("CPU", 3.0),
    Noise("3 us, timer of 32 ns", 0.5, time_ms=3e-3, tick_ms=32e-6),
    Noise("outliers of 3%", 0.46, outlier=3.0),
    Noise("first process 1% fast", 0.1, first=1.0),
    Noise("first round 0.3% fast", 0.1, early=0.3),
    Noise("quiet and noisy blocks", 0.1, other=1.1),
)


def compare(folder: Path) -> tuple[int, list[Cell]]:
    """Return the exit code of `aggregate.py compare FOLDER`, and the cells that it prints."""
    done = CliRunner().invoke(app, ["compare", str(folder), "--format", "csv"])
    if done.stderr or not isinstance(done.exception, SystemExit | None) or done.exit_code == 2:
        raise RuntimeError(f"compare {folder}: {done.stderr}") from done.exception
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    return done.exit_code, list(csv.DictReader(lines))


def write(folder: Path, id: str, runs: list[Run], blocks: list[Block], made: list[Entry]) -> None:
    """Add a submission with its records to a results folder."""
    manifest = Manifest(
        folder, id, made[0]["started_at"], Executor.local, Sweep(name=NAME, benchmark=NAME), "", "",
        {run.id: run for run in runs},
        [Job(0, Shape(), 60, [(entry["run"], entry["repeat"]) for entry in made])],
        done=[], provenance={}, blocks=blocks,
    )  # fmt: skip
    write_manifest(manifest)
    (folder / RECORDS).mkdir(exist_ok=True)
    lines = "".join(f"{json.dumps(entry)}\n" for entry in made)
    (folder / RECORDS / f"{id}.jsonl").write_text(lines)


def generate(folder: Path, noise: Noise, design: str, count: int, slow: float, rng: Rng) -> None:
    """Write a results folder with `count` blocks. One candidate of each is slower by `slow`."""
    allocations, rounds = DESIGNS[design]
    runs, blocks = list[Run](), list[Block]()
    made = [list[Entry]() for _ in range(allocations)]
    for number in range(count):
        truth = np.ones(1 + CANDIDATES)  # ratio of each run to the baseline, which is the first run
        truth[rng.integers(1, 1 + CANDIDATES)] += slow
        ids = tuple(f"{number:012x}{i:04x}" for i in range(1 + CANDIDATES))
        block = Block(id=ids[0][:12], baseline=ids[0], runs=ids, rounds=rounds, aa=True)
        blocks.append(block)
        for i, id in enumerate(ids):
            params = {"block": number, "run": i, "true_ratio": float(truth[i])}
            runs.append(Run(id, NAME, 1, params, Shape(), 60.0))
        phases = PHASES[: 1 if number % 3 == 2 else 2]
        orders = [[ids.index(run) for run, _ in block.tasks(round)] for round in range(rounds)]
        times = _times(noise, truth, np.array(orders), allocations, rng).tolist()
        for allocation, of_allocation in enumerate(times):
            own = [
                _entry(block, round, place, str(allocation), dict(zip(phases, ms, strict=False)))
                for round, of_round in enumerate(of_allocation)
                for place, ms in enumerate(of_round)
            ]
            made[allocation] += own if design != "auto" else _until_decided(block, phases, own)
    for allocation, entries in enumerate(made):
        write(folder, str(allocation), runs, blocks, entries)


def _times(noise: Noise, truth: np.ndarray, order: np.ndarray, hosts: int, rng: Rng) -> np.ndarray:
    """Return the times of a block in ms, by host, round, position in the round, and phase.

    `order` has the number of the executed run by round and position. 0 is the baseline.
    """
    shape, (rounds, places) = (hosts, *order.shape, 1), order.shape
    draw = partial(rng.standard_t, noise.tails) if noise.tails else rng.standard_normal
    own, common = draw(size=(*shape[:3], len(PHASES))), draw(size=shape)
    logs = np.sqrt(1 - noise.correlation) * own + np.sqrt(noise.correlation) * common
    if noise.tails:  # Student's t has a larger standard deviation than 1
        logs /= np.sqrt(noise.tails / (noise.tails - 2))
    is_other = noise.other is not None and rng.random() < 0.5
    logs *= noise.other if is_other else noise.process
    logs += noise.shift * rng.choice([-1, 0, 1], shape, p=[0.155, 0.69, 0.155])
    logs += noise.outlier * rng.choice([-1, 0, 1], shape, p=[0.025, 0.95, 0.025])
    logs += noise.host * rng.standard_normal((hosts, 1, 1, 1))
    moments = np.arange(rounds)[:, None, None] + np.arange(places)[:, None] / places
    logs += noise.drift * rng.choice([-1, 1], (hosts, 1, 1, 1)) * moments
    of_host = noise.ratio * rng.standard_normal((hosts, len(truth), len(PHASES)))
    of_host[:, 0] = 0
    logs += of_host[:, order]
    logs[:, :, 0] -= noise.first
    logs[:, 0] -= noise.early * (order[0] > 0)[:, None]
    times: np.ndarray = noise.time_ms * truth[order][..., None] * np.exp(logs / 100)
    return np.round(times / noise.tick_ms) * noise.tick_ms if noise.tick_ms else times


def _entry(block: Block, round: int, position: int, boot: str, ms: dict[str, float]) -> Entry:
    tasks = block.tasks(round)
    run, repeat = tasks[position]
    start = 1e6 * int(boot) + 1000 * round + position
    place = {
        "id": block.id, "round": round, "execution": f"{boot}-{round}", "position": position,
        "size": len(tasks), "baseline": run == block.baseline,
        "second": block.is_twice(run) and repeat % 2 == 1,
    }  # fmt: skip
    return {
        "run": run, "repeat": repeat, "attempt": 1, "status": "ok", "sweep": NAME, "job": 0,
        "submission": boot, "benchmark": NAME, "version": 1, "params": {}, "device": "NVIDIA H200",
        "started_at": start, "finished_at": start + 0.5, "environment": {"boot_id": boot},
        "measurements": {"samples_ms": {phase: [time] for phase, time in ms.items()}},
        "gpus": [{"uuid": "GPU-0"}], "block": place,
    }  # fmt: skip


def _until_decided(block: Block, phases: tuple[str, ...], made: list[Entry]) -> list[Entry]:
    """Return the records up to the first round, from the third, after which a block is decided."""
    records = [Record.model_validate(entry) for entry in made]
    for rounds in range(3, block.rounds):
        found = [record for record in records if place_of(record).round < rounds]
        if judge_block(found, block, MARGIN, phases).is_decided:
            return made[: len(found)]
    return made


def judged(noise: Noise, design: str, count: int, slow: float, rng: Rng) -> Judged:
    """Return at least `count` cells that are slower by `slow`, and the exit codes of their folders.

    A folder of unchanged code has 20 cells, another has 100 that are slower, and others.
    """
    cells, codes = list[Cell](), list[int]()
    while len(cells) < count:
        with tempfile.TemporaryDirectory(prefix="simulated-") as name:
            generate(Path(name), noise, design, 60 if slow else 3, slow, rng)
            code, printed = compare(Path(name))
        codes.append(code)
        cells += [cell for cell in printed if float(cell.get("true_ratio", 1)) == 1 + slow]
    return cells, codes


def table_row(noise: Noise, design: str, count: int, seed: int) -> list[str]:
    """Return the figures of a noise and a design, as texts."""

    def share(found: list[Cell], *verdicts: str) -> float:
        return sum(cell["verdict"] in verdicts for cell in found) / len(found)

    rng = np.random.default_rng([seed, NOISES.index(noise), list(DESIGNS).index(design)])
    same, codes = judged(noise, design, count, 0, rng)
    slow = [judged(noise, design, count // 4, slowdown, rng)[0] for slowdown in SLOWDOWNS]
    low, high = (np.array([float(cell[end] or "nan") for cell in same]) for end in ("low", "high"))
    return [
        noise.name, design, f"{share(same, 'faster', 'slower'):.2%}",
        *(f"{codes.count(code) / len(codes):.0%}" for code in (1, 0)),
        f"{np.mean((low <= 1) & (high >= 1)):.1%}", f"{np.mean(np.log(high / low)) / 2:.2%}",
        f"{share(same, 'same'):.0%}", *(f"{share(found, 'slower'):.0%}" for found in slow),
        f"{share(slow[1], 'same'):.1%}", f"{np.mean([float(c['rounds']) for c in same]):.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2000, help="cells a figure; slower: a fourth")
    parser.add_argument("--noise", choices=[noise.name for noise in NOISES])
    parser.add_argument("--design", choices=DESIGNS)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.jobs) as pool:
        rows = [
            (noise, design, given.blocks, given.seed)
            for noise in NOISES if given.noise in (None, noise.name)
            for design in DESIGNS if given.design in (None, design)
        ]  # fmt: skip
        print(f"| {' | '.join(TITLES)} |\n|{' --- |' * len(TITLES)}", flush=True)
        for texts in pool.map(table_row, *zip(*rows, strict=True)):
            print(f"| {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
