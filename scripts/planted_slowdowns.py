"""Measure how often verdicts are right: plant slowdowns in a copy of the code, and compare.

    python scripts/planted_slowdowns.py OUT --on gpu --slowdown 0.02 --times 5

A copy of this project does extra work in every forward pass of attention. The copy is measured with
`--against` this project and `--rounds auto`, several times, and compared by `aggregate.py compare`.
Forward is slower in the copy, and backward is the same code. With `--slowdown 0` nothing is slower.

Results are kept in OUT. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
# clock cycles, so that it changes with the clock as the time of the kernel does. Near the power
# limit, such a pause lets the clock rise, which hides most of it. There the extra work is attention
# of one of the 64 heads, which takes about 2% of the time.
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
            if {cycles}:
                torch.cuda._sleep({cycles})
            else:
                with torch.no_grad():
                    function(q[:1, :1], k[:1, :1], v[:1, :1], is_causal=is_causal)
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
from systems.benchmarks.attention import Params
from systems.measure.timing import time_ms
from systems.check.attention_call import AttentionCall
call = AttentionCall(Params.model_validate({point!r}), torch.device("cuda"))
forward, before = call.phases()["forward"]
def ms(cycles):
    def run():
        forward()
        if cycles:
            torch.cuda._sleep(cycles)
    return statistics.median(time_ms(run, torch.device("cuda"), before=before))
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
        cycles = calibrate(point, slowdown) if on == "gpu" else 0
        with (partial / "systems" / "training" / "attention_choice.py").open("a") as file:
            file.write(PATCH.format(cycles=cycles, slowdown=slowdown))
    partial.rename(folder)


def measure(out: Path, on: str, slowdown: float, number: int) -> Path:
    """Measure the copy against this project, and return the results folder."""
    copy = out / f"copy-{on}-{slowdown:g}"
    results = out / f"results-{on}-{slowdown:g}-{number}"
    make_copy(copy, POINTS[on], on, slowdown)
    sweep = {
        "name": "planted",
        "benchmark": "attention",
        "fixed": POINTS[on],
        "resources": {"gpus_per_node": 0 if on == "cpu" else 1},
        # Backward near the power limit needs more rounds than 10.
        "blocks": {"rounds": "auto", "phases": ["forward"] if on == "gpu-power" else []},
    }
    path = out / f"planted-{on}.yaml"
    path.write_text(json.dumps(sweep))
    command = [sys.executable, "-m", "jobs.submit", str(path.resolve()), "--local"]
    command += ["--against", str(ROOT), "--out", str(results.resolve())]
    environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    subprocess.run(command, cwd=copy, env=environment, check=True)
    return results


def compared(results: Path, margin: float) -> tuple[list[dict[str, str]], int]:
    """Return the cells of `aggregate.py compare`, and its exit code."""
    command = [sys.executable, "aggregate.py", "compare", str(results.resolve()), "--format", "csv"]
    done = subprocess.run(
        [*command, "--margin", str(margin)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines)), done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--on", choices=list(POINTS), default="cpu")
    parser.add_argument("--slowdown", type=float, default=0.05)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--margin", type=float, default=0.01)
    given = parser.parse_args()
    if given.on == "gpu-power" and given.slowdown not in (0, 0.02):
        parser.error("--on gpu-power plants attention of one of 64 heads: --slowdown 0.02, or 0")
    given.out.mkdir(parents=True, exist_ok=True)
    verdicts: dict[str, Counter[str]] = {}
    codes: Counter[int] = Counter()
    for number in range(given.times):
        cells, code = compared(measure(given.out, given.on, given.slowdown, number), given.margin)
        codes[code] += 1
        for cell in cells:
            interval = f"{float(cell['ratio']):.4f} [{cell['low']:.6}, {cell['high']:.6}]"
            print(f"  {cell['phase']:18} {cell['rounds']} rounds: {interval} {cell['verdict']}")
            verdicts.setdefault(cell["phase"], Counter())[cell["verdict"]] += 1
    print(f"{given.on}, planted {given.slowdown:.0%}:")
    for name, found in verdicts.items():
        print(f"  {name:18} " + ", ".join(f"{n} {kind}" for kind, n in found.most_common()))
    print("  exit codes         " + ", ".join(f"{n} x {code}" for code, n in codes.items()))


if __name__ == "__main__":
    main()
