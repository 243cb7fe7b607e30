"""Tests of the memory benchmark.

On a CPU, live tensors are compared with predictions. On a GPU, results are compared with the counts
of the CUDA allocator, and the timeline of a step, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from systems.accounting import block_saved_bytes
from systems.benchmarks.memory import Params, predict, run
from systems.measure.memory import memory_timeline
from systems.measure.memory.memory_timeline import Owner, kinds, read_timeline
from systems.measure.memory.saved_tensors import saved_tensors
from systems.measure.memory.state_memory import storage_bytes
from systems.plot_data import read_figure
from tests.systems.kernels.selection import slow
from tests.systems.training.tiny_training import no_gpu

pytestmark = pytest.mark.usefixtures("artifacts", "one_thread")
TINY: dict[str, Any] = {"size": "tiny", "context_length": 24, "batch_size": 3, "vocab_size": 50}


def params(**given: Any) -> Params:
    return Params.model_validate(TINY | given)


def cpu_difference(point: Params) -> int:
    """Return by how much more a block saves on a CPU than on a GPU, in bytes."""
    tokens, size = point.batch_size * point.context_length, point.model_size
    differences = {
        # Autocast on a CPU computes the softmax in bf16, on a GPU in float32.
        ("bf16", "naive"): -4 * tokens * point.context_length * size.num_heads,
        # In float32 too, the output is in the layout of heads, so the output projection copies it.
        ("fp32", "sdpa_flash"): 4 * tokens * size.d_model,
    }
    return differences.get((point.precision, point.attention), 0)


@no_gpu
@pytest.mark.parametrize(
    ("passes", "precision", "attention"),
    [
        ("train_step", "fp32", "naive"),
        slow("forward", "bf16_pure", "naive"),
        ("train_step", "bf16", "naive"),
        slow("train_step", "fp32", "sdpa_flash"),
        ("train_step", "bf16_pure", "sdpa_flash"),
        slow("train_step", "bf16", "sdpa_flash"),
        slow("train_step", "fp32", "sdpa_math"),
        slow("train_step", "bf16_pure", "sdpa_math"),
        ("forward", "bf16", "sdpa_math"),
    ],
)
def test_what_is_alive_is_what_arithmetic_says(passes, precision, attention):
    point = params(precision=precision, passes=passes, attention=attention)
    result, predicted = run(point), predict(point)
    facts, size = result["facts"], point.model_size
    assert result["peak_memory_bytes"] == {}  # CPUs have no allocator statistics
    for name in ("weights", "gradients", "residual_stream", "block_gradients", "weight_copies"):
        assert facts[f"{name}_bytes"] == predicted[f"{name}_bytes"], name
    # AdamW has a step count of 4 bytes per parameter. The loss saves one number, its weight.
    extra = facts["optimizer_state_bytes"] - predicted["optimizer_state_bytes"]
    assert extra == (4 * 21 if passes == "train_step" else 0)
    more = cpu_difference(point)
    assert facts["block_saved_bytes"] == predicted["block_saved_bytes"] + more
    assert facts["saved_bytes"] == predicted["activations_bytes"] + size.num_layers * more + 4
    copies = 2 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff) if precision == "bf16" else 0
    assert facts["block_weight_copies_bytes"] == copies


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


def test_no_prediction_of_what_accounting_does_not_know():
    assert "activations_bytes" not in predict(params(checkpointing="every_k"))
    assert "peak_memory_bytes" in predict(params(checkpointing="every_k"))
    assert "peak_memory_bytes" not in predict(params(checkpointing="nested"))


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
    assert read_figure(artifacts / "memory_timeline.plot.json").layers["weights"]
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
