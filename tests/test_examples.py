"""Every example runs with the commands in its docstring, in a folder outside the repository.

The commands are extracted from the texts, so that the texts stay correct.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.jobs.harness import ROOT, shell

EXAMPLES = ROOT / "examples"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a copy of examples/ outside the repository.

    Commands find the project through PYTHONPATH, as if it were installed.
    """
    copy = tmp_path / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("logs", "__pycache__"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def commands(file: str) -> list[str]:
    """Return the commands in the docstring of an example, in their order.

    `python -m jobs check` is left out, because it has tests of its own.
    """
    text = ast.get_docstring(ast.parse((EXAMPLES / file).read_text())) or ""
    blocks = re.findall(r"^(?: {4}.*\n?)+", text, re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if " jobs check " not in line]


def outputs(file: str, submit_exits_with: int = 0) -> list[str]:
    """Run the commands of an example and return their outputs, each in one line.

    A command that submits to Slurm is only planned (--dry-run).
    """
    found = []
    for command in commands(file):
        if "jobs.submit" in command and "--local" not in command:
            assert "\nexpected " in shell(f"{command} --dry-run")
        else:
            exit_code = submit_exits_with if "jobs.submit" in command else 0
            found.append(" ".join(shell(command, exit_code).split()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "counts", "words"),
    [
        (
            "my_attention.py",
            "6 ok",
            ["Time of causal attention", "| forward MyAttention vs naive |"],
        ),
        ("triton_attention.py", "2 ok", ["| naive | TritonAttention |"]),
        ("my_ddp.py", "2 ok", ["| tiny | fp32 | false | MyDDP |", "overlap share"]),
        ("cs336/adapters.py", "2 ok", ["| tiny | fp32 | false | get_ddp |"]),
        ("my_package/rms_norm.py", "4 ok", ["bandwidth (GB/s)", "| fused vs step_by_step |"]),
    ],
)
def test_an_example_is_measured_and_has_tables(
    examples: None, file: str, counts: str, words: list[str]
) -> None:
    submitted, tables = outputs(file)
    assert counts in submitted
    assert [word for word in words if word not in tables] == []
    if file == "my_ddp.py":
        assert Path("logs/my_ddp/plots/timeline-MyDDP.png").exists()


@pytest.mark.slow
def test_a_wrong_attention_is_reported_with_its_error(examples: None) -> None:
    submitted, tables = outputs("wrong_attention.py", submit_exits_with=1)
    assert "1 ok, 1 wrong" in submitted
    # Only dK is wrong, and by the factor that the docstring explains.
    assert re.search(r"must be at most 5e-05 in fp32, got dk 7\.00e\+00 ", submitted)
    assert "| naive | WrongAttention |" in tables and "| wrong |" in tables


@pytest.mark.slow
def test_halves_of_attention_merged(examples: None) -> None:
    (printed,) = outputs("merge_attention.py")
    assert len(re.findall(r"\b(?:out|dq|dk|dv): relative difference \d\.\de-0[67]", printed)) == 4


@pytest.mark.slow
def test_results_in_a_data_frame(examples: None) -> None:
    submitted, printed = outputs("load_results.py")
    assert "6 ok" in submitted
    assert "Median time" in printed
    # Of the three values of seq_len, the two larger ones have an exponent for each implementation.
    number = r"-?\d+\.\d+"
    exponents = printed.partition("Exponent")[2]
    assert re.search(rf" 512 {number} {number} 1024 {number} {number}$", exponents)


@pytest.mark.slow
def test_the_readme_lists_every_example_with_a_valid_command(examples: None) -> None:
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    named = {name for row in rows for name in re.findall(r"^\| \[(.+?)\]", row)}
    there = {file.name for file in EXAMPLES.glob("*.py")}
    there |= {file.parent.name for file in EXAMPLES.glob("*/*.py")}
    assert named == there
    for row in rows:
        (command,) = re.findall(r"`([^`]*)` \|$", row)
        if "jobs.submit" in command:
            assert "\nexpected " in shell(f"{command} --dry-run")


UNCHANGED = [pytest.mark.slow, pytest.mark.depends()]


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(name, marks=UNCHANGED) for name in ("fp16", "fp32"))]
)
def test_the_triton_kernel_compiles_for_a_gpu(dtype: str) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is packaged for Linux only")
    from examples.triton_attention import BLOCK_K, BLOCK_Q, forward_kernel
    from systems.dtypes import TORCH_DTYPES
    from tests.systems.kernels.hopper import Kernel, compiling_for_hopper

    pointers = *[TORCH_DTYPES[dtype]] * 4, TORCH_DTYPES["fp32"]
    for (head_dim, block_d), is_causal in product([(16, 16), (64, 64), (80, 128)], [True, False]):
        constants = {
            "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K,
            "IS_CAUSAL": is_causal,
        }  # fmt: skip
        with compiling_for_hopper():
            compiled = forward_kernel.warmup(*pointers, 501, 0.1, grid=(1, 1), **constants)
        spills = Kernel.of(compiled).spilled
        assert spills == 0 or (dtype == "fp32" and block_d == 128 and spills < 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_triton_kernel_is_right_on_a_gpu(dtype: str) -> None:
    import torch

    from examples.triton_attention import TritonAttention
    from systems.check.attention_accuracy import TOLERANCE, check_attention
    from systems.dtypes import TORCH_DTYPES

    for seq_len, head_dim, is_causal in product([1, 100, 1024], [16, 80, 128], [True, False]):
        torch.manual_seed(0)
        q, k, v, dout = (
            torch.randn(2, seq_len, head_dim, device="cuda").to(TORCH_DTYPES[dtype])
            for _ in range(4)
        )
        inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

        def forward(inputs=inputs, is_causal=is_causal):
            return TritonAttention.apply(*inputs, is_causal)

        case = f"{seq_len=} {head_dim=} {is_causal=}"
        errors = check_attention(forward, inputs, dout, is_causal, case, dtype)
        assert max(errors.total.values()) <= TOLERANCE[dtype]
