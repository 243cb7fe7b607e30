"""The annotated steps of a training under Nsight Systems: the command, and the process it starts.

nsys profile ... python -m systems.measure.under_nsys PARAMS.json FACTS.json

What nsys finds is in its report; `nsys stats --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum` prints
it by range and by kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from systems.benchmarks.profile import Params

REPORT = "report.nsys-rep"
_ROOT = Path(__file__).parents[2]  # of the package `systems`, wherever the run was started


def nsys_command(nsys: str, report: Path, params: Path, facts: Path) -> list[str]:
    """What is run. Only the profiled steps are recorded: capture starts and stops where the program
    says so, and the program goes on after it. The CPU is not sampled, which would slow it."""
    return [
        nsys, "profile",
        "--trace=cuda,nvtx",
        "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",  # nsys adds its own suffix
        sys.executable, "-m", "systems.measure.under_nsys", str(params), str(facts),
    ]  # fmt: skip


def why_not_nsys() -> str | None:
    """Why nsys cannot show a training here, or None if it can."""
    if not torch.cuda.is_available():
        return "profiler: nsys shows what a GPU does; this machine has none"
    if shutil.which("nsys") is None:
        return "profiler: nsys needs Nsight Systems; there is no nsys on PATH"
    return None


def run_under_nsys(params: Params, folder: Path) -> dict[str, Any]:
    """Run the steps in a process of their own under nsys; the report is left in the folder.

    Raises:
        RuntimeError: nsys, or the process under it, failed; their output is this process's.
    """
    nsys = shutil.which("nsys")
    assert nsys is not None
    report = folder / REPORT
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        given, facts = Path(scratch, "params.json"), Path(scratch, "facts.json")
        given.write_text(params.model_dump_json())
        command = nsys_command(nsys, report, given, facts)
        code = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode
        missing = [str(file) for file in (facts, report) if not file.exists()]
        if code or missing:
            left = f", and did not write {', '.join(missing)}" if missing else ""
            raise RuntimeError(f"nsys ended with {code}{left}: {' '.join(command)}")
        found: dict[str, Any] = json.loads(facts.read_text())
    return found | {"report": report.name}


def _steps(params: Params) -> dict[str, Any]:
    """Facts of the steps that nsys records: the time of each range by Python's clock."""
    from systems.benchmarks.profile import PROFILED_STEPS
    from systems.training.profiler_ranges import annotate_attention, annotated_step
    from systems.training.step_timing import phases_of
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make_training(params, device)
    annotate_attention(training)
    phases = phases_of(training)
    for _ in range(max(1, params.warmup_steps)):
        annotated_step(training, phases)
    if device.type == "cuda":
        torch.cuda.profiler.start()
    steps = [annotated_step(training, phases) for _ in range(PROFILED_STEPS)]
    if device.type == "cuda":
        torch.cuda.profiler.stop()
    range_ms = {name: statistics.fmean(times[name] for times in steps) for name in phases}
    range_ms["train_step"] = sum(range_ms.values())
    return {"profiled_steps": PROFILED_STEPS, "range_ms": range_ms}


if __name__ == "__main__":
    from systems.benchmarks.profile import Params as _Params

    _given, _facts = (Path(argument) for argument in sys.argv[1:])
    _facts.write_text(json.dumps(_steps(_Params.model_validate_json(_given.read_text()))))
