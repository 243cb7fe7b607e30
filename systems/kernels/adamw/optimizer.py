"""FusedAdamW: AdamW that updates all parameters with two kernel launches.

Two launches are enough for parameters on one device with the same dtypes (of parameters, gradients
and state), the same rounding and the same alignment. Each further combination of dtypes, rounding
and alignment takes one more launch.

    optimizer = FusedAdamW(model.parameters(), lr=3e-4)
    loss.backward()
    optimizer.step()

Typical dtypes, and the minimum memory traffic of a step. p is the parameter, g the gradient, m and
v are the moments, and w is the master weight:

    param     state     master    read             written          bytes per parameter
    float32   float32   -         p, g, m, v       p, m, v          28
    bfloat16  float32   float32   g, w, m, v       w, m, v, p       28
    bfloat16  bfloat16  -         p, g, m, v       p, m, v          14

In the last case, tensors are rounded stochastically. Rounding to nearest would lose any update of
less than half a unit in the last place, which is 2^-9 to 2^-8 of the value. For example, with
beta2 = 0.999, a step reduces exp_avg_sq by at most 0.001 of its value. With rounding to nearest,
exp_avg_sq could then only grow.

The step can be captured in a CUDA graph. Gradients must keep their addresses:

    loss.backward()                              # creates the gradients
    optimizer.prepare()                          # creates state and tables, compiles the kernels
    with torch.cuda.graph(graph):
        optimizer.zero_grad(set_to_none=False)
        model(x).sum().backward()
        optimizer.step()
    graph.replay()                               # counts as a step
    optimizer.param_groups[0]["lr"] = 1e-4
    optimizer.update_hyperparameters()           # the next replay uses the new lr

The graph reads tables that belong to the optimizer. So the optimizer must not be freed before the
graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from systems.kernels.adamw.group import errors_of, hyper_values, is_stochastic, state_dtypes
from systems.kernels.adamw.launch import (
    BLOCK_SIZE,
    ParamTensors,
    Tables,
    stale_reason,
    table_layout,
)
from systems.kernels.adamw.reference import adamw_reference, stream
from systems.kernels.device import runs_kernels

# Keys may be Tensors or Parameters. Mapping is invariant in its key type, so this is a TypeVar.
Owner = TypeVar("Owner", bound=Tensor)

PREPARE = (
    "call FusedAdamW.prepare() before the capture, when gradients exist, and keep the gradients at "
    "their addresses with zero_grad(set_to_none=False)"
)

_stream = functools.lru_cache(maxsize=65_536)(stream)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class FusedAdamW(Optimizer):
    """AdamW with fused Triton kernels, with the same update as torch.optim.AdamW.

    Source: Loshchilov & Hutter 2019, algorithm 2. The state of a parameter is

        step                   0-dimensional int64
        exp_avg, exp_avg_sq    moments, in state_dtype
        master                 master weights in float32, if any

    Master weights are initialized from the parameter or by `load_master`.

    A parameter without a gradient is skipped and its step does not advance, as in torch.

    On a CPU, `adamw_reference` computes the step. With TRITON_INTERPRET=1, the kernels do.

    Args:
        params: contiguous float32, bfloat16 or float16 tensors, or parameter groups. All options
            can be set per group.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, but lr must be a number.
        state_dtype: dtype of exp_avg and exp_avg_sq, float32 or bfloat16.
        master_weights: whether 16-bit parameters have float32 master weights, which float32 ones
            never have. None means that they do if state_dtype is float32.
        stochastic_rounding: whether to round bfloat16 tensors without a float32 copy (moments, and
            parameters without master weights) stochastically. None means True. float16 tensors are
            always rounded to nearest.
        seed: of the random bits, in [0, 2^32). They are a hash of the seed, the step and the
            indices of the parameter and the element, use no random generator and are the same on
            every device.

    Raises:
        ValueError: if any option or parameter is invalid; the message names all of them.
    """

    block_size: int = BLOCK_SIZE  # number of elements per program; may be set on an instance

    _tables: dict[torch.device, Tables]  # tables of the last step
    _captured: list[Tables]  # tables read by captured graphs, kept alive
    # (group index, device) -> float64 (5,) on the device, and its values on the host.
    _hyper: dict[tuple[int, torch.device], tuple[Tensor, list[float]]]
    _dense_grads: dict[Tensor, Tensor]  # parameter -> contiguous copy of its gradient

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool | None = None,
        stochastic_rounding: bool | None = None,
        seed: int = 0,
    ) -> None:
        self._init_caches()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def _init_caches(self) -> None:
        for name, empty in (
            ("_tables", {}),
            ("_captured", []),
            ("_hyper", {}),
            ("_dense_grads", {}),
        ):
            self.__dict__.setdefault(name, empty)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by pickle, deepcopy and load_state_dict. Groups from torch.optim.AdamW lack
        # options.
        super().__setstate__(state)
        self._init_caches()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ValueError: if any option or parameter is invalid; the message names all of them, and
                the group is not added.
        """
        super().add_param_group(param_group)
        errors = errors_of(self.param_groups[-1])
        if errors:
            self.param_groups.pop()
            raise ValueError("; ".join(errors))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and return the result of closure.

        Raises:
            RuntimeError: if a gradient is sparse or a parameter is not contiguous. During the
                capture of a CUDA graph, also if `prepare` was not called before, or if tensors,
                their addresses or hyperparameters have changed since the call of `prepare`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = _capturing()
        for device, params in self._params_by_device(capturing).items():
            if runs_kernels(device):
                self._tables_for(device, [tensors for _, _, tensors in params], capturing).launch()
                continue
            for index, group, tensors in params:
                adamw_reference(
                    *tensors[:6], lr=group["lr"], betas=group["betas"], eps=group["eps"],
                    weight_decay=group["weight_decay"], stochastic_rounding=tensors.stochastic,
                    seed=group["seed"], index=index,
                )  # fmt: skip
        return loss

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare the optimizer so that `step` can be captured in a CUDA graph.

        The optimizer state is created, the addresses of all tensors are copied to the device, and
        the kernels are compiled. No parameter changes. Call this method before the capture,
        when all gradients exist and will keep their addresses. Call it on the stream of the
        capture, or on a stream that the capture waits for (torch.cuda.graph waits for all streams).

        Raises:
            RuntimeError: if it is called during a capture.
        """
        if _capturing():
            raise RuntimeError(
                "FusedAdamW.prepare() must be called before a capture, not during it"
            )
        for device, params in self._params_by_device(capturing=False).items():
            if runs_kernels(device):
                self._tables_for(
                    device, [tensors for _, _, tensors in params], capturing=False
                ).compile()

    def update_hyperparameters(self) -> None:
        """Copy lr, betas, eps and weight_decay from `param_groups` to the device.

        A replay of a CUDA graph with a captured `step` does not copy these hyperparameters. If they
        have changed, call this method before the next replay. A `step` that is not captured copies
        them itself. The copy runs on the current stream.

        Raises:
            RuntimeError: if it is called during the capture of a CUDA graph.
        """
        if _capturing():
            raise RuntimeError(
                "FusedAdamW.update_hyperparameters() must not be called during a capture, because "
                "every replay would restore the captured values; call it between replays"
            )
        self._update_hyperparameters(capturing=False)

    def _params_by_device(
        self, capturing: bool
    ) -> dict[torch.device, list[tuple[int, dict[str, Any], ParamTensors]]]:
        """Return the index, group and tensors of every parameter that has a gradient, by device.

        First, changed hyperparameters are copied to the devices. Missing optimizer state is
        created. If `capturing`, hyperparameters must not have changed, and all optimizer state must
        exist.
        """
        self._update_hyperparameters(capturing)
        found: dict[torch.device, list[tuple[int, dict[str, Any], ParamTensors]]] = {}
        index = -1
        for place, group in enumerate(self.param_groups):
            for param in group["params"]:
                index += 1
                if param.grad is None:
                    continue
                device = param.device
                if capturing and not (self.state.get(param) and (place, device) in self._hyper):
                    raise RuntimeError(
                        f"parameter {index} of shape {tuple(param.shape)} has no state on the "
                        f"device; {PREPARE}"
                    )
                state = self._state(param, group)
                tensors = ParamTensors(
                    param, self._dense_grad(index, param), state["exp_avg"], state["exp_avg_sq"],
                    state.get("master"), state["step"], self._hyper_of(place, device),
                    _stream(group["seed"], index), is_stochastic(param, group, "master" in state),
                )  # fmt: skip
                found.setdefault(device, []).append((index, group, tensors))
        return found

    def _update_hyperparameters(self, capturing: bool) -> None:
        for (place, _), (buffer, known) in self._hyper.items():
            values = hyper_values(self.param_groups[place])
            if values == known:
                continue
            if capturing:
                raise RuntimeError(
                    f"hyperparameters (lr, beta1, beta2, eps, weight_decay) of parameter "
                    f"group {place} changed from {known} to {values} and cannot be copied during a "
                    f"capture; {PREPARE}"
                )
            for i, value in enumerate(values):
                if value != known[i]:
                    buffer[i].fill_(value)  # fill_ does not synchronize
            known[:] = values

    def _hyper_of(self, place: int, device: torch.device) -> Tensor:
        if (place, device) not in self._hyper:
            values = hyper_values(self.param_groups[place])
            buffer = torch.tensor(values, dtype=torch.float64, device=device)
            self._hyper[place, device] = (buffer, values)
        return self._hyper[place, device][0]

    def _dense_grad(self, index: int, param: Tensor) -> Tensor:
        """Return the gradient of a parameter as a contiguous tensor.

        This is the gradient itself if it is contiguous. If it is not, it is copied to a contiguous
        tensor, which has the same address in every step.

        Raises:
            RuntimeError: if the gradient is sparse or the parameter is not contiguous.
        """
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"gradients must be dense, but the gradient of parameter {index} is {grad.layout}"
            )
        if not param.is_contiguous():  # the parameter has changed since its group was added
            raise RuntimeError(
                f"parameters must be contiguous, but parameter {index} of shape "
                f"{tuple(param.shape)} has strides {param.stride()}"
            )
        if grad.is_contiguous():
            return grad
        if param not in self._dense_grads:
            self._dense_grads[param] = torch.empty_like(grad, memory_format=torch.contiguous_format)
        return self._dense_grads[param].copy_(grad)

    def _tables_for(
        self, device: torch.device, params: list[ParamTensors], capturing: bool
    ) -> Tables:
        layout = table_layout(params, self.block_size)
        tables: Tables | None = self._tables.get(device)
        if tables is None or tables.layout != layout:
            if capturing:
                raise RuntimeError(f"{stale_reason(layout, tables)}; {PREPARE}")
            tables = self._tables[device] = Tables(layout, device, like=tables)
        if capturing and all(tables is not other for other in self._captured):
            self._captured.append(tables)
        return tables

    def _state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
            for name, dtype in state_dtypes(param, group).items():
                state[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if "master" in state:
                state["master"].copy_(param)
        return state

    @torch.no_grad()
    def load_master(self, masters: Mapping[Owner, Tensor]) -> None:
        """Set master weights to the float32 values from which 16-bit parameters were cast.

        The parameters are set to the same values, rounded to nearest. The masters, float32 with the
        shapes of their parameters, are copied.

        Raises:
            ValueError: if a key is not a parameter of this optimizer or has no master weights, or
                if a value has another shape or dtype. The message names all errors, and nothing is
                changed.
        """
        groups = {param: group for group in self.param_groups for param in group["params"]}
        errors = []
        for param, value in masters.items():
            name = f"{param.dtype} tensor of shape {tuple(param.shape)}"
            if param not in groups:
                errors.append(f"a {name} is not a parameter of this optimizer")
            elif "master" not in state_dtypes(param, groups[param]):
                errors.append(f"a {name} has no master weights with the options of its group")
            elif value.shape != param.shape or value.dtype != torch.float32:
                errors.append(
                    f"master weights of a {name} must be float32 of the same shape, got "
                    f"{value.dtype} of shape {tuple(value.shape)}"
                )
        if errors:
            raise ValueError("; ".join(errors))
        for param, value in masters.items():
            self._state(param, groups[param])["master"].copy_(value)
            param.copy_(value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options from a state dict of FusedAdamW or torch.optim.AdamW.

        State tensors are cast to the dtypes that the loaded options require. (torch would cast them
        to the dtype of the parameter.) If a state tensor of the right dtype already exists, the
        values are copied into it, so a captured graph continues with the loaded state. If the state
        dict has no master weights, they are initialized from the parameters, so load the model
        first.

        Raises:
            ValueError: if any option or tensor is invalid; the message names all of them, and
                nothing is changed.
        """
        saved: dict[Any, dict[str, Any]] = {}
        ids: list[Any] = []

        def withhold_state(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            saved.update(given["state"])
            ids.extend(i for group in given["param_groups"] for i in group["params"])
            return {**given, "state": {}}

        before: dict[str, Any] = {"state": self.state, "param_groups": self.param_groups}
        # This hook runs last, so it receives the state dict after all other hooks have changed it.
        handle = self.register_load_state_dict_pre_hook(withhold_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        errors = [error for group in self.param_groups for error in errors_of(group)]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        loaded = []
        for saved_id, (param, group) in zip(ids, owners, strict=True):
            if not saved.get(saved_id):
                continue
            given = saved[saved_id]
            for name in state_dtypes(param, group):
                value = given.get(name, param if name == "master" else None)
                if value is None or value.shape != param.shape:
                    shape = "no tensor" if value is None else f"shape {tuple(value.shape)}"
                    errors.append(
                        f"{name} of parameter {saved_id} must have shape {tuple(param.shape)}, "
                        f"got {shape}"
                    )
            loaded.append((param, group, given))
        if errors:
            self.__setstate__(before)
            raise ValueError("; ".join(errors))
        for param, group, given in loaded:
            self._restore(param, group, given, before["state"].get(param, {}))

    def _restore(
        self,
        param: Tensor,
        group: dict[str, Any],
        given: dict[str, Any],
        old: dict[str, Tensor],
    ) -> None:
        new: dict[str, Tensor] = {}
        for name, dtype in {"step": torch.int64, **state_dtypes(param, group)}.items():
            value = torch.as_tensor(given.get(name, param))
            tensor = old.get(name)
            if tensor is None or tensor.dtype != dtype:
                tensor = torch.empty(value.shape, dtype=dtype, device=param.device)
            new[name] = tensor.copy_(value)
        self.state[param] = new
