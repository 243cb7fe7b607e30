"""The check of wrappers and sharded optimizers finds what is wrong and names it.

Ranks that other tests share run the cases of the check. Only the test of the command starts ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from systems.check import wrappers
from systems.check.wrappers import cases
from tests.jobs.harness import ROOT, call
from tests.systems.parallel.ranks import TWO, RankContext, on_ranks

CODE = """
import os
import signal
import threading
from datetime import timedelta
import torch
import torch.distributed as dist
from systems.parallel import FullyShardedDataParallel, NaiveDDP, ShardedOptimizer


def average(module):
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

class DifferentWeights(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, *inputs): return self.module(*inputs)
    def finish_gradient_synchronization(self): average(self.module)

class Sums(DifferentWeights):
    def __init__(self, module):
        super().__init__(module)
        for p in module.parameters(): dist.broadcast(p.data, 0)
    def finish_gradient_synchronization(self):
        for p in self.module.parameters(): dist.all_reduce(p.grad)

class Nothing(Sums):
    def finish_gradient_synchronization(self): pass

class Raises(Sums):
    def finish_gradient_synchronization(self):
        if dist.get_world_size() == 3:
            raise ValueError("no bucket is ready")
        super().finish_gradient_synchronization()

class Killed(Sums):
    def finish_gradient_synchronization(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().finish_gradient_synchronization()

class Exits(Sums):
    def finish_gradient_synchronization(self):
        os._exit(3)

class RaisesAlone(Sums):
    def finish_gradient_synchronization(self):
        if dist.get_rank() == 1:
            self.absent()
        super().finish_gradient_synchronization()

class Waits(Sums):
    def finish_gradient_synchronization(self):
        group = dist.new_group(timeout=timedelta(seconds=2))
        if dist.get_rank() == 1:
            threading.Event().wait()
        dist.all_reduce(torch.ones(1), group=group)

class NotAwaited(Sums):
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            p.grad /= dist.get_world_size()
            self.last = dist.all_reduce(p.grad, async_op=True)

class OneBitOff(NaiveDDP):
    # changes one weight on rank 1 by the smallest possible amount after the last step
    steps = 0
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 1:
            weight = self.module.final_norm.weight.data
            weight[0] = torch.nextafter(weight[0], weight.new_tensor(2.0))

class Adapted(Sums):
    finish_gradient_synchronization = None

def get_ddp(module): return Adapted(module)
def ddp_on_after_backward(model, optimizer): average(model.module)

class Buckets(NaiveDDP):
    def __init__(self, module, process_group=None, bucket_size_mb=25.0):
        assert process_group is None and bucket_size_mb == 25.0
        super().__init__(module)

class StopsAveraging(NaiveDDP):
    steps = 0
    def _average(self):
        self.steps += 1
        if self.steps <= 3:
            super()._average()

class Stops(FullyShardedDataParallel):
    steps = 0
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.steps += 1
        if self.steps > 3:
            for p in self.parameters():
                p.grad = torch.ones_like(p)

class Skips(ShardedOptimizer):
    def step(self, closure=None): pass

class Ignores(ShardedOptimizer):
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


HOOKS = "examples/cs336/adapters.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(CODE)
    return path


RIGHT = {
    "get_ddp": "ddp",
    "Buckets": "ddp",
    f"{HOOKS}:get_ddp": "ddp",
    f"{HOOKS}:get_ddp_bucketed": "ddp",
    f"{HOOKS}:get_fsdp": "fsdp",
    f"{HOOKS}:get_sharded_optimizer": "optimizer",
}


@on_ranks(TWO, repeats=1)
@pytest.mark.parametrize(
    "name", [x if x == "get_ddp" else pytest.param(x, marks=pytest.mark.slow) for x in RIGHT]
)
def test_what_is_right_passes(here: RankContext, own: Path, name: str) -> None:
    reference = f"{ROOT}/{name}" if ":" in name else f"{own}:{name}"
    kind = RIGHT[name]
    smallest, *_, largest = cases(kind, here.world_size)
    for case in (smallest, largest):
        found = wrappers._check(kind, reference, here.backend, case, here.device)
        assert found.status == "right", found


@on_ranks(TWO, repeats=1)
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("Sums", "ddp", "gradients are summed over the ranks, but not divided by the number of"),
        ("Nothing", "ddp", "gradients are not exchanged between the ranks"),
        ("NotAwaited", "ddp", "the wrapper does not wait for all of its communication"),
        ("NoBroadcast", "optimizer", "ranks do not get the updates of other ranks"),
        ("DifferentWeights", "ddp", "weights of rank 0 are not copied to the other ranks at the"),
        ("OneBitOff", "ddp", "rank 1: weights differ from rank 0: final_norm.weight"),
        ("Skips", "optimizer", "weights 9.9"),
        ("StopsAveraging", "ddp", "after timing: rank"),
        ("Stops", "fsdp", "after timing: rank 0: error against one process"),
        ("Ignores", "optimizer", "after timing: rank 0: error against one process that trains on"),
    ],
)
def test_a_mistake_is_named(here: RankContext, own: Path, name: str, kind: str, words: str) -> None:
    case = cases(kind, here.world_size)[0]
    found = wrappers._check(kind, f"{own}:{name}", here.backend, case, here.device)
    assert found.status == "wrong", found
    if here.rank == 0:  # which writes the results
        assert words in "\n".join(found.wrong), found


@pytest.mark.slow
def test_the_command_tells_what_is_wrong_and_what_ends_the_ranks(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_attention_check.py has the other exit codes."""
    monkeypatch.chdir(own.parent)
    environment = {"PYTHONPATH": str(ROOT)}
    done = call("jobs", "check", "own.py:Raises", "--cpu", environment=environment)
    told = done.stdout
    assert done.returncode == 1, told
    assert "own.py:Raises: ddp on 2 and 3 ranks, gloo" in told and "4 wrong, 1 crashed" in told
    assert "the smallest: 2 ranks, fp32, model with 1 block and d_model 8" in told
    assert "it looks as if gradients are summed over the ranks" in told
    assert "ValueError: no bucket is ready (own.py:" in told
    assert "3 cases not checked" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Killed", "rank 1 ended with exit code -11"),
        ("Exits", "ended with exit code 3"),
        ("RaisesAlone", "rank 1: AttributeError: 'RaisesAlone' object has no attribute 'absent'"),
        ("Waits", "every rank call the same collectives?"),
    ],
)
def test_what_ended_the_ranks_is_named(
    own: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """It is not that another rank lost its peer. In the last case, too, the check fails."""
    monkeypatch.setattr(wrappers, "WORLD_SIZES", (2,))
    monkeypatch.setattr(wrappers, "MODELS", wrappers.MODELS[:1])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    *_, found = wrappers.check_parallel_code("ddp", f"{own}:{name}", "gloo")
    assert found.crashed and words in found.refused
