"""The check of an attention function names what is wrong.

The command checks in a child process. Here it checks in the test's process, but in one test.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from systems.check import attention_process
from systems.check.attention import CONTIGUOUS, LAYOUT_SHAPE, cases, check_attention
from tests.jobs.harness import ROOT, call
from tests.systems.training.tiny_training import CPU

CODE = """
import math
import torch


def attention(q, k, v, is_causal, dtype=torch.float64, softmax=torch.softmax):
    scores = (q.to(dtype) @ k.to(dtype).mT) / math.sqrt(q.shape[-1])
    if is_causal:
        n = q.shape[-2]
        hidden = ~torch.ones(n, n, dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, -math.inf)
    return (softmax(scores, -1) @ v.to(dtype)).to(q.dtype)


def right(q, k, v, is_causal): return attention(q, k, v, is_causal)
def no_mask(q, k, v, is_causal): return attention(q, k, v, False)
def nan(q, k, v, is_causal):
    out = attention(q, k, v, is_causal)
    return torch.cat([out[..., :5, :], out[..., 5:, :] * math.nan], -2)
def no_maximum(q, k, v, is_causal):
    def softmax(scores, dim): return scores.exp() / scores.exp().sum(dim, keepdim=True)
    return attention(q, k, v, is_causal, torch.float32, softmax)
def crash(q, k, v, is_causal):
    import os
    if q.shape[-2] == 17:
        os._exit(3)
    return attention(q, k, v, is_causal)
def only_16(q, k, v, is_causal):
    if q.shape[-2] % 16: raise ValueError("seq_len must be a multiple of 16")
    return attention(q, k, v, is_causal)
def contiguous_only(q, k, v, is_causal):
    b, h, n, d = q.shape
    flat = [x.as_strided((b, h, n, d), (h * n * d, n * d, d, 1)) for x in (q, k, v)]
    return attention(*flat, is_causal)
def dk_without_scale(q, k, v, is_causal):
    k = k.clone()
    if k.requires_grad:
        k.register_hook(lambda dk: dk * math.sqrt(dk.shape[-1]))
    return attention(q, k, v, is_causal)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_here(reference, grid, on_gpu, budget_s):
        return check_attention(reference, grid, CPU, budget_s)

    monkeypatch.setattr(attention_process, "check_in_child", check_here)


def check(name: str, *options: str, code: int = 1) -> str:
    done = call("jobs", "check", f"own.py:{name}", *options, "--cpu")
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("name", "tensors"), [("no_mask", ["out", "dq", "dk", "dv"]), ("dk_without_scale", ["dk"])]
)
@pytest.mark.usefixtures("in_this_process")
def test_wrong_tensors_of_the_smallest_case_are_named(name: str, tensors: list[str]) -> None:
    told = check(name, "--seq-len", "17", "--head-dim", "16", "--dtype", "fp32")
    assert "the smallest: batch 1, heads 1, seq_len 17, head_dim 16, fp32" in told
    assert re.findall(r"(\w+): relative error", told) == tensors


@pytest.mark.usefixtures("in_this_process")
def test_rows_that_are_wrong_are_named() -> None:
    told = check("nan", "--seq-len", "17", "--head-dim", "16", "--dtype", "fp32")
    assert "out: relative error nan (at most 5e-05), wrong in 12 of 17 rows, from row 5 to" in told


@pytest.mark.slow
def test_the_grid_finds_the_smallest_shape_dtype_and_layout() -> None:
    shapes = [(1, 1, 1, 64), (1, 1, 16, 16), (1, 1, 100, 64), LAYOUT_SHAPE]
    grid = [case for case in cases(False, ["fp32"]) if case.shape in shapes]
    done = {str(c.case): c.status for c in check_attention("own.py:right", grid, CPU, 600)}
    assert set(done.values()) == {"right"} and len(done) == len(grid)
    refused = [c for c in check_attention("own.py:only_16", grid, CPU, 600) if c.refused]
    assert {c.case.seq_len for c in refused} == {1, 100}
    assert refused[0].refused == "ValueError: seq_len must be a multiple of 16"
    wrong = [c.case for c in check_attention("own.py:contiguous_only", grid, CPU, 600) if c.wrong]
    assert {case.shape for case in wrong} == {LAYOUT_SHAPE}
    assert CONTIGUOUS not in {case.layout for case in wrong} and len(wrong) >= 2


@pytest.mark.usefixtures("in_this_process")
def test_refusals_are_no_failure_but_nothing_right_is() -> None:
    told = check("only_16", "--seq-len", "16", "--seq-len", "20", code=0)
    assert "refused: 6 cases: ValueError: seq_len must be a multiple of 16" in told
    check("only_16", "--seq-len", "20", code=1)


@pytest.mark.usefixtures("in_this_process")
def test_cases_without_time_are_no_success() -> None:
    told = check("right", "--seq-len", "16", "--dtype", "fp32", "--seconds", "0", code=1)
    assert "1 right" in told and "1 case not checked: out of time" in told


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_exponentials_that_overflow_are_found() -> None:
    told = check("no_maximum", "--dtype", "fp32", "--seconds", "1000")
    assert "wrong: 1 of 29 cases" in told
    assert "causal, scores up to 100, whose exponentials overflow" in told


@pytest.mark.slow
def test_code_that_ends_the_process(folder: Path) -> None:
    told = check("crash", "--seq-len", "16", "--seq-len", "17", "--dtype", "fp32")
    assert "2 right, 2 crashed" in told and "the process ended with exit code 3" in told
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\ndef f(q, k, v): ...")
    done = call("jobs", "check", "leaves.py:f", "--cpu")
    assert done.returncode == 2 and "cannot be imported: SystemExit: 0" in done.stdout


CHEATS = ROOT / "tests" / "benchmarks" / "cheating_attention.py"


def test_a_cheat_is_wrong_in_a_second_call() -> None:
    grid = cases(False, ["fp32"], [16])
    found = list(check_attention(f"{CHEATS}:CachedByPointer", grid, CPU, 600))
    assert all("of a second call, on new values" in checked.wrong[0] for checked in found)
