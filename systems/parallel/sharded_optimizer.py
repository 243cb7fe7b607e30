"""An optimizer whose state is spread over the ranks: each keeps, and steps, its share of the
parameters, and sends what it changed to the others.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1, with whole parameters for shares, so that any optimizer can be wrapped that treats each
parameter by itself.

Parameters that travel together are views of one tensor, so that one transfer in place carries them
all: no copies, and no memory beside the parameters. A share is cut into chunks; while one chunk is
on its way the next is stepped, and the chunks of all ranks travel at the same time.
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

from systems.parallel.agreement import check_agreement
from systems.parallel.collectives import group_or_world

# Of a rank's share, stepped and sent at once: large enough for the network's full rate, which an
# all-reduce on two H200s nears from 100 MB on, small enough that few are left when all are stepped.
CHUNK_BYTES = 256 * 10**6
ALIGNMENT = 256  # bytes; vectorised kernels and NCCL want 16, torch's allocator gives more
NOT_OPTIONS = ("params", "param_names")  # of a parameter group


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The rank of each parameter: the largest goes first, each to the rank with the least bytes.

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
    """Parameters of one rank, dtype and device, laid end to end in one tensor."""

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

    def holds_them(self) -> bool:
        """Whether the parameters are where they were put: `module.to(...)` moves them."""
        return all(p.data_ptr() == v.data_ptr() and p.dtype == v.dtype for p, v in self.views)


class _Chunk:
    """What is stepped and sent at once: some parameters of every rank, and who steps mine."""

    def __init__(self, by_rank: list[list[Tensor]], optimizer: Optimizer | None, first_group: int):
        self.by_rank = by_rank
        self.optimizer = optimizer  # None: I have nothing in this chunk
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
        """Begin to overwrite each piece by its owner's; returns what to wait for."""
        pieces = [piece for piece in self.pieces if piece.flat.numel()]
        device = pieces[0].flat.device if pieces else torch.device("cpu")
        # In one NCCL group broadcasts from all ranks run side by side, so that every link carries
        # data both ways; one after the other they would leave half of it idle.
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
    """`optimizer_cls(params, **kwargs)`, its state and its work spread over the ranks.

    Parameters go to ranks whole, so that each rank has about the same number of bytes. `state` is
    this rank's part. `param_groups`, with all parameters, is as without sharding, so learning rate
    schedulers work. Parameters get new memory, `param.data`, in the order of their shares.

    Args:
        params: as any optimizer takes them; the same on every rank, and with the same values.
        optimizer_cls: an optimizer that treats each parameter by itself (not LBFGS), or at least
            what is given to it together: parameters of one rank, some at a time.
        process_group: all ranks by default.
        kwargs: the optimizer's.

    Raises:
        ValueError: parameters differ across ranks; says on every rank which rank differs and where.
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
        self._whole = False
        super().__init__(params, dict(self._make([{"params": []}]).defaults))
        self._whole = True
        self._share_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. A collective: every rank adds the same."""
        super().add_param_group(param_group)
        if self._whole:  # those of the constructor are shared out together
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
        """Step this rank's share; all ranks then have all parameters, bit for bit the same.

        A collective. On a GPU the current stream waits for the others and the host does not.

        Args:
            closure: called once, before anything is stepped.
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
            if not all(piece.holds_them() for piece in chunk.pieces):
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
        """The state of all ranks, in the form of the wrapped optimizer's own: either loads the
        other's, and a world of another size loads it, too. A collective.

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
            told = self._told_by(rank, parameters, place, wanted)
            state.update(told if wanted else {})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _told_by(
        self, rank: int, parameters: list[Tensor], place: dict[Tensor, int], wanted: bool
    ) -> dict[int, dict[str, Any]]:
        """The state that a rank keeps, by place of the parameter; one tensor at a time travels, so
        no device ever holds more than one that is not its own."""
        told: list[Any] = [None]
        if rank == self._group.rank():
            told = [
                {
                    place[p]: {name: _outline(p, value) for name, value in values.items()}
                    for p, values in self.state.items()
                }
            ]
        dist.broadcast_object_list(told, group=self._group, group_src=rank)
        whole: dict[int, dict[str, Any]] = told[0]
        for i, values in whole.items():
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
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, of any world size, or the wrapped optimizer's own returned; each
        rank takes its share.

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
    """Of a tensor that follows by itself."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _outline(parameter: Tensor, value: Any) -> Any:
    """A large tensor's outline; a copy of anything else, small enough to be told at once."""
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
    """A rank's parameters in `count` runs of about as many bytes each; some may be empty."""
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = _bytes(share), 0
    for tensor in share:
        runs[min(count - 1, before * count // max(1, total))].append(tensor)
        before += tensor.nbytes
    return runs
