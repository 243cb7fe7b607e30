"""Shard an optimizer's state over the ranks: each rank steps its share of the parameters and
broadcasts them to the others.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1, but a parameter is never split, so any optimizer can be wrapped that treats each
parameter on its own.

Parameters that are sent together are views of one tensor, so one broadcast in place carries them
all: no copies, and no memory beside the parameters. A share is cut into chunks; while one chunk is
being sent the next is stepped, and the chunks of all ranks are sent at the same time.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.optim.optimizer import Optimizer, ParamsT

from systems.parallel.collectives import group_or_world
from systems.parallel.rank_consistency import check_agreement

# Stepped and sent at once: large enough for the network's full bandwidth, which an all-reduce on
# two H200s nears from 100 MB on, small enough that little is left to send after the last step.
CHUNK_BYTES = 256 * 10**6
ALIGNMENT = 256  # bytes; vectorised kernels and NCCL want 16, torch's allocator gives more
NOT_OPTIONS = ("params", "param_names")  # of a parameter group


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the rank of each parameter: the largest first, each to the rank with fewest bytes.

    Args:
        sizes: bytes of the parameters.
        loads: bytes that each rank has; added to.
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners


class _Piece:
    """Parameters of one rank, dtype and device, as views of one flat tensor."""

    def __init__(self, owner: int, parameters: list[Tensor]):
        self.owner = owner
        like = parameters[0]
        unit = max(1, ALIGNMENT // like.element_size())
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // unit) * unit)
        self.flat = torch.zeros(starts[-1], dtype=like.dtype, device=like.device)
        self.views = []
        for parameter, start in zip(parameters, starts[:-1], strict=True):
            place = self.flat[start : start + parameter.numel()]
            strides = torch.empty_like(parameter).stride()  # the parameter's, made dense
            view = place.as_strided(parameter.shape, strides, place.storage_offset())
            view.copy_(parameter.detach())
            parameter.data = view
            self.views.append((parameter, view))

    def is_current(self) -> bool:
        """Return False if a parameter was moved since, as `module.to(...)` does."""
        return all(p.data_ptr() == v.data_ptr() and p.dtype == v.dtype for p, v in self.views)


class _Chunk:
    """Parameters of every rank, stepped and sent together, with this rank's optimizer."""

    def __init__(self, by_rank: list[list[Tensor]], optimizer: Optimizer | None, first_group: int):
        self.by_rank = by_rank
        self.optimizer = optimizer  # None: this rank has nothing in this chunk
        self.first_group = first_group  # index, outside, of the optimizer's first parameter group
        self.lay_out()

    def lay_out(self) -> None:
        self.pieces = []
        for rank, parameters in enumerate(self.by_rank):
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in parameters:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            self.pieces += [_Piece(rank, alike) for alike in kinds.values()]

    def send(self, group: dist.ProcessGroup) -> list[Any]:
        """Start to broadcast each piece from its owner; returns works to wait for."""
        pieces = [piece for piece in self.pieces if piece.flat.numel()]
        device = pieces[0].flat.device if pieces else torch.device("cpu")
        # In one NCCL group broadcasts from all ranks run at the same time, so links carry data in
        # both directions; one after the other they would leave half of the bandwidth idle.
        together = (
            _coalescing_manager(group, device, async_ops=True)
            if device.type == "cuda" and pieces
            else nullcontext()
        )
        with together as manager:
            works = [
                dist.broadcast(piece.flat, group=group, group_src=piece.owner, async_op=True)
                for piece in pieces
            ]
        return works if manager is None else [manager]


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)` with its state and its work sharded over the ranks.

    Each rank gets parameters of about the same number of bytes; none is split. `state` is this
    rank's part. `param_groups` has all parameters, as without sharding, so learning rate schedulers
    work. Parameters get new memory, `param.data`, in the order of their shares.

    Args:
        params: as for any optimizer; the same on all ranks, with the same values.
        optimizer_cls: an optimizer that treats each parameter on its own (not LBFGS), or at least
            needs no others than those of one chunk of one rank.
        process_group: all ranks by default.
        kwargs: the optimizer's.

    Raises:
        ValueError: parameters differ across ranks; the message says which rank and where.
        RuntimeError: there is no process group.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        self._group = group_or_world(process_group)
        self._make = lambda groups: optimizer_cls(groups, **kwargs)
        self._chunks: list[_Chunk] = []
        self._loads = [0] * self._group.size()
        self._placed = 0  # parameter groups that have been shared out
        self._constructed = False
        super().__init__(params, dict(self._make([{"params": []}]).defaults))
        self._constructed = True
        self._share_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. A collective: all ranks add the same."""
        super().add_param_group(param_group)
        if self._constructed:  # groups of the constructor are balanced together
            self._share_out()

    def _share_out(self) -> None:
        first, groups = self._placed, self.param_groups[self._placed :]
        named = []
        for g, group in enumerate(groups, first):
            numbers = [f"{i} of group {g}" for i in range(len(group["params"]))]
            named += list(zip(group.get("param_names", numbers), group["params"], strict=True))
        check_agreement(named, self._group)
        parameters = [parameter for _, parameter in named]
        owners = balance([parameter.nbytes for parameter in parameters], self._loads)
        shares: list[list[Tensor]] = [[] for _ in self._loads]
        for parameter, owner in zip(parameters, owners, strict=True):
            shares[owner].append(parameter)
        count = max(1, -(-max(map(_bytes, shares)) // CHUNK_BYTES))
        for by_rank in zip(*(_cut(share, count) for share in shares), strict=True):
            mine = set(by_rank[self._group.rank()])
            optimizer = None
            if mine:
                optimizer = self._make(
                    [
                        {**_options(group), "params": [p for p in group["params"] if p in mine]}
                        for group in groups
                    ]
                )
                self.state.update(optimizer.state)
                optimizer.state = self.state
            self._chunks.append(_Chunk(list(by_rank), optimizer, first))
        self._placed = len(self.param_groups)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step this rank's share and broadcast it; all ranks then have bitwise equal parameters.

        A collective. On a GPU the current stream waits for the others and the host does not.

        Args:
            closure: called once, before any parameter is stepped.
            kwargs: for the wrapped optimizer's step.

        Returns:
            What closure returned, or None.

        Raises:
            RuntimeError: a rank is gone, or the timeout is over.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works: list[Any] = []
        for chunk in self._chunks:
            if not all(piece.is_current() for piece in chunk.pieces):
                chunk.lay_out()
            for outside, inside in self._pairs(chunk):
                inside.update(_options(outside))
            if chunk.optimizer is not None:
                chunk.optimizer.step(**kwargs)
            works += chunk.send(self._group)
        for chunk in self._chunks:
            for outside, inside in self._pairs(chunk):  # some optimizers count in their groups
                outside.update(_options(inside))
        for work in works:
            work.wait()
        return loss

    def _pairs(self, chunk: _Chunk) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        if chunk.optimizer is None:
            return ()
        return zip(
            self.param_groups[chunk.first_group :], chunk.optimizer.param_groups, strict=False
        )

    # ---- checkpoints -----------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """Return the state of all ranks in the wrapped optimizer's own format: either can load the
        other's, and a world of another size can load it. A collective.

        Args:
            to: the one rank that gets it; on the others `state` is empty. By default all get it.

        Returns:
            state and param_groups; tensors are on the CPU.
        """
        parameters = self._in_order()
        place = {parameter: i for i, parameter in enumerate(parameters)}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"},
             "params": [place[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]  # fmt: skip
        state: dict[int, dict[str, Any]] = {}
        wanted = to is None or to == self._group.rank()
        for rank in range(self._group.size()):
            of_rank = self._broadcast_state(rank, parameters, place, wanted)
            state.update(of_rank if wanted else {})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _broadcast_state(
        self, rank: int, parameters: list[Tensor], place: dict[Tensor, int], wanted: bool
    ) -> dict[int, dict[str, Any]]:
        """Return the state that `rank` keeps, by place of the parameter. Tensors are broadcast one
        at a time, so a device never holds more than one of another rank."""
        outlines: list[Any] = [None]
        if rank == self._group.rank():
            outlines = [
                {
                    place[p]: {name: _outline(p, value) for name, value in values.items()}
                    for p, values in self.state.items()
                }
            ]
        dist.broadcast_object_list(outlines, group=self._group, group_src=rank)
        state: dict[int, dict[str, Any]] = outlines[0]
        for i, values in state.items():
            for name, value in values.items():
                if not isinstance(value, _Outline):
                    continue
                if rank == self._group.rank():
                    tensor = self.state[parameters[i]][name].contiguous()
                else:
                    tensor = torch.empty(
                        value.shape, dtype=value.dtype, device=parameters[i].device
                    )
                as_bytes = tensor.view(-1).view(torch.uint8)
                dist.broadcast(as_bytes, group=self._group, group_src=rank)
                if wanted:
                    values[name] = tensor.to("cpu", copy=True)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, in a world of any size, or what the wrapped optimizer's
        own did; each rank takes its share.

        Raises:
            ValueError: the number of groups, or of parameters in a group, is another.
        """
        saved = state_dict["param_groups"]
        given, valid = ([len(g["params"]) for g in groups] for groups in (saved, self.param_groups))
        if given != valid:
            raise ValueError(
                f"parameters by group: given {given} in the state dict, expected {valid}"
            )
        place = {parameter: i for i, parameter in enumerate(self._in_order())}
        keys = [key for group in saved for key in group["params"]]
        for outside, group in zip(self.param_groups, saved, strict=True):
            outside.update({k: v for k, v in group.items() if k != "params"})
        loaded: dict[Tensor, Any] = {}
        for chunk in self._chunks:
            if chunk.optimizer is None:
                continue
            mine = [keys[place[p]] for g in chunk.optimizer.param_groups for p in g["params"]]
            state = {
                i: state_dict["state"][key]
                for i, key in enumerate(mine)
                if key in state_dict["state"]
            }
            groups, start = [], 0
            for outside, inside in self._pairs(chunk):
                end = start + len(inside["params"])
                groups.append({**_options(outside), "params": list(range(start, end))})
                start = end
            chunk.optimizer.load_state_dict({"state": state, "param_groups": groups})
            loaded.update(chunk.optimizer.state)
        self.state = defaultdict(dict, loaded)
        for chunk in self._chunks:
            if chunk.optimizer is not None:
                chunk.optimizer.state = self.state

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class _Outline:
    """Shape and dtype of a tensor that is sent separately."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _outline(parameter: Tensor, value: Any) -> Any:
    """Return a large tensor's outline, or a copy of anything else, small enough to be pickled."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.device == parameter.device and value.numel() > 1:
        return _Outline(value)
    return value.to("cpu", copy=True)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cut(share: list[Tensor], count: int) -> list[list[Tensor]]:
    """Cut a rank's parameters into `count` runs of about equal bytes; some may be empty."""
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = _bytes(share), 0
    for tensor in share:
        runs[min(count - 1, before * count // max(1, total))].append(tensor)
        before += tensor.nbytes
    return runs
