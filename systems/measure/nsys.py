"""Run a module under Nsight Systems (nsys) and keep the report.

What nsys finds is in its report; `nsys stats --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum` prints
it by range and by kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

REPORT = "report.nsys-rep"
_ROOT = Path(__file__).parents[2]  # of the package `systems`, wherever the run was started


def unsupported_reason() -> str | None:
    """Return why nsys cannot profile on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "profiler: nsys shows what a GPU does; this machine has none"
    if shutil.which("nsys") is None:
        return "profiler: nsys needs Nsight Systems; there is no nsys on PATH"
    return None


def run_under_nsys(module: str, params_json: str, folder: Path) -> dict[str, Any]:
    """Run `python -m MODULE PARAMS.json FACTS.json` under nsys and return the facts it wrote.

    nsys records between the module's calls of torch.cuda.profiler.start and stop; without them the
    report stays empty.

    Args:
        module: a module to run, by its full name.
        params_json: what it finds in PARAMS.json.
        folder: where the report is left; the facts name it under `report`.

    Raises:
        RuntimeError: nsys, or the process under it, failed; their output is this process's.
    """
    nsys = shutil.which("nsys")
    assert nsys is not None
    report = folder / REPORT
    python_path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        params, facts = Path(scratch, "params.json"), Path(scratch, "facts.json")
        params.write_text(params_json)
        command = _command(nsys, report, [module, str(params), str(facts)])
        code = subprocess.run(command, env=os.environ | {"PYTHONPATH": python_path}).returncode
        missing = [str(file) for file in (facts, report) if not file.exists()]
        if code or missing:
            left = f", and did not write {', '.join(missing)}" if missing else ""
            raise RuntimeError(f"nsys ended with {code}{left}: {' '.join(command)}")
        found: dict[str, Any] = json.loads(facts.read_text())
    return found | {"report": report.name}


def _command(nsys: str, report: Path, module: list[str]) -> list[str]:
    """Return the nsys command. The CPU is not sampled, which would slow it."""
    return [
        nsys, "profile",
        "--trace=cuda,nvtx",
        "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",  # nsys adds its own suffix
        sys.executable, "-m", *module,
    ]  # fmt: skip
