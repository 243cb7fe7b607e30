"""Optimizer wrapper that divides optimizer state and update among the ranks (ZeRO stage 1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5.1. Unlike in ZeRO, a parameter is never split. So the wrapped optimizer can be
any optimizer that updates each parameter independently of the others.

The parameters of each rank are divided into the same number of parts, called chunks. All ranks
update and send their first chunk, then their second chunk, and so on. While one chunk is sent, the
next chunk is updated. Within a chunk, the parameters of a rank are views of one flat tensor. One
in-place broadcast, or one copy from another rank's memory, therefore sends all of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.optim.optimizer import Optimizer, ParamsT

from systems.parallel.buckets import (
    balance,
    dense_like,
    in_memory_order,
    packed_bytes,
    places,
    shaped_as,
)
from systems.parallel.collectives import GroupOf, is_gloo_only, is_wanted
from systems.parallel.peer_ddp import PeerDDP, gradient_is_sharded
from systems.parallel.peer_memory import PeerMemory, can_have_peer_memory, make_peer_memory
from systems.parallel.rank_consistency import check_agreement
from systems.parallel.rank_meetings import Meetings
from systems.parallel.wrapper import refusal_of

# Size of the parameters of a rank that are stepped and sent together (a chunk). It must be large
# enough to use the full bandwidth: on two H200s, an all-reduce nearly does so from 100 MB on. It
# must also be small, because the last chunk is sent after all steps are done.
CHUNK_BYTES = 256 * 10**6
MAX_CHUNKS = 16  # chunks are larger if there are more; each needs two channels of peer memory
NOT_OPTIONS = ("params", "param_names")  # keys of a parameter group that are not options


class _Piece:
    """Parameters that `owner` updates and sends, on one device, side by side in a uint8 tensor."""

    def __init__(self, owner: int, parameters: list[Tensor]):
        self.owner, self.parameters = owner, parameters
        self.nbytes = packed_bytes(parameters)

    def place(self, memory: Tensor) -> None:
        """Move the parameters into a tensor of `nbytes`. `parameter.data` is a view of it then."""
        self.memory, self._views = memory, list[Tensor]()
        for parameter, place in zip(self.parameters, places(memory, self.parameters), strict=True):
            view = shaped_as(place, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views.append(view)

    def is_current(self) -> bool:
        """Return False if a parameter was moved or cast, for example by `module.to(...)`."""
        pairs = zip(self.parameters, self._views, strict=True)
        return all(p.data_ptr() == v.data_ptr() and p.dtype == v.dtype for p, v in pairs)


class _Chunk:
    """Some parameters of every rank, which the ranks update and send together.

    `optimizer` is None if this rank owns no parameter in the chunk. `first_group` is the index in
    `ShardedOptimizer.param_groups` of its first parameter group.
    """

    def __init__(self, by_rank: list[list[Tensor]], optimizer: Optimizer | None, first_group: int):
        self.by_rank = by_rank
        self.optimizer, self.first_group = optimizer, first_group

    def place(self, memory: PeerMemory | None, start: int, index: int) -> int:
        """Move the parameters to new memory, or from byte `start` on into the buffer of this rank.

        `index` is the number of the chunk, which decides its channels. Returns the end in bytes.
        """
        self._memory, self._start = memory, start
        self._written, self._read = 2 * index, 2 * index + 1
        self.pieces = list[_Piece]()
        for rank, parameters in enumerate(self.by_rank):
            for device in dict.fromkeys(parameter.device for parameter in parameters):
                piece = _Piece(rank, [p for p in parameters if p.device == device])
                end = start + piece.nbytes
                if memory is None:
                    piece.place(torch.empty(piece.nbytes, dtype=torch.uint8, device=device))
                else:
                    piece.place(memory.buffers[memory.rank][start:end])
                self.pieces.append(piece)
                start = end
        return start

    def is_current(self) -> bool:
        return all(piece.is_current() for piece in self.pieces)

    def send(self, group: dist.ProcessGroup) -> list[Any]:
        """Start to send the parameters of each rank; `wait()` of all results completes them."""
        if self._memory is not None:
            self._memory.signal(self._written)
            self._copying = self._memory.aside(self._copy_from_peers)
            return [self]
        pieces = [piece for piece in self.pieces if piece.nbytes]
        device = pieces[0].memory.device if pieces else torch.device("cpu")
        # In one NCCL group, the broadcasts of all ranks run at the same time and use both
        # directions of the links. One after the other, they would use one.
        together = (
            _coalescing_manager(group, device, async_ops=True)
            if device.type == "cuda" and not is_gloo_only(group) and pieces
            else nullcontext()
        )
        with together as manager:
            works = [
                dist.broadcast(piece.memory, group=group, group_src=piece.owner, async_op=True)
                for piece in pieces
            ]
        return works if manager is None else [manager]

    def _copy_from_peers(self) -> None:
        memory = self._memory
        assert memory is not None
        mine = memory.buffers[memory.rank]
        for peer in memory.peers:
            memory.wait(peer, self._written)
            start = self._start
            for piece in self.pieces:
                end = start + piece.nbytes
                if piece.owner == peer:
                    mine[start:end].copy_(memory.buffers[peer][start:end])
                start = end
        memory.signal(self._read)

    def wait(self) -> None:
        """Wait until the others' parameters are copied, and until the others have read these."""
        assert self._memory is not None
        self._copying.wait()
        self._memory.wait_for_all(self._read)


