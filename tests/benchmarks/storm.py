"""A benchmark with short runs and a child process, for the test that kills processes at random."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from systems.benchmark import BenchmarkParams, artifacts_folder

VERSION = 1
PRELOAD = ()
RUN_S = 0.05


class Params(BenchmarkParams):
    index: int
    gloo: bool = False


def run(params: Params) -> dict[str, Any]:
    """Start a child in a session of its own, which outlives the run, and return after RUN_S."""
    null = subprocess.DEVNULL
    subprocess.Popen(
        ["sleep", "1000"], stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    (artifacts_folder() / f"trace{os.environ.get('RANK', '')}").write_text(f"{params.index}")
    time.sleep(RUN_S)
    if params.gloo:
        import torch.distributed as dist

        from systems.process_group import process_group

        with process_group("gloo"):
            dist.barrier()
    return {"samples_ms": {"call": [float(params.index)]}}
