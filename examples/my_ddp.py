r"""A data-parallel wrapper that overlaps communication with backward.

`MyDDP` has the form of CS336, assignment 2: a class `(module)` with the method
`finish_gradient_synchronization`, which the training loop calls between backward and the step of
the optimizer. Autograd calls a hook when the gradient of a parameter is ready. The hook starts an
all-reduce of this gradient and returns, so that backward continues while the data is in flight.

Run these commands in the folder `examples/`. They train a tiny Transformer on two CPU processes:

    python -m jobs check my_ddp.py:MyDDP
    python -m jobs.submit sweeps/cpu/ddp.yaml --local --out logs/my_ddp \
        'strategy=[naive, my_ddp.py:MyDDP]'
    python -m aggregate logs/my_ddp --plot logs/my_ddp/plots

Each run first compares the training with training on one process. It ends as `wrong` if the
parameters differ, for example because a hook forgets to divide by the number of ranks. The table
`communication` shows how much communication is exposed, which means that nothing is computed at the
same time. A timeline of a step is in the folder `plots`. On a machine with Slurm and two GPUs:

    python -m jobs.submit sweeps/ddp.yaml --out logs/my_ddp_gpu \
        'strategy=[naive, torch_tuned, my_ddp.py:MyDDP]' --where 'size == xl'
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class MyDDP(nn.Module):
    """Average the gradients of a module over all ranks, with one all-reduce per parameter."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.in_flight: list[Any] = []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)  # all ranks start with the weights of rank 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_all_reduce)

    def start_all_reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        # A sum of quotients is the mean. Gloo, the backend for CPUs, cannot compute means.
        parameter.grad /= dist.get_world_size()
        self.in_flight.append(dist.all_reduce(parameter.grad, async_op=True))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        for work in self.in_flight:
            work.wait()
        self.in_flight.clear()
