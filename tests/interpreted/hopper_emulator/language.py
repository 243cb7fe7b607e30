"""Substitutes for the functions of `triton.language` and `triton.experimental.gluon.language`.

Only those that the Hopper kernels use exist. Layouts of registers are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.interpreted.hopper_emulator.hopper import WRITE_SLOWNESS, wait_until_written
from tests.interpreted.hopper_emulator.schedule import Agent, active, complete_except_last
from tests.interpreted.hopper_emulator.shared_memory import SharedTile, allocate
from tests.interpreted.hopper_emulator.values import DTYPES, DType, Int, Pointer, Tile, data_of


def constexpr(x: Any) -> Any:
    return x


def to_tensor(x: Any) -> Any:
    return Int(x) if isinstance(x, int) else x


def program_id(axis: int) -> Int:
    return Int(active().running.program)


def num_programs(axis: int) -> Int:
    return Int(active().n_programs)


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def minimum(a: Any, b: Any) -> Any:
    return _apply(min, torch.minimum, a, b)


def maximum(a: Any, b: Any) -> Any:
    return _apply(max, torch.maximum, a, b)


def _apply(of_scalars: Callable[..., Any], of_tiles: Callable[..., Tensor], a: Any, b: Any) -> Any:
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return to_tensor(of_scalars(a, b))
    tensors = [torch.as_tensor(data_of(x)) for x in (a, b)]
    return Tile.of(of_tiles(*tensors))


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tile):
        return to_tensor(a if condition else b)
    return Tile.of(torch.where(condition.data, data_of(a), data_of(b)))


def exp2(x: Tile) -> Tile:
    return Tile.of(torch.exp2(x.data))


def log2(x: Tile) -> Tile:
    return Tile.of(torch.log2(x.data))


def arange(start: int, end: int, layout: Any = None) -> Tile:
    return Tile.of(torch.arange(start, end, dtype=torch.int32))


def full(shape: Sequence[int], value: Any, dtype: DType, layout: Any = None) -> Tile:
    return Tile.of(torch.full(tuple(shape), value, dtype=dtype.torch))


def zeros(shape: Sequence[int], dtype: DType, layout: Any = None) -> Tile:
    return full(shape, 0, dtype)


def reduce_max(x: Tile, axis: int) -> Any:
    return _reduced(x.data.amax(axis))


def reduce_sum(x: Tile, axis: int) -> Any:
    return _reduced(x.data.sum(axis, dtype=x.data.dtype))


def _reduced(data: Tensor) -> Any:
    return Tile.of(data) if data.ndim else to_tensor(data.item())


def expand_dims(x: Tile, axis: int) -> Tile:
    return Tile.of(x.data.unsqueeze(axis))


def broadcast(a: Tile, b: Tile) -> tuple[Tile, ...]:
    return tuple(Tile.of(x) for x in torch.broadcast_tensors(a.data, b.data))


def split(x: Tile) -> tuple[Tile, Tile]:
    low, high = x.data.unbind(-1)
    return Tile.of(low), Tile.of(high)


def join(a: Tile, b: Tile) -> Tile:
    return Tile.of(torch.stack((a.data, b.data), -1))


def convert_layout(x: Tile, layout: Any, assert_trivial: bool = False) -> Tile:
    return x


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    return pointer.load() if mask is None else pointer.load_masked(mask, other)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    pointer.store(value, mask)


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel") -> Any:
    """Add to global memory. For one address, the result is the value before.

    Others see an addition of a tile some time later, at the latest when this agent releases it by
    an addition to one address.
    """
    schedule = active()
    schedule.switch()
    if isinstance(value, Tile):
        assert sem == "relaxed"
        adding = schedule.operation(lambda: pointer.store(value, mask, adds=True), WRITE_SLOWNESS)
        schedule.running.additions.append(adding)
        schedule.detached.append(adding)
        return None
    if sem == "acq_rel":
        complete_except_last(schedule.running.additions, 0)
    if mask is not None and not mask:
        return Int(0)
    before = pointer.load()
    pointer.store(int(before) + value)
    return before


def static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


def static_range(*bounds: int) -> range:
    return range(*bounds)


def barrier() -> None:
    """Do nothing. The four warps of a warpgroup are one agent."""


def warp_specialize(
    bodies: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    warps: Sequence[int],
    registers: Sequence[int],
) -> None:
    """Call functions in parallel, each as an agent, and wait until they return."""
    assert len(warps) == len(registers) == len(bodies) - 1
    schedule = active()
    me = schedule.running
    started: list[Agent] = []
    for function, arguments in bodies:

        def body(function: Any = function, arguments: Any = arguments) -> None:
            function(*arguments)

        started.append(schedule.start(body, me.program))
    schedule.switch(lambda: all(x.is_finished for x in started), "its warpgroups")


def inline_asm_elementwise(
    asm: str,
    constraints: str,
    args: Sequence[Any],
    dtype: DType,
    is_pure: bool = False,
    pack: int = 1,
) -> Any:
    """Execute the PTX instructions that the kernels contain."""
    if asm.startswith("rcp.approx.ftz.f32"):
        return Tile.of(1.0 / args[0].data)
    if asm.startswith(("cvt.rn.bf16x2.f32 $0, $2, $1", "cvt.rn.f16x2.f32 $0, $2, $1")):
        half = torch.bfloat16 if "bf16" in asm else torch.float16
        pairs = torch.stack([x.data.to(half) for x in args], -1)
        return Tile.of(pairs.view(torch.int32).squeeze(-1))
    if asm.startswith("ld.acquire.gpu.global.b32 $0, [$1];"):
        return _poll(args[0])
    if asm.startswith("cp.async.bulk.wait_group"):
        pendings = asm.removeprefix("cp.async.bulk.wait_group").split(";")[0]
        wait_until_written(int(pendings))
        return args[0]
    if "red.release.gpu.global.max.s32 [$1], $2;" in asm:
        active().switch()
        pointer, value = args
        pointer.store(max(int(pointer.load()), value))
        return value
    raise NotImplementedError(asm)


def _poll(counter: Pointer) -> int:
    """Return the value of a counter in global memory. The caller repeats this until it changes.

    A repeated call waits for a change. Otherwise, a schedule in which the caller is much faster
    than all others would take very many steps.
    """
    agent = active().running
    address = counter.memory.data_ptr(), int(counter.offset)
    active().switch(
        lambda: int(counter.load()) != agent.polled.get(address), "a change of a counter"
    )
    agent.polled[address] = int(counter.load())
    return Int(agent.polled[address])


def _layout(*arguments: Any, **named: Any) -> None:
    """Return nothing: layouts of registers are not emulated."""


def namespace(shared_layout: Any) -> SimpleNamespace:
    """Return a substitute for the module.

    Args:
        shared_layout: Gluon's `NVMMASharedLayout.get_default_for`, called with a dtype of torch.
    """
    names = SimpleNamespace(
        NVMMASharedLayout=SimpleNamespace(
            get_default_for=lambda shape, dtype: shared_layout(shape, dtype.torch)
        ),
        allocate_shared_memory=allocate, max=reduce_max, sum=reduce_sum,
        shared_memory_descriptor=SharedTile,
        tensor=0, **{dtype.name: dtype for dtype in DTYPES.values()},
    )  # fmt: skip
    for name, function in globals().items():
        if callable(function) and not hasattr(names, name):
            setattr(names, name, function)
    for layout in ("NVMMADistributed", "DotOperand", "Slice", "Blocked", "DistributedLinear"):
        setattr(names, f"{layout}Layout", _layout)
    names.SwizzledSharedLayout = _layout
    return names
