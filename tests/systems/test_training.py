"""Training as the studies run it: every precision, what is refused, and a check that can fail."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from systems import accounting
from systems.benchmarks import training_loss
from systems.benchmarks.base import Unsupported, WrongOutput
from systems.benchmarks.train_step import Params, predict, run
from systems.benchmarks.training import GraphedTraining, Training, make_training, new_model
from systems.benchmarks.training_check import TOLERANCE, check_training
from systems.kernels.flash_attention import naive

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "size": "tiny", "context_length": 24, "batch_size": 2, "vocab_size": 101,
    "warmup_steps": 1, "measure_steps": 3,
}  # fmt: skip
ON_CPU = ["fp32", "bf16", "fp16", "bf16_pure", "bf16_master"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are tiny: threads that wait for one another would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def params(**given: Any) -> Params:
    if given.get("precision") == "bf16_master":
        given = {"optimizer": "fused", **given}
    return Params.model_validate(TINY | given)


# ---- from Params to facts ------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("precision", ON_CPU)
def test_facts_of_a_training_step(precision):
    point = params(precision=precision, lr=3e-3)
    result = run(point)
    phases = {"forward", "backward", "optimizer", "forward_backward", "train_step"}
    assert set(result["samples_ms"]) == phases
    assert all(len(s) == 3 and min(s) > 0 for s in result["samples_ms"].values())
    for f, b, both in zip(
        *(result["samples_ms"][p] for p in ("forward", "backward", "forward_backward")), strict=True
    ):
        assert both == pytest.approx(f + b)
    size = point.model_size
    forward = accounting.transformer_flops("forward", size, 2, 24)
    assert result["flops"] == {
        "forward": forward, "backward": 2 * forward, "forward_backward": 3 * forward,
        "train_step": 3 * forward,
    }  # fmt: skip
    assert result["bytes"] == {"optimizer": accounting.optimizer_step_bytes(size, precision)}
    assert result["tokens"] == dict.fromkeys(phases, 48)
    assert result["peak_memory_bytes"] == {}  # a CPU has none by phase
    assert result["compiling_seconds"] is None
    facts = result["facts"]
    assert facts["parameters"] == accounting.transformer_parameters(size)
    assert facts["parameters"] == predict(point)["parameters"]
    losses = facts["losses"]
    assert len(losses) == 4  # warm-up, too
    # logits of first weights are small: near the loss of a guess
    assert losses[0] == pytest.approx(math.log(101), rel=0.2)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    limits = TOLERANCE[precision]
    assert all(0 < facts["relative_error"][name] <= limit for name, limit in limits.items())
    assert facts["first_step_ms"] > 0 and facts["building_and_measuring_seconds"] > 0


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
@pytest.mark.parametrize("attention", ["flash_pytorch", "sdpa", "sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_attention_trains_the_same(attention, precision):
    point = {"precision": precision, "lr": 1e-3, "warmup_steps": 0}
    losses = run(params(attention=attention, **point))["facts"]["losses"]
    plain = run(params(**point))["facts"]["losses"]
    assert losses == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 5e-3)


@no_gpu
@pytest.mark.parametrize(
    "policy",
    [
        {"checkpointing": "every_k", "checkpoint_every": 2},
        {"checkpointing": "nested"},
        {"checkpointing": "selective"},
    ],
)
def test_checkpointing_changes_no_loss(policy):
    losses = run(params(lr=1e-2, **policy))["facts"]["losses"]
    assert losses == run(params(lr=1e-2))["facts"]["losses"]


@no_gpu
def test_the_first_weights_are_the_same_for_every_precision():
    weights = {precision: _first(precision) for precision in ON_CPU}
    for precision, mine in weights.items():
        for name, weight in mine.items():
            exact = weights["fp32"][name]
            assert torch.equal(weight, exact.to(weight.dtype)), f"{precision}: {name}"
    assert {w.dtype for w in weights["bf16_pure"].values()} == {torch.bfloat16}
    other = make_training(params(seed=1), CPU)
    assert not torch.equal(other.tokens, make_training(params(), CPU).tokens)
    assert not torch.equal(other.model.output_head.weight, weights["fp32"]["output_head.weight"])


def _first(precision: str) -> dict[str, Tensor]:
    return make_training(params(precision=precision), CPU).model.state_dict()


# ---- what is refused -----------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cuda_graph": True}, "CUDA graphs need an NVIDIA GPU"),
        ({"precision": "tf32"}, "TF32 is a format of NVIDIA's tensor cores; this is a CPU"),
        ({"attention": "sdpa_cudnn"}, "sdpa_cudnn needs a CUDA GPU"),
        ({"attention": "sdpa_efficient"}, "sdpa_efficient needs a CUDA GPU"),
    ],
)
def test_what_a_cpu_cannot(given, reason):
    with pytest.raises(Unsupported, match=reason):
        run(params(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_heads": 3}, "d_model 64 is not divisible by num_heads 3"),
        (
            {"d_model": 36},
            r"head_dim 9 \(d_model 36 / num_heads 4\) is odd; RoPE turns pairs",
        ),
        ({"precision": "bf16_master", "optimizer": "torch"}, "optimizer: fused, not torch"),
        (
            {"precision": "fp16", "optimizer": "fused", "cuda_graph": True},
            "fp16 skips a step whose gradients overflow; under cuda_graph",
        ),
        ({"checkpoint_every": 4}, "checkpoint_every 4 is of checkpointing: every_k, not none"),
        (
            {"checkpointing": "selective", "mode": "compiled_blocks"},
            "selective tells operations apart.*valid are mode: eager and compiled",
        ),
        ({"vocab_size": 1}, "vocab_size\n.*greater than or equal to 2"),
        ({"context_length": 0}, "context_length\n.*greater than or equal to 1"),
        ({"measure_steps": 0}, "measure_steps\n.*greater than or equal to 1"),
        ({"lr": 0.0}, "lr\n.*greater than 0"),
        ({"size": "huge"}, "size\n.*'tiny', 'small'"),
        ({"precision": "int8"}, "precision\n.*'fp32', 'tf32'"),
        ({"batch_size": "4"}, "batch_size\n.*valid integer"),
        ({"warm_up": 3}, "warm_up\n.*not permitted"),
    ],
)
def test_params_that_cannot_be(given, message):
    with pytest.raises(ValidationError, match=message):
        params(**given)


def test_a_size_given_stands_instead_of_the_named_one():
    size = params(size="small", d_model=128, num_heads=2, vocab_size=77).model_size
    assert size == accounting.TransformerSize(128, 3072, 12, 2, vocab_size=77)


# ---- the check can fail --------------------------------------------------------------------------

Sabotage = Callable[[Tensor], Tensor]
GRADIENTS: dict[str, Sabotage] = {
    "5 % too long": lambda g: g * 1.05,
    "5 % too short": lambda g: g * 0.95,
    "turned round": lambda g: -g,
    "zero": torch.zeros_like,
    "half of it zero": lambda g: torch.cat([g[: len(g) // 2], torch.zeros_like(g[len(g) // 2 :])]),
    "noise of its length": lambda g: torch.randn_like(g) * g.std(),
    "not a number": lambda g: g * math.nan,
}
# one of each kind, and one of which there are many
PARAMETERS = [
    "token_embedding.weight",
    "blocks.1.attention_norm.weight",
    "blocks.1.attention.qkv.weight",
    "blocks.0.attention.out.weight",
    "blocks.2.feed_forward.gate_up.weight",
    "blocks.1.feed_forward.down.weight",
    "final_norm.weight",
    "output_head.weight",
]


def _trained(precision: str, steps: int = 0, **given: Any) -> Training:
    training = make_training(params(precision=precision), CPU, **given)
    for _ in range(steps):
        training.step()
    return training


@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_passes_what_is_right(precision):
    errors = check_training(_trained(precision, steps=2))
    # with room to spare: a tolerance that is nearly met would fail elsewhere
    assert all(0 < errors[name] < 0.5 * limit for name, limit in TOLERANCE[precision].items())


@pytest.mark.parametrize("sabotage", GRADIENTS)
@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_finds_a_wrong_gradient_of_any_parameter(precision, sabotage):
    for name in PARAMETERS if precision in ("fp32", "bf16") else PARAMETERS[1::3]:
        training = _trained(precision)
        weight = training.model.get_parameter(name)
        torch.manual_seed(0)
        weight.register_hook(GRADIENTS[sabotage])
        with pytest.raises(WrongOutput, match=rf"of {name}"):
            check_training(training)


@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_finds_a_parameter_without_gradient(precision):
    training = _trained(precision)
    training.model.blocks[1].feed_forward.down.weight.requires_grad_(False)
    with pytest.raises(WrongOutput, match=r"no gradient: blocks\.1\.feed_forward\.down\.weight"):
        check_training(training)


class _Scaled(torch.autograd.Function):
    """x, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def _attention(q: float = 1, k: float = 1, v: float = 1, **changed: Any) -> Callable[..., Tensor]:
    def attention(*qkv: Tensor, is_causal: bool) -> Tensor:
        scaled = [_Scaled.apply(x, f) for x, f in zip(qkv, (q, k, v), strict=True)]
        return naive(*scaled, **({"is_causal": is_causal} | changed))

    return attention


