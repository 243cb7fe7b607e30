"""Tests of the benchmark of the first steps. On a GPU they run in a new process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from systems.benchmarks.first_steps import Params, run
from tests.jobs.harness import ROOT
from tests.systems.training.tiny_training import no_gpu

RUN = """\
import json, sys
from systems.benchmarks.first_steps import Params, run
print(json.dumps(run(Params.model_validate_json(sys.argv[1]))["facts"]))
"""


@no_gpu
def test_steps_on_a_cpu_make_no_cuda_calls() -> None:
    point = Params(size="tiny", context_length=16, batch_size=2, vocab_size=50, steps=3)
    steps = run(point)["facts"]["first_steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert 0 < step["no_call_ms"] == step["step_ms"]
        assert step["new_kernels"] == step["memory_requests"] == 0


@pytest.mark.gpu
def test_the_first_step_loads_kernels_and_requests_memory() -> None:
    given = json.dumps({"size": "small", "context_length": 128, "steps": 4})
    command = [sys.executable, "-c", RUN, given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    steps = json.loads(done.stdout.splitlines()[-1])["first_steps"]
    first, *_, last = steps
    assert first["new_kernels"] > 10 > last["new_kernels"]
    assert first["memory_requests"] > last["memory_requests"]
    assert first["first_launches_ms"] > 5 * last["first_launches_ms"]
    for step in steps:
        parts = sum(step[name] for name in step if name.endswith("_ms") and name != "step_ms")
        assert 0.5 * step["step_ms"] < parts <= 1.0001 * step["step_ms"]
