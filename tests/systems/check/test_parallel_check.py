"""The check of wrappers and sharded optimizers runs real ranks and names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.harness import ROOT, call

CODE = """
import torch
import torch.distributed as dist
from systems.parallel import FullyShardedDataParallel, NaiveDDP, ShardedOptimizer


class Right(NaiveDDP):
    def __init__(self, module): super().__init__(module)

class Sums(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters(): dist.broadcast(p.data, 0)
    def forward(self, *inputs): return self.module(*inputs)
    def finish_gradient_synchronization(self):
        for p in self.module.parameters(): dist.all_reduce(p.grad)

class Nothing(Sums):
    def finish_gradient_synchronization(self): pass

class DifferentWeights(Sums):
    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

class Raises(Sums):
    def finish_gradient_synchronization(self): raise ValueError("no bucket is ready")

class NotAwaited(Sums):
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            p.grad /= dist.get_world_size()
            self.last = dist.all_reduce(p.grad, async_op=True)

class MyFSDP(FullyShardedDataParallel):
    def __init__(self, module, compute_dtype=None): super().__init__(module, compute_dtype)

class MyOptimizer(ShardedOptimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)

class Adapted(Sums):
    finish_gradient_synchronization = None

def get_ddp(module): return Adapted(module)
def ddp_on_after_backward(model, optimizer):
    for p in model.module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

class Buckets(Right):
    def __init__(self, module, process_group=None, bucket_size_mb=25.0):
        assert process_group is None and bucket_size_mb == 25.0
        super().__init__(module)

class Stops(MyFSDP):
    steps = 0
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.steps += 1
        if self.steps > 3:
            for p in self.parameters():
                p.grad = torch.ones_like(p)

class Ignores(MyOptimizer):
    steps = 0
    def step(self, closure=None):
        self.steps += 1
        if self.steps <= 3:
            return super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 1e-4

class NoBroadcast(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        params = list(params)
        super().__init__(params, {})
        self.inner = optimizer_cls(params[dist.get_rank()::dist.get_world_size()], **kwargs)
    def step(self, closure=None): self.inner.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def check(name: str, code: int) -> str:
    environment = {"PYTHONPATH": str(ROOT)}
    done = call("jobs", "check", f"own.py:{name}", "--cpu", environment=environment)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_right_wrapper() -> None:
    told = check("Right", 0)
    assert "own.py:Right: ddp on 2 and 3 ranks, gloo" in told and "8 right; largest" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MyFSDP", "fsdp"),
        ("MyOptimizer", "optimizer"),
        ("get_ddp", "ddp"),
        ("Buckets", "ddp"),
    ],
)
def test_other_kinds(name: str, kind: str) -> None:
    assert f"own.py:{name}: {kind} on 2 and 3 ranks" in check(name, 0)


@pytest.mark.slow
def test_a_sum_instead_of_a_mean_is_named() -> None:
    told = check("Sums", 1)
    assert "gradients are summed over the ranks, but not divided by the number of ranks" in told
    assert "the smallest: 2 ranks, fp32, model with 1 block and d_model 8" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", "gradients are not exchanged between the ranks"),
        ("NotAwaited", "the wrapper does not wait for all of its communication"),
        ("NoBroadcast", "ranks do not get the updates of other ranks"),
        ("DifferentWeights", "the weights of rank 0 are not copied to the other ranks at the"),
        ("Stops", "after timing: rank 0: error against one process"),
        ("Ignores", "after timing: rank 0: error against one process that trains on all batches"),
        ("Raises", "refused: 2 cases: ValueError: no bucket is ready"),
    ],
)
def test_other_mistakes_are_named(name: str, words: str) -> None:
    assert words in check(name, 1)