def _sees_one_ahead(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "not causal": _attention(is_causal=False),
    "another scale": _attention(scale=0.3),
    "sees one ahead": _sees_one_ahead,
    "5 % more out": lambda q, k, v, is_causal: 1.05 * naive(q, k, v, is_causal),
    "no dq": _attention(q=0),
    "no dk": _attention(k=0),
    "no dv": _attention(v=0),
    "dq turned round": _attention(q=-1),
    "dk 5 % too long": _attention(k=1.05),
    "dv 5 % too short": _attention(v=0.95),
}


@pytest.mark.parametrize("wrong", ATTENTIONS)
@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_finds_a_wrong_attention(precision, wrong):
    with pytest.raises(WrongOutput, match=f"relative error of {precision} against float64"):
        check_training(_trained(precision, attention=ATTENTIONS[wrong]))


def test_the_right_attention_through_the_same_door_passes():
    check_training(_trained("fp32", attention=_attention()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_finds_a_block_that_is_left_out(precision):
    training = _trained(precision)
    training.model.apply_blocks = lambda blocks, x: blocks[2](blocks[0](x))
    with pytest.raises(WrongOutput, match=r"no gradient: blocks\.1\.attention_norm"):
        check_training(training)


def test_the_check_finds_a_loss_that_is_off():
    training = _trained("bf16")
    right = training._loss_fn
    training._loss_fn = lambda tokens, targets: right(tokens, targets) * 1.02
    with pytest.raises(WrongOutput, match=r"loss (1\.9|2\.0)\d*e-02 \(at most 5e-03\)"):
        check_training(training)


def test_the_check_finds_a_training_that_blew_up():
    training = _trained("fp32")
    training.loss = torch.tensor(math.nan)
    with pytest.raises(WrongOutput, match="the last loss is nan"):
        check_training(training)


def test_a_wrong_training_is_no_result(monkeypatch):
    """Through `run`, as a study has it."""
    from systems.kernels.flash_attention import ATTENTIONS as by_name

    monkeypatch.setitem(by_name, "naive", ATTENTIONS["dk 5 % too long"])
    with pytest.raises(WrongOutput, match=r"attention\.qkv\.weight k"):
        run(params(precision="bf16"))


def test_exact_gradients_are_those_of_float64_autograd():
    from systems.benchmarks.training_check import _exact
    from systems.model import cross_entropy

    training = _trained("fp32", steps=0)
    training.forward()
    training.backward()
    model = new_model(training.params, CPU, naive).double()
    loss = cross_entropy(model(training.tokens), training.targets)
    loss.backward()
    found = {name: (given, exact.clone()) for name, given, exact in _exact(training)}
    assert found.pop("loss")[1].item() == pytest.approx(loss.item(), rel=1e-13)
    own = dict(training.model.named_parameters())
    assert set(found) == set(own)
    for name, parameter in model.named_parameters():
        given, exact = found[name]
        assert given is own[name].grad
        torch.testing.assert_close(exact, parameter.grad, rtol=1e-9, atol=1e-15)


# ---- fp16's scaled loss --------------------------------------------------------------------------


def test_fp16_gradients_are_unscaled_before_the_step():
    scaled, plain = make_training(params(precision="fp16"), CPU), make_training(params(), CPU)
    for training in (scaled, plain):
        training.forward()
        training.backward()
    factor = scaled.scaler.get_scale()
    assert factor > 1000 and not plain.scaler.is_enabled()
    pairs = list(zip(scaled.model.parameters(), plain.model.parameters(), strict=True))
    for a, b in pairs:  # the gradients of the scaled loss, as they are
        assert (a.grad / factor - b.grad).norm() < 1e-2 * b.grad.norm()
    for training in (scaled, plain):
        training.optimizer_step()
    for a, b in pairs:
        mine, other = (t.optimizer.state[p] for t, p in ((scaled, a), (plain, b)))
        for name in ("exp_avg", "exp_avg_sq"):
            assert (mine[name] - other[name]).norm() < 2e-2 * other[name].norm(), name


def test_fp16_skips_a_step_whose_gradients_overflow():
    training = make_training(params(precision="fp16"), CPU)
    before = {name: w.clone() for name, w in training.model.state_dict().items()}
    training.scaler.scale(training.loss)  # makes its state
    training.scaler.update(2.0**40)
    training.step()
    assert all(torch.equal(w, before[name]) for name, w in training.model.state_dict().items())
    assert training.scaler.get_scale() == 2.0**39
    training.scaler.update(2.0**10)
    training.step()
    assert not any(torch.equal(w, before[name]) for name, w in training.model.state_dict().items())


def test_a_graph_s_warm_up_leaves_the_scale_as_it_was(monkeypatch):
    """On a CPU, what a graph would record is only run; the scale must be the same tensors after."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    training = GraphedTraining.__new__(GraphedTraining)
    Training.__init__(training, params(precision="fp16"), CPU)
    training.scaler.scale(training.loss)  # makes its state
    training.scaler.update(2.0**40)  # of which every step overflows, and halves it
    scale, before = training.scaler._scale, training.scaler.state_dict()
    training._warm_up()
    assert training.scaler.state_dict() == before
    assert training.scaler._scale is scale
    first = new_model(training.params, CPU, naive)
    for weight, begin in zip(training.model.parameters(), first.parameters(), strict=True):
        assert torch.equal(weight, begin)


# ---- what is predicted ---------------------------------------------------------------------------


def test_memory_is_predicted_of_what_runs():
    peak = {
        passes: predict(params(passes=passes, context_length=2))["peak_memory_bytes"]
        for passes in ("forward", "forward_backward", "train_step")
    }
    size = params().model_size
    gradients = accounting.model_state_bytes(size, "fp32")["gradients"]
    assert peak["forward_backward"] == 2 * gradients  # and as many bytes of weights
    assert peak["train_step"] == 4 * gradients  # both moments, too
    assert gradients < peak["forward"] < 2 * gradients
    assert "peak_memory_bytes" not in predict(params(checkpointing="nested"))
    assert "activations_bytes" not in predict(params(checkpointing="selective"))


# ---- training_loss -------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_that_blows_up_has_no_deviation(precision):
    """max() of a list passes NaN over: it would be told as the deviation of the step before."""
    given = {name: TINY[name] for name in ("size", "context_length", "batch_size", "vocab_size")}
    point = training_loss.Params(**given, precision=precision, steps=12, lr=1e3)
    with pytest.raises(WrongOutput, match=r"the loss of step \d+ is (nan|inf), lr 1000"):
        training_loss.run(point)


# ---- memory and caches ---------------------------------------------------------------------------


def test_zero_grad_lets_go_of_a_forward_without_backward():
    training = make_training(params(), CPU)
    training.forward()
    assert training.loss.grad_fn is not None
    value = training.loss.item()
    training.zero_grad()
    assert training.loss.grad_fn is None and training.loss.item() == value


@no_gpu
def test_fresh_caches_leaves_those_of_others_alone(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(mine))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    point = {
        "mode": "compiled", "num_layers": 1, "warmup_steps": 0, "measure_steps": 2,
        "passes": "forward",
    }  # fmt: skip
    torch.compiler.reset()
    fresh = run(params(**point, fresh_caches=True))
    assert list(mine.iterdir()) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(mine)
    assert "TRITON_CACHE_DIR" not in os.environ
    # the first call compiles, and says what that took
    assert 0.2 < fresh["compiling_seconds"] < fresh["facts"]["building_and_measuring_seconds"]
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    assert list(mine.iterdir())  # it is where torch would have left its files


# ---- on a GPU ------------------------------------------------------------------------------------

GPU: dict[str, Any] = {
    "size": "tiny", "d_model": 256, "d_ff": 512, "num_heads": 4, "num_layers": 4,
    "context_length": 128, "batch_size": 4, "vocab_size": 1000, "lr": 1e-3,
    "warmup_steps": 0, "measure_steps": 5,
}  # fmt: skip
# Of losses, relative: of a first step from the same weights, and after four more, in which atomic
# additions and other kernels may round otherwise.
FIRST_LOSS = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-4, "bf16_pure": 1e-3}
LATER_LOSS = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 1e-2, "fp16": 5e-3, "bf16_pure": 2e-2}


def _losses(**given: Any) -> list[float]:
    training = make_training(Params.model_validate(GPU | given), torch.device("cuda"))
    losses = []
    for _ in range(5):
        training.step()
        losses.append(training.loss.item())
    return losses


def _hold_to(losses: list[float], plain: list[float], precision: str) -> None:
    assert losses[0] == pytest.approx(plain[0], rel=FIRST_LOSS[precision])
    assert losses == pytest.approx(plain, rel=LATER_LOSS[precision])
    assert plain[-1] < 0.9 * plain[0]  # it learns; the tolerance is far below what it moves


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compiled_blocks"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_cuda_graphs_train_as_launches_do(precision, mode):
    losses = _losses(precision=precision, mode=mode, cuda_graph=True)
    _hold_to(losses, _losses(precision=precision, mode=mode), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_cuda_graphs_with_the_fused_optimizer(precision):
    losses = _losses(precision=precision, optimizer="fused", cuda_graph=True)
    _hold_to(losses, _losses(precision=precision, optimizer="fused"), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compiled", "compiled_blocks"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_trains_as_eager_does(precision, mode):
    _hold_to(_losses(precision=precision, mode=mode), _losses(precision=precision), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_a_graph_leaves_first_weights_and_optimizer_as_they_were(precision):
    point = Params.model_validate(GPU | {"precision": precision, "cuda_graph": True})
    training = make_training(point, torch.device("cuda"))
    first = new_model(point, torch.device("cuda"), naive)
    for (name, weight), begin in zip(
        training.model.named_parameters(), first.parameters(), strict=True
    ):
        assert torch.equal(weight, begin.to(weight.dtype)), name
    for state in training.optimizer.state.values():
        assert not any(tensor.any() for tensor in state.values())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    assert training.scaler.state_dict() == scaler.state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"precision": "fp32"},
        {"precision": "tf32"},
        {"precision": "fp16", "cuda_graph": True},
        {"precision": "bf16", "mode": "compiled", "attention": "sdpa_cudnn"},
        {"precision": "bf16", "mode": "compiled_blocks", "cuda_graph": True},
        {"precision": "bf16_pure", "attention": "sdpa_flash", "cuda_graph": True},
        {"precision": "bf16_master", "optimizer": "fused", "attention": "sdpa_flash"},
        {"precision": "bf16", "checkpointing": "selective", "attention": "sdpa_flash"},
        {"precision": "fp32", "checkpointing": "nested", "mode": "compiled_blocks"},
    ],
)
def test_facts_on_a_gpu(given):
    point = Params.model_validate(GPU | {"warmup_steps": 2} | given)
    result = run(point)
    peaks = result["peak_memory_bytes"]
    assert set(peaks) == {"forward", "backward", "optimizer", "train_step"}
    assert peaks["train_step"] == max(peaks.values())
    state = accounting.model_state_bytes(point.model_size, point.precision)
    assert min(peaks.values()) >= state["weights"] + state["optimizer_state"]
    limits = TOLERANCE[point.precision]
    errors = result["facts"]["relative_error"]
    assert all(errors[name] <= limit for name, limit in limits.items())
    made_once = point.mode != "eager" or point.cuda_graph
    assert (result["compiling_seconds"] is not None) == made_once
    assert len(result["samples_ms"]["train_step"]) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("sabotage", GRADIENTS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_check_finds_a_wrong_gradient_on_a_gpu(precision, sabotage):
    training = make_training(
        Params.model_validate(GPU | {"precision": precision}), torch.device("cuda")
    )
    training.model.blocks[1].attention.out.weight.register_hook(GRADIENTS[sabotage])
    with pytest.raises(WrongOutput, match=r"blocks\.1\.attention\.out\.weight"):
        check_training(training)


@pytest.mark.gpu
@pytest.mark.parametrize("passes", ["forward", "train_step"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [("fp32", "naive"), ("bf16", "naive"), ("fp32", "sdpa_efficient"), ("bf16", "sdpa_flash")],
)
def test_activations_of_the_small_model_are_what_arithmetic_says(precision, attention, passes):
    point = Params.model_validate(
        {"size": "small", "context_length": 256, "precision": precision, "attention": attention}
    )
    device = torch.device("cuda")
    training = make_training(point, device)
    training.forward()  # cuBLAS takes its workspace
    if passes == "train_step":
        training.backward()
        training.optimizer_step()
    training.zero_grad()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    training.forward()
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before
    predicted = predict(point)["activations_bytes"]
    assert kept == pytest.approx(predicted, rel=0.02)


@pytest.mark.gpu
def test_the_peak_of_a_forward_holds_one_graph():
    given = {"size": "small", "context_length": 512, "passes": "forward", "measure_steps": 2}
    point = Params.model_validate(given)
    peak = run(point)["peak_memory_bytes"]["forward"]
    assert peak == pytest.approx(predict(point)["peak_memory_bytes"], rel=0.1)