class ShardedOptimizer(Optimizer):
    """Optimizer wrapper that divides state and update of another optimizer among the ranks.

    Each rank owns parameters of about the same total size: it updates them and stores their
    optimizer state, which `state` contains. `param_groups` contains all parameters, so learning
    rate schedulers work. The constructor moves each parameter to new memory, so `param.data`
    changes.

    Args:
        params: parameters or groups of them, the same on all ranks, with the same values.
        optimizer_cls: class of the wrapped optimizer, made with `kwargs`. A rank may have several,
            each for a part of its parameters. So it must update each parameter independently,
            unlike LBFGS.
        peer_memory: whether the ranks of a host copy updated parameters from each other's memory,
            on GPUs by copy engines, instead of broadcasting them (see `peer_memory`). Where they
            have no such memory, they broadcast, with a warning.
        shard_gradients: the `PeerDDP` whose trainable parameters these are, all of them. Then each
            rank averages only the gradients of the parameters that it owns, and frees the others
            during backward, as ZeRO stage 2. This halves the communication in backward. `PeerDDP`
            tells how to clip gradients. Where it has no peer memory, all ranks have all gradients.

    Raises:
        ValueError: on all ranks, if parameters differ across ranks, have the same memory, are
            refused by optimizer_cls, or are shards of an FSDP wrapper, whose optimizer state is
            sharded already; the message names the rank and the reason. Also if the parameters are
            others than those of shard_gradients, or their gradients are sharded for another
            optimizer.
        RuntimeError: if there is no process group.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        peer_memory: bool = False,
        shard_gradients: PeerDDP | None = None,
        **kwargs: Any,
    ):
        self._group_of, self._peer_memory = GroupOf(process_group), peer_memory
        self._shard_gradients = shard_gradients
        self._make: Any = lambda groups: optimizer_cls(groups, **kwargs)
        self._loads = [0] * self._group.size()
        self._chunks: list[_Chunk] = []
        self._known: list[list[int]] = []  # parameters of the groups that have owners, by id
        self._made = False
        super().__init__(params, dict(self._make([{"params": []}]).defaults))
        self._made = True
        self._meetings = Meetings(str(self._share_out()))

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._group_of()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, the same on all ranks.

        Raises:
            RuntimeError: with shard_gradients, whose wrapper knows the owners of all parameters.
        """
        if self._made and self._shard_gradients is not None:
            raise RuntimeError(
                "with shard_gradients, give the ShardedOptimizer all groups when you make it"
            )
        super().add_param_group(param_group)
        if self._made:  # the constructor distributes all of its groups together
            try:
                self._share_out()
            except Exception:
                self.param_groups.pop()
                raise

    def _share_out(self) -> int:
        """Give owners to the parameters of new groups. Return the number of the agreement."""
        first = len(self._known)
        groups = self.param_groups[first:]
        named = []
        for g, group in enumerate(groups, first):
            numbers = [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
            named += list(zip(group.get("param_names", numbers), group["params"], strict=True))
        number = check_agreement(named, self._group, self._refusal(named))
        parameters = [parameter for _, parameter in named]
        wrapper = self._shard_gradients
        loads = self._loads.copy()
        owners = balance([parameter.nbytes for parameter in parameters], loads)
        shares: list[list[Tensor]] = [[] for _ in loads]
        for parameter, owner in zip(parameters, owners, strict=True):
            shares[owner].append(parameter)
        count = min(max(1, -(-max(map(_bytes, shares)) // CHUNK_BYTES)), MAX_CHUNKS)
        chunks = list(zip(*(_cut(share, count) for share in shares), strict=True))
        own_shares = [by_rank[self._group.rank()] for by_rank in chunks]
        optimizers = self._make_optimizers(own_shares, groups)
        made = [
            _Chunk(list(by_rank), optimizer, first)
            for by_rank, optimizer in zip(chunks, optimizers, strict=True)
        ]
        self._lay_out(made)
        self._chunks += made
        for optimizer in filter(None, optimizers):
            self.state.update(optimizer.state)
        if wrapper is not None:
            wrapper.shard_gradients(dict(zip(parameters, owners, strict=True)))
        self._known, self._loads = self._ids(), loads
        return number

    def _refusal(self, named: list[tuple[str, Tensor]]) -> str | None:
        """Return why parameters cannot be used, None if they can."""
        wrapper, parameters = self._shard_gradients, [parameter for _, parameter in named]
        if wrapper is not None and not (
            isinstance(wrapper, PeerDDP)
            and wrapper._group is self._group
            and set(wrapper.parameters()).issuperset(parameters)
        ):
            return "shard_gradients must be the PeerDDP with these parameters and this group"
        first: dict[int, str] = {}  # names by address
        for name, parameter in named:
            if wrapper is None and gradient_is_sharded(parameter):
                return f"the gradient of {name} is sharded for another optimizer; pass its PeerDDP"
            address = parameter.data_ptr()
            if address in first:
                return (
                    f"{name} has the memory of {first[address]}, and the optimizer moves each; tie "
                    "modules by one parameter, and give it once"
                )
            if parameter.numel():
                first[address] = name
        return refusal_of(named, sharded_only=True)

    def _make_optimizers(
        self, shares: list[list[Tensor]], groups: list[dict[str, Any]]
    ) -> list[Optimizer | None]:
        """Make an optimizer for each share of this rank. If a rank cannot, all raise an error."""
        optimizers: list[Optimizer | None] = []
        error = None
        try:
            for share in shares:
                mine = set(share)
                of_groups = [
                    {**_options(group), "params": [p for p in group["params"] if p in mine]}
                    for group in groups
                ]
                optimizers.append(self._make(of_groups) if mine else None)
        except Exception as caught:
            error = caught
        refusal = None if error is None else f"{type(error).__name__}: {error}"
        try:
            check_agreement((), self._group, refusal)
        except ValueError as told:
            raise told from error
        return optimizers

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    @torch.no_grad()
    def _lay_out(self, chunks: Sequence[_Chunk]) -> None:
        """Move the parameters of chunks to new memory."""
        shares = [share for chunk in chunks for share in chunk.by_rank]
        nbytes, memory, start = sum(map(packed_bytes, shares)), None, 0
        devices = {p.device for share in shares for p in share}
        if self._peer_memory and nbytes and can_have_peer_memory(self._group, devices):
            memory = make_peer_memory(self._group, devices.pop(), nbytes)
        for index, chunk in enumerate(chunks):
            start = chunk.place(memory, start, index)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Update the parameters that this rank owns, and send them to the other ranks.

        All ranks must call this method. Afterwards, all ranks have bitwise equal parameters. On a
        GPU, the current stream waits for the other ranks and the host does not block. The closure
        is called once, before any parameter is updated, and its result is returned.

        Raises:
            RuntimeError: if a rank has exited, the timeout has expired, the groups have other
                parameters than were added, or a parameter was moved or cast since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ids() != self._known:
            raise RuntimeError(
                "parameters must not be added to, moved in or removed from param_groups; use "
                "add_param_group"
            )
        if not all(chunk.is_current() for chunk in self._chunks):
            raise RuntimeError(
                "a parameter was moved, cast or given other memory after the ShardedOptimizer was "
                "made; make it after model.to(...) and the like, and set values by copy_()"
            )
        works: list[Any] = []
        try:
            for chunk in self._chunks:
                for outside, inside in self._pairs(chunk):
                    _set_options(inside, outside)
                if chunk.optimizer is not None:
                    chunk.optimizer.state = self.state
                    chunk.optimizer.step(**kwargs)
                works += chunk.send(self._group)
        except Exception:  # perhaps on all ranks, which may go on
            with suppress(RuntimeError):
                for work in works:
                    work.wait()
            raise
        for chunk in self._chunks:
            # A step may change values in a parameter group, for example a counter.
            for outside, inside in self._pairs(chunk):
                if inside["params"]:
                    _set_options(outside, inside)
        for work in works:
            work.wait()
        if self._shard_gradients is not None:
            self._shard_gradients.note_step()
        return loss

    def _pairs(self, chunk: _Chunk) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        if chunk.optimizer is None:
            return ()
        groups = self.param_groups[chunk.first_group :]
        return zip(groups, chunk.optimizer.param_groups, strict=False)

    # ---- checkpoints -----------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """Return the state of all ranks, in the format of the wrapped optimizer.

        The wrapped optimizer without sharding can load it, and so can a ShardedOptimizer with any
        number of ranks. All ranks must call this method. The tensors are on the CPU. If `to` is a
        rank, "state" is empty on the others.

        Raises:
            ValueError: if `to` is no rank of the process group.
            TypeError: if `state` has a key that is no parameter.
            RuntimeError: if a rank does not call it within the timeout of the process group. A
                warning names the missing ranks after 5 s.
        """
        wanted = is_wanted(to, self._group)
        if others := [key for key in self.state if not isinstance(key, Tensor)]:
            raise TypeError(f"state must have parameters as keys, got {others[0]!r}")
        self._meetings.meet(self._group, "state_dict() of the optimizer")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        parameters = self._in_order()
        place = {parameter: i for i, parameter in enumerate(parameters)}
        groups = [
            {**group, "params": [place[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        state: dict[int, dict[str, Any]] = {}
        for rank in range(self._group.size()):
            of_rank, options = self._broadcast_state(rank, parameters, place, wanted)
            state.update(of_rank if wanted else {})
            for index, values in options.items():
                groups[index].update(values)
        whole = {"state": dict(sorted(state.items())), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            whole = after(self, whole) or whole
        return whole

    def _broadcast_state(
        self, rank: int, parameters: list[Tensor], place: dict[Tensor, int], wanted: bool
    ) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """Broadcast and return the state of the parameters that `rank` owns, and the options.

        The state is by index in `parameters`, on the CPU, and not complete if it is not wanted. The
        options, by index of the parameter group, are those that a step may change. Tensors are sent
        one at a time, so that a device never holds more than one state tensor of another rank.
        """
        outlines: list[Any] = [None]
        own: dict[int, dict[str, Any]] = {}
        if rank == self._group.rank():
            own = {place[parameter]: values for parameter, values in self._own_states()}
            states = {
                i: {name: _outline(parameters[i], value) for name, value in values.items()}
                for i, values in own.items()
            }
            options = {
                index: _options(self.param_groups[index])
                for chunk in self._chunks
                for index, (_, inside) in enumerate(self._pairs(chunk), chunk.first_group)
                if inside["params"]
            }
            outlines = [(states, options)]
        dist.broadcast_object_list(outlines, group=self._group, group_src=rank)
        state, options = outlines[0]
        for i, values in state.items():
            for name, value in values.items():
                if not (isinstance(value, Tensor) and value.is_meta):
                    continue
                if rank == self._group.rank():
                    tensor = own[i][name]
                    tensor = dense_like(tensor, tensor)
                else:
                    tensor = torch.empty_like(value, device=parameters[i].device)
                as_bytes = in_memory_order(tensor).view(torch.uint8)
                dist.broadcast(as_bytes, group=self._group, group_src=rank)
                if wanted:
                    values[name] = tensor.to("cpu", copy=True)
        return state, options

    def _own_states(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        """Yield the parameters of this rank and their state, as the wrapped optimizer saves it."""
        for chunk in self._chunks:
            if chunk.optimizer is None:
                continue
            own = [p for group in chunk.optimizer.param_groups for p in group["params"]]
            # not those that somebody only looked for
            states = {p: self.state[p] for p in own if self.state.get(p)}
            chunk.optimizer.state = defaultdict(dict, states)
            for i, values in chunk.optimizer.state_dict()["state"].items():
                yield own[i], values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the parameters that this rank owns.

        The state dict is of a ShardedOptimizer with any number of ranks, or of the wrapped
        optimizer.

        Raises:
            ValueError: if the state dict has another number of parameter groups than this
                optimizer, or a group has another number of parameters.
        """
        state_dict = state_dict.copy()  # shallow, as torch's optimizers do for their hooks
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        given, valid = ([len(g["params"]) for g in groups] for groups in (saved, self.param_groups))
        if given != valid:
            raise ValueError(f"groups of the state dict must have {valid} parameters, got {given}")
        place = {parameter: i for i, parameter in enumerate(self._in_order())}
        keys = [key for group in saved for key in group["params"]]
        # What the wrapped optimizer makes of the options, also on ranks without parameters
        whole = self._make([{**_options(group), "params": []} for group in self.param_groups])
        options = [{**group, "params": []} for group in saved]
        whole.load_state_dict({"state": {}, "param_groups": options})
        for outside, group in zip(self.param_groups, whole.param_groups, strict=True):
            _set_options(outside, group)
            if "param_names" in group:
                outside["param_names"] = group["param_names"]
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
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled; load its state_dict() into another one"
        )

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _outline(parameter: Tensor, value: Any) -> Any:
    """Return what is sent as a Python object for one value of the optimizer state.

    A tensor with several elements on the device of `parameter` gives one on the device "meta",
    because `_broadcast_state` broadcasts it separately. Any other value is copied to the CPU.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.device == parameter.device and value.numel() > 1:
        return torch.empty_like(value, device="meta")
    return value.to("cpu", copy=True)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def _set_options(group: dict[str, Any], other: dict[str, Any]) -> None:
    """Give a group the options of another."""
    for name in _options(group).keys() - other.keys():
        del group[name]
    group.update(_options(other))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cut(share: list[Tensor], count: int) -> list[list[Tensor]]:
    """Split parameters into `count` lists of about equal bytes, some of which may be empty."""
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = _bytes(share), 0
    for tensor in share:
        runs[min(count - 1, before * count // max(1, total))].append(tensor)
        before += tensor.nbytes
    return runs
