"""Measure how often verdicts are right: plant slowdowns in a copy of the code, and compare.

    python scripts/planted_slowdowns.py OUT --on gpu --slowdown 0.02 --rounds 40

A copy of this project does extra work in every forward pass of attention. The copy is measured with
`--against` this project, in one long block. Each group of consecutive rounds gives verdicts as a
block of its own would: on forward, which is slower, on backward, which is the same code, and on the
two measurements of the baseline (A/A). The A/A floor is that of all other groups. With `--slowdown
0` nothing is slower.

Results are kept in OUT. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.results.record_reader import read_records  # noqa: E402
from jobs.verdicts.judge import Round, Verdict, aa_floor, decide, judge  # noqa: E402
from jobs.verdicts.pairs import paired_rounds  # noqa: E402

COPIED = ("jobs", "systems", "sweeps", "pyproject.toml")
# Points whose forward is long enough that the launch of an extra kernel is no large part of it.
POINTS = {
    # One head fills the GPU, but computes less than a third of the time: no power limit.
    "gpu": {"implementation": "flash_hopper", "seq_len": 32768, "head_dim": 128, "num_heads": 1},
    # Computes most of the time, near the power limit.
    "gpu-power": {
        "implementation": "flash_hopper", "seq_len": 16384, "head_dim": 128, "num_heads": 16,
        "batch_size": 4,
    },
    "cpu": {
        "implementation": "sdpa_flash", "seq_len": 1024, "head_dim": 64, "num_heads": 4,
        "dtype": "fp32",
    },
}  # fmt: skip
# Appended to the module that returns the attention function. The extra time of a GPU is a number of
# clock cycles, so that it changes with the clock as the time of the kernel does.
PATCH = '''

_unchanged = attention_function


def attention_function(*arguments):
    """Return an attention function that does extra work after each forward pass."""
    function = _unchanged(*arguments)

    def slower(q, k, v, is_causal=False):
        import time

        import torch

        start = time.perf_counter()
        out = function(q, k, v, is_causal=is_causal)
        if q.is_cuda:
            torch.cuda._sleep({cycles})
            return out
        end = start + (time.perf_counter() - start) * (1 + {slowdown})
        while time.perf_counter() < end:
            pass
        return out

    return slower
'''


def calibrate(point: dict[str, object], slowdown: float) -> int:
    """Return the clock cycles that make a forward pass slower by a fraction, on this GPU."""
    code = f"""
import statistics, torch
from systems.benchmarks.attention import Params, _Call
from systems.measure.timing import time_ms
call = _Call(Params.model_validate({point!r}), torch.device("cuda"))
def ms(cycles):
    def run():
        call.forward()
        if cycles:
            torch.cuda._sleep(cycles)
    return statistics.median(time_ms(run, torch.device("cuda"), before=call.clear_gradients))
alone = ms(0)
cycles = int(alone * {slowdown} * 1.8e6)
for _ in range(6):
    added = ms(cycles) - ms(0)
    cycles = max(1, int(cycles + (alone * {slowdown} - added) * 1.8e6))
print(cycles)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def make_copy(folder: Path, point: dict[str, object], on: str, slowdown: float) -> None:
    """Copy the project to a folder, and make attention slower there."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in COPIED:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, partial / name, ignore=ignore)
        else:
            shutil.copy(source, partial / name)
    if slowdown:
        cycles = 0 if on == "cpu" else calibrate(point, slowdown)
        with (partial / "systems" / "training" / "attention_choice.py").open("a") as file:
            file.write(PATCH.format(cycles=cycles, slowdown=slowdown))
    partial.rename(folder)


def measure(out: Path, on: str, slowdown: float, rounds: int) -> Path:
    """Measure the copy against this project, and return the results folder."""
    copy, results = out / f"copy-{on}-{slowdown:g}", out / f"results-{on}-{slowdown:g}"
    make_copy(copy, POINTS[on], on, slowdown)
    sweep = {
        "name": "planted",
        "benchmark": "attention",
        "fixed": POINTS[on],
        "resources": {"gpus_per_node": 0 if on == "cpu" else 1},
        "blocks": {"rounds": rounds},
    }
    path = out / f"planted-{on}.yaml"
    path.write_text(json.dumps(sweep))
    command = [sys.executable, "-m", "jobs.submit", str(path.resolve()), "--local"]
    command += ["--against", str(ROOT), "--out", str(results.resolve())]
    environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    subprocess.run(command, cwd=copy, env=environment, check=True)
    return results


def groups(rounds: tuple[Round, ...], size: int) -> Iterator[list[Round]]:
    """Yield consecutive groups of rounds. An incomplete last group is left out."""
    for start in range(0, len(rounds) - size + 1, size):
        yield list(rounds[start : start + size])


def verdicts(results: Path, size: int, margin: float) -> dict[str, Counter[str]]:
    """Return the number of verdicts of each kind, by what is compared.

    The exit codes are those of `aggregate.py compare` for each group, over all phases.
    """
    counts: dict[str, Counter[str]] = {}
    of_groups: dict[int, list[Verdict]] = {}
    for pair in paired_rounds(read_records(results)[0]):
        parts = list(groups(pair.rounds, size))
        for i, part in enumerate(parts):
            floor = aa_floor([*parts[:i], *parts[i + 1 :]])
            judged = judge(part, margin, floor)
            of_groups.setdefault(i, []).append(judged)
            counts.setdefault(pair.phase, Counter())[judged.verdict] += 1
            twice = [replace(r, baseline=r.baseline[:1], candidate=r.baseline[1]) for r in part]
            verdict = judge(twice, margin, floor).verdict
            counts.setdefault(f"{pair.phase}, A/A", Counter())[verdict] += 1
        whole = judge(pair.rounds, margin, 0.0)
        if whole.low is not None and whole.high is not None:
            interval = f"{whole.ratio:.4f} [{whole.low:.4f}, {whole.high:.4f}]"
            print(f"  {pair.phase:18} all {whole.rounds} rounds: ratio {interval}")
    codes = Counter(f"exit {decide(found)}" for found in of_groups.values())
    return counts | {"all phases": codes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--on", choices=list(POINTS), default="cpu")
    parser.add_argument("--slowdown", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--verdict-rounds", type=int, default=5)
    parser.add_argument("--margin", type=float, default=0.01)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = measure(given.out, given.on, given.slowdown, given.rounds)
    print(f"{given.on}, planted {given.slowdown:.0%}, verdicts of {given.verdict_rounds} rounds:")
    for name, found in verdicts(results, given.verdict_rounds, given.margin).items():
        print(f"  {name:24} " + ", ".join(f"{n} {kind}" for kind, n in found.most_common()))


if __name__ == "__main__":
    main()
