"""Kernels of FusedAdamW: compiled code, and on a GPU results, optimizer and CUDA graphs.

tests/interpreted runs the kernels on a CPU.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch

from systems.kernels.adamw import FusedAdamW
from systems.kernels.adamw.reference import Operands, random_bits, round_stochastically, stream
from tests.systems.kernels.adamw_cases import (
    BF16,
    SIZES,
    USES,
    assert_kernel_is_reference,
    assert_same,
    hyper_tensor,
    kernel_step,
    make_optimizer,
    parameters_of,
    set_grads,
    take_steps,
)
from tests.systems.kernels.hopper import Kernel, compiling_for_hopper
from tests.systems.kernels.selection import matrix


@pytest.mark.parametrize(
    ("use", "aligned"),
    matrix([("bf16_master", True)], ("fp32", "bf16_master", "bf16"), (True, False)),
)
def test_compiled_for_hopper_it_moves_16_bytes_and_spills_nothing(use, aligned):
    pytest.importorskip("triton")
    from systems.kernels.adamw import kernel

    dtype, state_dtype, master = USES[use]
    options = kernel.launch_options(dtype, dtype, state_dtype, master, True, aligned)
    pointers = torch.int64, torch.float32, torch.uint32, torch.int32
    with compiling_for_hopper():
        made = Kernel.of(kernel.adamw_kernel.warmup(*pointers, grid=(1,), **options))
    assert made.spilled == 0
    # 6 programs, of 256 or 128 threads, fit in the 65,536 registers of an SM.
    assert not aligned or made.registers <= (80 if use == "bf16" else 40)
    # A layout conversion would use shared memory.
    assert made.shared == 0 and "convert_layout" not in made.compiled.asm["ttgir"]
    ptx = made.ptx
    found = [len(re.findall(rf"{op}\.global\.v4\.b32", ptx)) for op in ("ld", "st")]
    if not aligned:
        assert found == [0, 0]
    elif use == "bf16_master":  # 4 elements per thread: 8 bytes of a 16-bit gradient or parameter
        assert found == [3, 3]
        assert [ptx.count(f"{op}.global.v2.b32") for op in ("ld", "st")] == [1, 1]
    else:
        assert found == [4, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("n", [*SIZES, 1_000_003])
@pytest.mark.parametrize("use", USES)
def test_gpu_kernel_is_the_reference(use, n, offset):
    assert_kernel_is_reference(use, n, "cuda", offset)


def captured_step(optimizer: FusedAdamW) -> torch.cuda.CUDAGraph:
    set_grads(parameters_of(optimizer), 0)
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
def test_gpu_replays_equal_eager_steps(use):
    optimizer, other = (make_optimizer(use, device="cuda") for _ in range(2))
    graph, captured = captured_step(other), parameters_of(other)
    assert all(int(other.state[p]["step"]) == 0 for p in captured)
    for step in range(5):
        for o in (optimizer, other):
            o.param_groups[0]["lr"] = 1e-2 / (step + 1)
        other.update_hyperparameters()
        take_steps(optimizer, [step])
        set_grads(captured, step)
        graph.replay()
    assert_same(optimizer, other)
    # The graph continues with the loaded state.
    checkpoint = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in parameters_of(optimizer)]
    optimizer.step()
    graph.replay()
    graph.replay()
    other.load_state_dict(checkpoint)
    for p, value in zip(captured, values, strict=True):
        p.data.copy_(value)
    graph.replay()
    assert_same(optimizer, other)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_a_replay_takes_the_present_value_of_an_lr_tensor(device):
    """A tensor on the GPU is read without a call or a wait; one on the CPU is like a number."""
    lr = torch.tensor(1e-2, device=device)
    optimizer = make_optimizer("fp32", device="cuda")
    other = make_optimizer("fp32", device="cuda", lr=lr)
    graph = captured_step(other)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = float(lr.fill_(1e-2 / (step + 1)))
        if device == "cpu":
            other.update_hyperparameters()
        take_steps(optimizer, [step])
        set_grads(parameters_of(other), step)
        if step < 2:
            graph.replay()
            continue
        torch.cuda.set_sync_debug_mode("error")
        try:
            other.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_same(optimizer, other)


@pytest.mark.gpu
def test_gpu_a_graph_keeps_its_tables_whatever_eager_steps_make():
    optimizer, other = (make_optimizer("fp32", device="cuda") for _ in range(2))
    graph = captured_step(optimizer)
    kept = [p.grad for p in parameters_of(optimizer)]  # the gradients that the graph reads
    optimizer.zero_grad()
    take_steps(optimizer, [1])
    filler = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(16)]
    graph.replay()
    take_steps(other, [1, 0])
    assert_same(optimizer, other)
    del kept, filler  # which would have overwritten the tables if these had been freed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "parameter 0 .* no state"),
        ("gradient", "moved since .*: those of parameter 1;"),
        ("lr", "lr of parameter group 0 changed from 0.01 to 0.5"),
        ("state", "parameter 1 .* no state"),
    ],
)
def test_gpu_a_capture_that_is_not_prepared_is_refused(what, message):
    optimizer = make_optimizer("fp32", device="cuda")
    parameters = parameters_of(optimizer)
    set_grads(parameters, 0)
    kept = parameters[1].grad
    if what == "state":
        parameters[1].grad = None
    if what != "nothing":
        optimizer.prepare()
    if what == "gradient":
        parameters[1].grad = kept.clone()
    elif what == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    elif what == "state":
        parameters[1].grad = kept
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.gpu
def test_gpu_eager_steps_never_wait_for_the_device():
    optimizer = make_optimizer("bf16_master", device="cuda")
    take_steps(optimizer, [0])
    parameters = parameters_of(optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            # Checks that the debug mode detects synchronization.
            optimizer.state[parameters[0]]["step"].item()
        for p in parameters:
            p.grad = p.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(int(optimizer.state[p]["step"]) == 2 for p in parameters)


@pytest.mark.gpu
def test_gpu_past_two_to_the_32_elements():
    n = (1 << 32) + 4097  # element indices exceed int32 and uint32
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 39 GB of GPU memory")
    param = torch.full((n,), 1.5, dtype=BF16, device="cuda")
    grad = torch.ones_like(param)
    moments = [torch.zeros_like(param) for _ in range(2)]
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    hyper = hyper_tensor("cuda")
    kernel_step(Operands(param, grad, *moments, None, step, hyper, stream(1, 0), stochastic=True))
    for place in (0, 1 << 31, 1 << 32):
        piece = slice(max(0, place - 5000), place + 4097)
        count = piece.stop - piece.start
        bits = random_bits(count, stream(1, 0), 1, start=piece.start)
        for tensor, value, drawn in (
            (param, 1.5 * (1 - 1e-3) - 1e-2, bits[0]),
            (moments[0], 0.1, bits[1]),
            (moments[1], 0.01, bits[2]),
        ):
            known = round_stochastically(torch.full((count,), value), drawn)
            # The last bit of float32 changes one in 2^16 roundings; wrong random bits, half.
            assert (tensor[piece].cpu() != known).double().mean().item() < 1e-2
