"""Tests of Training and train_step on a CPU: precisions, rejected parameters, fp16, caches."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from systems import accounting
from systems.benchmark import ROUND, WrongOutput
from systems.benchmarks import train_step, training_loss
from systems.benchmarks.train_step import predict, run
from systems.check.gradients import TOLERANCE
from systems.kernels.flash_attention import naive
from systems.measure.memory.state_memory import state_bytes
from systems.training import phases
from systems.training import training as training_module
from systems.training.training import (
    GraphedTraining,
    Training,
    make_training,
    new_model,
    tf32_matmuls,
)
from tests.systems.training.tiny_training import CPU, ON_CPU, TINY, no_gpu, params

pytestmark = pytest.mark.usefixtures("one_thread")
MATMUL = torch.backends.cuda.matmul

# ---- results of train_step -----------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("precision", ON_CPU)
def test_facts_of_a_training_step(precision):
    point = params(precision=precision, lr=3e-3)
    result = run(point)
    phases = {"forward", "backward", "optimizer", "forward_backward", "train_step"}
    samples = result["samples_ms"]
    assert set(samples) == phases
    assert all(len(s) == 3 and min(s) > 0 for s in samples.values())
    pairs = zip(samples["forward"], samples["backward"], strict=True)
    assert samples["forward_backward"] == pytest.approx(list(map(sum, pairs)))
    size = point.model_size
    forward = accounting.transformer_flops("forward", size, 2, 24)
    assert result["flops"] == {
        "forward": forward, "backward": 2 * forward, "forward_backward": 3 * forward,
        "train_step": 3 * forward,
    }  # fmt: skip
    assert result["bytes"] == {"optimizer": accounting.optimizer_step_bytes(size, precision)}
    assert result["tokens"] == dict.fromkeys(phases, 48)
    assert result["peak_memory_bytes"] == {}  # not measured on a CPU
    assert result["compiling_seconds"] is None
    facts = result["facts"]
    assert facts["parameters"] == accounting.transformer_parameters(size)
    assert facts["parameters"] == predict(point)["parameters"]
    losses = facts["losses"]
    assert len(losses) == 4  # including the warm-up step
    # initial logits are small, so the loss is near that of a uniform guess
    assert losses[0] == pytest.approx(math.log(101), rel=0.3)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    limits = TOLERANCE[precision]
    assert all(0 < facts["relative_error"][name] <= limit for name, limit in limits.items())
    assert facts["first_step_ms"] > 0 and facts["building_and_measuring_seconds"] > 0


@no_gpu
def test_a_sustained_step_has_times_work_and_calls(monkeypatch):
    monkeypatch.setenv(ROUND, '{"sustained_s": 0.05}')
    measured = run(params())
    name = "train_step_sustained"
    assert len(measured["samples_ms"][name]) >= 1
    calls = measured["facts"]["sustained_calls"]
    assert calls[name] >= 1 and calls["train_step"] == len(measured["samples_ms"]["train_step"])
    for work in ("flops", "tokens"):
        assert measured[work][name] == measured[work]["train_step"]


def test_the_energy_of_a_window_is_divided_by_the_steps_that_a_gpu_executes_in_it(monkeypatch):
    """The simulated GPU executes launched steps as late as it may, when the host waits for it."""
    launched, executed, inside = [], [], []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: phases.LEAST_MS / 4)

    def synchronize(device=None):
        executed.extend(launched)
        launched.clear()

    @contextlib.contextmanager
    def window(phase):
        before = len(executed)
        yield
        inside.append(len(executed) - before)

    training = SimpleNamespace(device=torch.device("cuda"), step=lambda: launched.append("step"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(phases, "window", window)
    samples, calls = phases.steps_ms(training, 3)
    assert inside == [calls] and len(samples) == 4


@no_gpu
@pytest.mark.parametrize("passes", ["forward", "forward_backward"])
def test_a_part_of_a_step_moves_no_weight(passes):
    result = run(params(passes=passes, lr=1.0))
    phases = {"forward": {"forward"}, "forward_backward": {"forward", "backward"}}[passes]
    assert set(result["samples_ms"]) - {"forward_backward"} == phases
    assert set(result["flops"]) == set(result["tokens"]) == set(result["samples_ms"])
    assert result["bytes"] == {}
    assert len(set(result["facts"]["losses"])) == 1


@no_gpu
def test_the_first_weights_are_the_same_for_every_precision():
    weights = {
        precision: make_training(params(precision=precision), CPU).model.state_dict()
        for precision in ON_CPU
    }
    for precision, mine in weights.items():
        for name, weight in mine.items():
            exact = weights["fp32"][name]
            assert torch.equal(weight, exact.to(weight.dtype)), f"{precision}: {name}"
    assert {w.dtype for w in weights["bf16_pure"].values()} == {torch.bfloat16}
    other = make_training(params(seed=1), CPU)
    assert not torch.equal(other.tokens, make_training(params(), CPU).tokens)
    assert not torch.equal(other.model.output_head.weight, weights["fp32"]["output_head.weight"])


def test_a_size_given_stands_instead_of_the_named_one():
    size = params(size="small", d_model=128, num_heads=2, vocab_size=77).model_size
    assert size == accounting.TransformerSize(128, 3072, 12, 2, vocab_size=77)


# ---- TF32 ----------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["user_forbids", "user_allows"])
def users_tf32(request) -> Iterator[bool]:
    before = MATMUL.allow_tf32
    MATMUL.allow_tf32 = request.param
    yield request.param
    MATMUL.allow_tf32 = before


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_tf32_is_set_while_a_phase_runs_and_restored_after(precision, users_tf32, monkeypatch):
    monkeypatch.setattr(training_module, "_check_device", lambda params, device: None)
    training = make_training(params(precision=precision), CPU)
    seen: dict[str, bool] = {}
    head = training.model.output_head
    head.register_forward_hook(lambda *_: seen.update(forward=MATMUL.allow_tf32))
    head.weight.register_hook(lambda _: seen.update(backward=MATMUL.allow_tf32))
    for phase in (training.forward, training.backward):
        phase()
        assert MATMUL.allow_tf32 is users_tf32
    assert seen == dict.fromkeys(["forward", "backward"], precision == "tf32")


def test_tf32_is_restored_after_an_error(users_tf32):
    with pytest.raises(ZeroDivisionError), tf32_matmuls(not users_tf32):
        assert MATMUL.allow_tf32 is not users_tf32
        raise ZeroDivisionError
    assert MATMUL.allow_tf32 is users_tf32


# ---- fp16's scaled loss --------------------------------------------------------------------------


def test_fp16_skips_a_step_whose_gradients_overflow():
    training = make_training(params(precision="fp16"), CPU)
    before = {name: w.clone() for name, w in training.model.state_dict().items()}
    training.scaler.scale(training.loss)  # creates the scaler's state
    training.scaler.update(2.0**40)
    training.step()
    assert all(torch.equal(w, before[name]) for name, w in training.model.state_dict().items())
    assert training.scaler.get_scale() == 2.0**39
    training.scaler.update(2.0**10)
    training.step()
    assert not any(torch.equal(w, before[name]) for name, w in training.model.state_dict().items())


def test_a_graph_s_warm_up_leaves_the_scale_as_it_was(monkeypatch):
    """The warm-up restores the loss scale in the same tensors, which a CUDA graph would read.

    On a CPU the warm-up runs without streams and graphs.
    """
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    training = GraphedTraining.__new__(GraphedTraining)
    Training.__init__(training, params(precision="fp16"), CPU)
    training.scaler.scale(training.loss)  # creates its state
    training.scaler.update(2.0**40)  # every step overflows with this scale and halves it
    scale, before = training.scaler._scale, training.scaler.state_dict()
    training._warm_up()
    assert training.scaler.state_dict() == before
    assert training.scaler._scale is scale
    first = new_model(training.params, CPU, naive)
    for weight, begin in zip(training.model.parameters(), first.parameters(), strict=True):
        assert torch.equal(weight, begin)


# ---- predictions ---------------------------------------------------------------------------------


def test_memory_is_predicted_of_what_runs():
    peak = {
        passes: predict(params(passes=passes, context_length=2))["peak_memory_bytes"]
        for passes in ("forward", "forward_backward", "train_step")
    }
    size = params().model_size
    gradients = accounting.model_state_bytes(size, "fp32")["gradients"]
    assert peak["forward_backward"] == 2 * gradients  # weights and gradients have equal sizes
    assert peak["train_step"] == 4 * gradients  # and both moments
    assert gradients < peak["forward"] < 2 * gradients
    assert "peak_memory_bytes" not in predict(params(checkpointing="nested"))
    assert "activations_bytes" not in predict(params(checkpointing="selective"))


def test_master_weights_are_predicted_without_an_update():
    point = params(precision="bf16_master", passes="forward")
    training = make_training(point, CPU)
    state = state_bytes(training.model.parameters(), training.optimizer)
    assert state["optimizer_state_bytes"] > 0
    expected = sum(state.values()) + predict(point)["activations_bytes"]
    # The state of the weights of norms, about 0.1% here, follows in the first update.
    assert predict(point)["peak_memory_bytes"] == pytest.approx(expected, rel=2e-3)


# ---- training_loss -------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_that_blows_up_has_no_deviation(precision):
    """A NaN loss is an error, because max() of deviations with NaN could return a finite number."""
    given = {name: TINY[name] for name in ("size", "context_length", "batch_size", "vocab_size")}
    point = training_loss.Params(**given, precision=precision, steps=12, lr=1e3)
    with pytest.raises(
        WrongOutput, match=r"the loss of step \d+ must be .*, got (nan|inf) \(lr 1000"
    ):
        training_loss.run(point)


# ---- memory and caches ---------------------------------------------------------------------------


def test_zero_grad_lets_go_of_a_forward_without_backward():
    training = make_training(params(), CPU)
    training.forward()
    assert training.loss.grad_fn is not None
    value = training.loss.item()
    training.zero_grad()
    assert training.loss.grad_fn is None and training.loss.item() == value


def test_caches_are_empty_for_a_while_and_then_those_of_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def named() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.endswith("_CACHE_DIR")}

    with pytest.raises(KeyError), train_step._empty_caches():
        assert named().keys() == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
        assert not any(Path(folder).exists() for folder in named().values())
        raise KeyError
    assert named() == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}


@no_gpu
@pytest.mark.slow
@pytest.mark.depends
def test_fresh_caches_leaves_those_of_others_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    point = {
        "mode": "compiled", "num_layers": 1, "attention": "sdpa", "warmup_steps": 0,
        "measure_steps": 2, "passes": "forward",
    }  # fmt: skip
    torch.compiler.reset()
    fresh = run(params(**point, fresh_caches=True))
    assert list(tmp_path.iterdir()) == []
    # the first call compiles, and its time is reported
    assert 0 < fresh["compiling_seconds"] < fresh["facts"]["building_and_measuring_seconds"]
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    assert list(tmp_path.iterdir())  # torch uses the user's folder again
