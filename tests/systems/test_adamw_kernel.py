"""The kernel of FusedAdamW, interpreted and on a GPU: against the reference, and in the optimizer,
CUDA graphs included; and what the compiler makes of it.

Tests named `interpreted` run the kernel on a CPU, in a process of their own, or by
`TRITON_INTERPRET=1 pytest tests/systems/test_adamw_kernel.py -k interpreted`.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch

from systems.kernels.adamw import FusedAdamW, adamw_reference, fused_adamw
from systems.kernels.adamw.launch import BLOCK_SIZE, Tables, constants, num_warps
from systems.kernels.adamw.reference import key, random_bits, round_stochastically
from tests.adamw_cases import (
    BF16,
    F16,
    F32,
    HYPER,
    SIZES,
    USES,
    assert_against_float64,
    assert_same,
    make_optimizer,
    make_parameters,
    randn,
    set_grads,
)
from tests.hopper import compile_for_hopper, resources
from tests.triton_interpreter import assert_interpreted_tests_pass, compiled, interpreted


@compiled
@pytest.mark.timeout(900)  # of many tests, each with the usual one
def test_the_kernel_in_the_interpreter():
    assert_interpreted_tests_pass(__file__)


def _tensors(use: str, n: int, device: str, offset: int) -> list[torch.Tensor | None]:
    """param, exp_avg, exp_avg_sq, master, step, `offset` elements past an aligned address."""
    dtype, state_dtype, has_master = USES[use]

    def tensor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        room = torch.empty(n + offset, dtype=dtype, device=device)
        return room[offset:].copy_(values)

    values = randn(n, 3, F32)
    master = tensor(values, F32) if has_master else None
    moments = [tensor(torch.zeros(n), state_dtype) for _ in range(2)]
    step = torch.zeros((), dtype=torch.int64, device=device)
    return [tensor(values, dtype), *moments, master, step]


def _assert_kernel_is_reference(use: str, n: int, device: str, offset: int) -> None:
    dtype, state_dtype, has_master = USES[use]
    ours, known = (_tensors(use, n, device, offset) for _ in range(2))
    # The interpreter cuts bfloat16 off where a GPU rounds to nearest
    cuts_off = device == "cpu" and dtype == BF16 and has_master
    one_unit = {F32: 2**-20, BF16: 2**-7, F16: 2**-10}
    for step in range(3):
        grad = randn(n + offset, step, dtype).to(device)[offset:]
        options = {**HYPER, "stochastic_rounding": True, "seed": 9, "index": step % 2}
        for function, (param, *rest) in ((fused_adamw, ours), (adamw_reference, known)):
            function(param, grad, *rest, **options)
        names = ("param", "exp_avg", "exp_avg_sq", "master", "step")
        for name, a, b in zip(names, ours, known, strict=True):
            if a is None:
                continue
            if name in ("param", "master") and (
                state_dtype == BF16 or (cuts_off and name == "param")
            ):
                # Approximate division: fused_adamw says how far it may be off
                torch.testing.assert_close(a, b, rtol=one_unit[a.dtype], atol=1e-8)
                if n and a.dtype == BF16 and not cuts_off:
                    assert (a != b).double().mean().item() <= 1e-3
                b.copy_(a)  # so that the next step starts alike
            else:
                assert torch.equal(a, b), f"{name} at step {step}"


@interpreted
@pytest.mark.parametrize("use", USES)
def test_interpreted_kernel_is_the_reference(use):
    for n, offset in [(1, 0), (1023, 0), (1025, 3), (2049, 0), (0, 0)]:
        _assert_kernel_is_reference(use, n, "cpu", offset)


@interpreted
@pytest.mark.parametrize("use", ["fp32", "bf16"])
def test_interpreted_optimizer_against_float64(use):
    assert_against_float64(use, "cpu")


@interpreted
def test_interpreted_step_takes_mixed_dtypes_moving_gradients_and_groups():
    """One table, three variants, one of them unaligned; the reference has no table to get wrong."""

    def parameters():
        unaligned = torch.nn.Parameter(randn(1030, 4, F32)[1:])
        return [*make_parameters(F32)[:3], *make_parameters(F16), unaligned]

    ours, known = parameters(), parameters()
    optimizers = [
        FusedAdamW([{"params": p[:4]}, {"params": p[4:], "lr": 0.5, "seed": 3}], **HYPER)
        for p in (ours, known)
    ]
    kept = []  # old gradients, so that the next ones lie elsewhere
    for step in range(5):
        for p in (ours, known):
            if step != 3:
                kept.append([q.grad for q in p])
                for q in p:
                    q.grad = None
            set_grads(p, step)
            if step == 2:
                p[1].grad = None
        optimizers[0].step()
        for index, p in enumerate(known):
            if p.grad is None:
                continue
            group = optimizers[1].param_groups[index >= 4]
            state = optimizers[1]._state(p, group)
            adamw_reference(
                p, p.grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"),
                state["step"], stochastic_rounding=False, seed=group["seed"], index=index,
                **{name: group[name] for name in HYPER},
            )  # fmt: skip
    assert_same(*optimizers)
    assert len(optimizers[0]._tables[torch.device("cpu")].blocks) == 3


@interpreted
def test_interpreted_prepare_changes_no_parameter():
    parameters = make_parameters(BF16)
    set_grads(parameters, 0)
    before = [p.detach().clone() for p in parameters]
    optimizer = make_optimizer("bf16", parameters)
    optimizer.prepare()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(int(optimizer.state[p]["step"]) == 0 for p in parameters)


@interpreted
def test_interpreted_tables_are_kept_until_an_address_changes(monkeypatch):
    made = []
    init = Tables.__init__

    def count(*args, **kwargs):
        made.append(1)
        init(*args, **kwargs)

    monkeypatch.setattr(Tables, "__init__", count)
    parameters = make_parameters(F32)
    optimizer = make_optimizer("fp32", parameters)
    for step in range(3):
        set_grads(parameters, step)
        optimizer.step()
    assert len(made) == 1
    parameters[0].grad = parameters[0].grad.clone()
    optimizer.step()
    assert len(made) == 2


@compiled
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("use", ["fp32", "bf16_master", "bf16"])
def test_compiled_for_hopper_it_moves_16_bytes_and_spills_nothing(use, aligned, tmp_path):
    pytest.importorskip("triton")
    from systems.kernels.adamw import kernel

    dtype, state_dtype, master = USES[use]
    made = compile_for_hopper(
        kernel.adamw_kernel,
        {"table": "*i64", "scalars": "*fp32", "keys": "*u32", "blocks": "*i32"},
        constants(dtype, dtype, state_dtype, master, state_dtype == BF16, aligned),
        num_warps=num_warps(dtype, dtype, state_dtype, master, BLOCK_SIZE),
        enable_fp_fusion=False,
    )
    used = resources(made, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    # 6 programs, of 256 threads or of 128, in the 65,536 registers of a multiprocessor
    assert not aligned or used["REG"] <= (80 if use == "bf16" else 40)
    # A change of layout would pass through shared memory
    assert made.metadata.shared == 0 and "convert_layout" not in made.asm["ttgir"]
    ptx = made.asm["ptx"]
    found = [len(re.findall(rf"{op}\.global\.v4\.b32", ptx)) for op in ("ld", "st")]
    if not aligned:
        assert found == [0, 0]
    elif use == "bf16_master":  # a thread takes 4 elements: 8 bytes of the gradient and the copy
        assert found == [3, 3]
        assert [ptx.count(f"{op}.global.v2.b32") for op in ("ld", "st")] == [1, 1]
    else:
        assert found == [4, 3]


@compiled
def test_compiled_for_hopper_advance_spills_nothing(tmp_path):
    pytest.importorskip("triton")
    from systems.kernels.adamw import kernel

    signature = {"table": "*i64", "scalars": "*fp32", "keys": "*u32", "n_rows": "i32"}
    made = compile_for_hopper(
        kernel.advance_kernel, signature, {"ROWS": kernel.ROWS}, num_warps=4, enable_fp_fusion=False
    )
    used = resources(made, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert "sqrt.rn.f64" in made.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
def test_gpu_against_float64(use):
    assert_against_float64(use, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("n", [*SIZES, 1_000_003])
@pytest.mark.parametrize("use", USES)
def test_gpu_kernel_is_the_reference(use, n, offset):
    _assert_kernel_is_reference(use, n, "cuda", offset)


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["fp32", "bf16_master", "bf16"])
def test_gpu_block_size_changes_no_bit(use):
    results = []
    for block_size in (256, 1024, 4096):
        parameters = make_parameters(USES[use][0], "cuda")
        optimizer = make_optimizer(use, parameters)
        optimizer.block_size = block_size
        for step in range(3):
            set_grads(parameters, step)
            optimizer.step()
        results.append(optimizer)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
def test_gpu_replays_equal_eager_steps(use):
    eager, captured = make_parameters(USES[use][0], "cuda"), make_parameters(USES[use][0], "cuda")
    optimizer, other = make_optimizer(use, eager), make_optimizer(use, captured)
    set_grads(captured, 0)
    other.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    assert all(int(other.state[p]["step"]) == 0 for p in captured)
    for step in range(5):
        for o in (optimizer, other):
            o.param_groups[0]["lr"] = 1e-2 / (step + 1)
        other.update_hyperparameters()
        set_grads(eager, step)
        set_grads(captured, step)
        optimizer.step()
        graph.replay()
    assert_same(optimizer, other)
    # What is loaded is what the graph goes on with
    checkpoint = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in eager]
    optimizer.step()
    graph.replay()
    graph.replay()
    other.load_state_dict(checkpoint)
    for p, value in zip(captured, values, strict=True):
        p.data.copy_(value)
    graph.replay()
    assert_same(optimizer, other)


@pytest.mark.gpu
def test_gpu_a_graph_keeps_its_tables_whatever_eager_steps_make():
    parameters = make_parameters(F32, "cuda")
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer, other = make_optimizer("fp32", parameters), make_optimizer("fp32", twins)
    set_grads(parameters, 0)
    graphs_own = [p.grad for p in parameters]  # where the graph reads gradients
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for p in parameters:
        p.grad = None
    set_grads(parameters, 1)
    optimizer.step()
    filler = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(16)]
    graph.replay()
    set_grads(twins, 1)
    other.step()
    for q, grad in zip(twins, graphs_own, strict=True):
        q.grad.copy_(grad)
    other.step()
    assert_same(optimizer, other)
    del filler  # it would have overwritten tables that were freed


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["nothing", "gradient", "lr", "state"])
def test_gpu_a_capture_that_is_not_prepared_is_refused(what):
    parameters = make_parameters(F32, "cuda")
    optimizer = make_optimizer("fp32", parameters)
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
    told = {
        "nothing": "parameter 0 .* no state",
        "gradient": "moved since .*: gradient of parameter 1;",
        "lr": r"group 0 changed from \[0.01, .* to \[0.5,",
        "state": "parameter 1 .* no state",
    }
    with (
        pytest.raises(RuntimeError, match=told[what]),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.gpu
def test_gpu_eager_steps_never_wait_for_the_device():
    parameters = make_parameters(BF16, "cuda")
    optimizer = make_optimizer("bf16_master", parameters)
    set_grads(parameters, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            optimizer.state[parameters[0]]["step"].item()  # so a step that waited would raise, too
        for p in parameters:
            p.grad = p.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(int(optimizer.state[p]["step"]) == 2 for p in parameters)


@pytest.mark.gpu
def test_gpu_past_two_to_the_32_elements():
    n = (1 << 32) + 4097  # offsets past an int32, and random bits past the 32 of a counter
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 39 GB of GPU memory")
    param = torch.full((n,), 1.5, dtype=BF16, device="cuda")
    grad = torch.ones_like(param)
    moments = [torch.zeros_like(param) for _ in range(2)]
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    options = {**HYPER, "stochastic_rounding": True, "seed": 1, "index": 0}
    fused_adamw(param, grad, *moments, None, step, **options)
    for place in (0, 1 << 31, 1 << 32):
        piece = slice(max(0, place - 5000), place + 4097)
        count = piece.stop - piece.start
        bits = random_bits(count, key(1, 0, 1), start=piece.start)
        for tensor, value, drawn in (
            (param, 1.5 * (1 - 1e-3) - 1e-2, bits[0]),
            (moments[0], 0.1, bits[1]),
            (moments[1], 0.01, bits[2]),
        ):
            known = round_stochastically(torch.full((count,), value), drawn)
            # The last bit of float32 decides one in 2^16 roundings; other bits would change half
            assert (tensor[piece].cpu() != known).double().mean().item() < 1e-2
