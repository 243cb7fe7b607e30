"""Tests of the memory benchmark.

On a CPU, live tensors are compared with predictions, and the timeline of a step is read from a fake
allocator. On a GPU, results are compared with the counts of the CUDA allocator.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from systems.accounting import block_saved_bytes
from systems.benchmark import Unsupported
from systems.benchmarks import memory
from systems.benchmarks.memory import Params, predict, run
from systems.measure import peak_memory
from systems.measure.memory import memory_timeline
from systems.measure.memory.memory_timeline import Owner, kinds, read_timeline
from systems.measure.memory.saved_tensors import block_report, saved_tensors
from systems.measure.memory.state_memory import storage_bytes
from systems.training.phases import phases_of
from systems.training.training import make_training
from tests.systems.training.tiny_training import no_gpu

pytestmark = pytest.mark.usefixtures("artifacts", "one_thread")
TINY: dict[str, Any] = {"size": "tiny", "context_length": 24, "batch_size": 3, "vocab_size": 50}


def params(**given: Any) -> Params:
    return Params.model_validate(TINY | given)


@no_gpu
@pytest.mark.parametrize(
    ("passes", "precision"),
    [("train_step", "fp32"), pytest.param("forward", "bf16_pure", marks=pytest.mark.slow)],
)
def test_what_is_alive_is_what_arithmetic_says(passes, precision):
    point = params(precision=precision, passes=passes)
    result, predicted = run(point), predict(point)
    facts = result["facts"]
    assert result["peak_memory_bytes"] == {}  # CPUs have no allocator statistics
    for name in ("weights", "gradients", "residual_stream", "block_saved", "block_gradients"):
        assert facts[f"{name}_bytes"] == predicted[f"{name}_bytes"], name
    # AdamW has a step count of 4 bytes per parameter. The loss saves one number, its weight.
    extra = facts["optimizer_state_bytes"] - predicted["optimizer_state_bytes"]
    assert extra == (4 * 21 if passes == "train_step" else 0)
    assert facts["saved_bytes"] == predicted["activations_bytes"] + 4
    assert facts["block_weight_copies_bytes"] == facts["weight_copies_bytes"] == 0


@pytest.mark.slow
@pytest.mark.depends
@no_gpu
def test_autocast_keeps_copies_of_weights():
    point = params(precision="bf16")
    facts = run(point)["facts"]
    size = point.model_size
    copies = 2 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff)
    assert facts["block_weight_copies_bytes"] == copies
    copies = size.num_layers * copies + 2 * size.d_model * size.vocab_size
    assert facts["weight_copies_bytes"] == predict(point)["weight_copies_bytes"] == copies
    # Under autocast softmax runs in bf16 on a CPU and in float32 on a GPU.
    wide_softmax = 4 * point.batch_size * size.num_heads * point.context_length**2
    assert facts["block_saved_bytes"] == predict(point)["block_saved_bytes"] - wide_softmax


@pytest.mark.slow
@pytest.mark.depends
@no_gpu
def test_contributors_of_a_block():
    saved = run(params(context_length=64))["facts"]["block_saved"]
    size = params().model_size
    assert len(saved) == 5
    first, softmax = saved[0], next(row for row in saved if row["contributor"] == "Softmax")
    assert first["contributor"] == "Mm"  # gate and up are one tensor
    assert first["saved_bytes"] == 3 * 64 * 2 * size.d_ff * 4
    assert first["source"].startswith("systems/model.py:")
    assert first["source"].endswith(" forward") and "silu" in first["code"]
    assert softmax["source"].startswith("systems/kernels/flash_attention/naive.py:")
    assert softmax["shape"] == f"3x{size.num_heads}x64x64" and softmax["dtype"] == "float32"
    total = sum(block_saved_bytes(size, 3, 64, "fp32", "materialised").values())
    assert [row["share"] for row in saved] == [row["saved_bytes"] / total for row in saved]
    assert saved == sorted(saved, key=lambda row: -row["saved_bytes"])


def test_a_storage_is_counted_once():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    results = []
    # x is saved for the gradient of the weight. The output of tanh is saved by tanh and, as two
    # views, by the second matmul. The weight is excluded.
    saved = saved_tensors(
        lambda: results.append((y := torch.tanh(x @ weight)).T @ y[:, :4]), [weight]
    )
    assert [(t.contributor, t.saved_bytes) for t in saved] == [("input", 128), ("Tanh", 128)]
    assert storage_bytes([x, x[1:], None, weight]) == 128 + 256


def test_hooks_do_not_keep_the_graph_alive():
    """An output that its own operation saves must not be in a reference cycle."""
    x = torch.randn(4, requires_grad=True)
    results: list[torch.Tensor] = []
    saved_tensors(lambda: results.append(torch.tanh(x).exp()), [])
    kept = StorageWeakRef(results[0].untyped_storage())
    results.clear()
    assert kept.expired()


def test_gradients_that_a_block_emits():
    block = torch.nn.Linear(8, 2)
    report = block_report(block, block, torch.randn(5, 8, requires_grad=True))
    assert report["block_gradients_bytes"] == 4 * (8 * 2 + 2 + 5 * 8)
    assert report["block_saved_bytes"] == 4 * 5 * 8
    assert all(parameter.grad is None for parameter in block.parameters())


@pytest.mark.parametrize("given", [{"mode": "compiled"}, {"cuda_graph": True}])
def test_only_what_allocates_as_it_runs_is_measured(given):
    with pytest.raises(ValidationError, match="needs `mode: eager` and `cuda_graph: false`"):
        params(**given)


@no_gpu
def test_a_cpu_has_no_snapshot():
    with pytest.raises(Unsupported, match="`snapshot: true` needs the CUDA allocator"):
        run(params(snapshot=True))


def test_no_prediction_of_what_accounting_does_not_know():
    assert "activations_bytes" not in predict(params(checkpointing="every_k"))
    assert "peak_memory_bytes" in predict(params(checkpointing="every_k"))
    assert "peak_memory_bytes" not in predict(params(checkpointing="nested"))


class StandIn(TorchDispatchMode):
    """Fake of the CUDA allocator that records and counts the storages of CPU tensors.

    It runs between operations, so it does not see memory that one operation allocates and frees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.trace: list[dict[str, Any]] = []
        self.current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collect()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self.live or not size:
            return
        self.live[address] = (StorageWeakRef(storage), size)
        self._count(size)
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            line = {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            frames.append(line)
            frame = frame.f_back  # type: ignore[assignment]
        entry = {"action": "alloc", "addr": address, "size": size, "frames": frames}
        self.trace.append(entry)

    def collect(self) -> None:
        for address, (reference, size) in list(self.live.items()):
            if reference.expired():
                del self.live[address]
                self._count(-size)
                self.trace.append({"action": "free_completed", "addr": address, "size": size})

    def _count(self, change: int) -> None:
        self.current += change
        self.peak = max(self.peak, self.current)

    def snapshot(self) -> dict[str, Any]:
        self.collect()
        blocks = [
            {"address": a, "requested_size": size, "state": "active_allocated"}
            for a, (_, size) in self.live.items()
        ]
        segment = {"device": 0, "blocks": blocks}
        return {"segments": [segment], "device_traces": [list(self.trace)]}


@contextlib.contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Replace functions of the CUDA allocator with those of a `StandIn`, to test on a CPU."""
    allocator = StandIn()

    def count() -> int:
        allocator.collect()
        return allocator.current

    def mark_phase() -> None:
        torch.empty(1, dtype=torch.uint8)

    def peaks(phases: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, int]:
        found = {}
        for name, fn in phases.items():
            allocator.peak = count()
            fn()
            found[name] = allocator.peak
        return found

    monkeypatch.setattr(memory_timeline, "mark_phase", mark_phase)
    monkeypatch.setattr(peak_memory, "peak_memory_by_phase", peaks)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    stats = {"current": count, "peak": lambda: allocator.peak}
    monkeypatch.setattr(memory, "_requested", lambda which: stats[which]())
    with allocator:
        yield allocator


@pytest.mark.slow
@no_gpu
def test_timeline_of_a_step(monkeypatch, artifacts):
    point = params(snapshot=True)
    phases = ["forward", "backward", "optimizer"]
    with stand_in(monkeypatch):
        training = make_training(point, torch.device("cpu"))
        memory._warm_up(training, point)
        peaks, facts = memory._step_on_gpu(training, point, phases_of(training, point.passes))
    predicted = predict(point)
    assert set(peaks) == {*phases, "train_step"}
    assert facts["timeline_peak_bytes"] == facts["requested_peak_bytes"] == max(peaks.values())
    # The loss and the weight that it saves have 4 bytes each.
    assert 0 <= facts["activations_bytes"] - predicted["activations_bytes"] <= 8
    at_peak = facts["at_peak"]
    assert sum(at_peak.values()) == facts["timeline_peak_bytes"]
    assert at_peak["weights_bytes"] == predicted["weights_bytes"]
    assert at_peak["optimizer_state_bytes"] == facts["optimizer_state_bytes"]
    rows = facts["largest_allocations"]
    assert len(rows) == 10 and rows == sorted(rows, key=lambda row: -row["alive_bytes"])
    weights = next(row for row in rows if row["kind"] == "weights")
    assert weights["source"].startswith("systems/model.py:")
    assert weights["source"].endswith(" __init__")
    assert (artifacts / "memory_timeline.png").read_bytes().startswith(b"\x89PNG")
    with (artifacts / "snapshot.pickle").open("rb") as file:
        saved = read_timeline(pickle.load(file), phases)
    assert saved.peak()[1] == facts["timeline_peak_bytes"]


# Tensor sizes are whole MiB, because the allocator rounds other sizes up considerably.
SMALL: dict[str, Any] = {
    "size": "small", "d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 4,
    "context_length": 256, "vocab_size": 8192, "snapshot": True,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("passes", ["forward", "train_step"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [
        ("fp32", "naive"),
        ("bf16", "naive"),
        ("fp32", "sdpa_efficient"),
        ("bf16", "sdpa_flash"),
    ],
)
def test_measured_on_a_gpu(precision, attention, passes, artifacts):
    point = Params.model_validate(
        SMALL | {"precision": precision, "attention": attention, "passes": passes}
    )
    result, predicted = run(point), predict(point)
    facts, peaks = result["facts"], result["peak_memory_bytes"]
    for name in ("weights", "gradients", "residual_stream", "block_gradients", "weight_copies"):
        assert facts[f"{name}_bytes"] == predicted[f"{name}_bytes"], name
    for name in ("activations", "block_saved"):
        assert facts[f"{name}_bytes"] == pytest.approx(predicted[f"{name}_bytes"], rel=0.02), name
    # The allocator and the hooks of autograd must count the same bytes.
    assert facts["saved_bytes"] == pytest.approx(facts["activations_bytes"], rel=0.01)
    peak = facts["timeline_peak_bytes"]
    assert peak == pytest.approx(facts["requested_peak_bytes"], rel=1e-4)
    # The allocator rounds up, and leaves up to 1 MiB unused at the end of a block.
    assert facts["requested_peak_bytes"] <= max(peaks.values())
    assert max(peaks.values()) == pytest.approx(peak, rel=0.01)
    assert sum(facts["at_peak"].values()) == peak
    assert facts["at_peak"]["weights_bytes"] == facts["weights_bytes"]
    if passes == "train_step":
        assert set(peaks) == {"forward", "backward", "optimizer", "train_step"}
        assert facts["at_peak"]["optimizer_state_bytes"] == facts["optimizer_state_bytes"]
    sources = {row["source"] for row in facts["largest_allocations"]}
    assert any(source.startswith("systems/model.py:") for source in sources)
    assert (artifacts / "memory_timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (artifacts / "snapshot.pickle").stat().st_size > 0


@pytest.mark.gpu
def test_marks_and_owners_on_a_gpu():
    """Check a step with 4 MiB each of weight, activation and gradient."""
    with memory_timeline.recording():
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        memory_timeline.mark_phase()
        # saves the output of exp, and frees that of the multiplication
        loss = (weight.exp() * 2).sum()
        memory_timeline.mark_phase()
        loss.backward()
        torch.cuda.synchronize()
        memory_timeline.mark_phase()
        snapshot = torch.cuda.memory._snapshot()
    assert weight.grad is not None
    timeline = read_timeline(snapshot, ["forward", "backward"], torch.cuda.current_device())
    owners = [
        Owner("weights", 0, {weight.data_ptr(): "weight"}),
        Owner("gradients", timeline.events, {weight.grad.data_ptr(): "weight"}),
    ]
    found = zip(kinds(timeline, owners), timeline.allocations, strict=True)
    large = [(kind, one.size) for kind, one in found if one.size >= 1 << 22]
    assert sorted(kind for kind, _ in large if kind != "temporaries" and kind != "before") == [
        "activations", "gradients", "weights",
    ]  # fmt: skip
    assert all(size == 1 << 22 for kind, size in large if kind in ("weights", "gradients"))
