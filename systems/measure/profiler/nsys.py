"""Profile a Python module with the profiler nsys of Nsight Systems.

nsys writes a report file. If the installation has only the collector, as that inside Nsight
Compute, it writes a .qdstrm file, from which a complete Nsight Systems makes a report. The command
`nsys stats --report nvtx_gpu_proj_sum,cuda_gpu_kern_sum REPORT` prints the times in the report by
range and by kernel.
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

REPORT = "report.nsys-rep"  # file name of the report
RECORDING = "report.qdstrm"  # file name of the recording, if nsys cannot make a report of it
_ROOT = Path(__file__).parents[3]  # folder of the package `systems`


def unsupported_reason() -> str | None:
    """Return the reason why nsys cannot profile on this machine, or None if it can."""
    if not torch.cuda.is_available():
        return "profiler: nsys needs a GPU, but this machine has no GPU"
    if shutil.which("nsys") is None:
        return "profiler: nsys needs Nsight Systems, but the program nsys is not on PATH"
    return None


def run_under_nsys(module: str, params_json: str, folder: Path) -> dict[str, Any]:
    """Run a Python module under the profiler nsys, and return the results that the module writes.

    The module is run as `python -m MODULE PARAMS.json FACTS.json`. It must read its parameters from
    PARAMS.json and write a dict of results to FACTS.json. nsys records from the module's call of
    torch.cuda.profiler.start to its call of torch.cuda.profiler.stop. The result also has the key
    `report`, the file name of the report or of the recording, in `folder`.

    Raises:
        RuntimeError: if nsys or the module fails, or if a file is missing after the run. Their
            output is written to stdout and stderr of this process.
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
        written = next((file for file in (report, folder / RECORDING) if file.exists()), report)
        missing = [str(file) for file in (facts, written) if not file.exists()]
        if code or missing:
            left = f" and did not write {', '.join(missing)}" if missing else ""
            raise RuntimeError(f"nsys exited with code {code}{left}; command: {' '.join(command)}")
        found: dict[str, Any] = json.loads(facts.read_text())
    return found | {"report": written.name}


def _command(nsys: str, report: Path, module: list[str]) -> list[str]:
    """Return the nsys command. CPU sampling is off, because it would slow down the module."""
    return [
        nsys, "profile",
        "--trace=cuda,nvtx",
        "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",  # nsys adds the suffix
        sys.executable, "-m", *module,
    ]  # fmt: skip
