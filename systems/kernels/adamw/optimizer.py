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

If lr is a tensor on the GPU, each step and each replay copies it on the device, with one small
kernel per group: lr.fill_(1e-4) needs no call. As in torch, load_state_dict replaces this tensor,
so capture again after it.

The graph reads tables that belong to the optimizer. So the optimizer must not be freed before the
graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from systems.kernels.adamw.group import (
    errors_of,
    hyper_values,
    is_stochastic,
    misfits,
    parameter_name,
    state_dtypes,
)
from systems.kernels.adamw.launch import (
    BLOCK_SIZE,
    ParamTensors,
    TableLayout,
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

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")  # as `hyper_values`
# The indices of a parameter in all groups and in its group, its group, and its tensors.
Updated = tuple[int, int, dict[str, Any], ParamTensors]

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
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. lr and betas may be tensors with one
            element, which are read in every step.
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
    _captured: list[Tables | Tensor]  # what captured graphs read, kept alive
    # (group index, device) -> float64 (5,) on the device, and its values on the host.
    _hyper: dict[tuple[int, torch.device], tuple[Tensor, list[float]]]
    _dense_grads: dict[Tensor, Tensor]  # parameter -> contiguous copy of its gradient
    _checked: dict[int, tuple[object, ...]]  # index of a parameter -> addresses and sizes that fit

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
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
            ("_checked", {}),
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
            RuntimeError: if a gradient is sparse, a parameter is not contiguous, or a gradient or
                state tensor has another shape, dtype or device than its parameter requires; nothing
                on that device is updated. After `p.data` has got another shape, delete
                optimizer.state[p]. During the capture of a CUDA graph, also if `prepare` was not
                called before, or if tensors, their addresses or hyperparameters have changed since
                the call of `prepare`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = _capturing()
        for device, params in self._params_by_device(capturing).items():
            if runs_kernels(device):
                self._tables_for(device, params, capturing).launch()
                continue
            self._require_fit(params)
            for index, _, group, tensors in params:
                lr, beta1, beta2, eps, weight_decay = map(float, hyper_values(group))
                adamw_reference(
                    *tensors[:6], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay,
                    stochastic_rounding=tensors.stochastic, seed=group["seed"], index=index,
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
                self._tables_for(device, params, capturing=False).compile()

    @torch.no_grad()
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

    def _params_by_device(self, capturing: bool) -> dict[torch.device, list[Updated]]:
        """Return every parameter that has a gradient, by device.

        First, changed hyperparameters are copied to the devices. Missing optimizer state is
        created. If `capturing`, hyperparameters must not have changed, and all optimizer state must
        exist.
        """
        self._update_hyperparameters(capturing)
        found: dict[torch.device, list[Updated]] = {}
        index = -1
        for place, group in enumerate(self.param_groups):
            hypers: dict[torch.device, Tensor] = {}
            for position, param in enumerate(group["params"]):
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
                hyper = hypers.get(device)
                if hyper is None:
                    hyper = hypers[device] = self._hyper_of(place, device)
                tensors = ParamTensors(
                    param, self._dense_grad(index, param), state["exp_avg"], state["exp_avg_sq"],
                    state.get("master"), state["step"], hyper,
                    _stream(group["seed"], index), is_stochastic(param, group, "master" in state),
                )  # fmt: skip
                found.setdefault(device, []).append((index, position, group, tensors))
        return found

    def _update_hyperparameters(self, capturing: bool) -> None:
        for place, device in self._hyper:
            if place < len(self.param_groups):  # else the group has been removed
                self._copy_hyperparameters(place, device, capturing)

    def _copy_hyperparameters(self, place: int, device: torch.device, capturing: bool) -> None:
        buffer, known = self._hyper[place, device]
        for i, value in enumerate(hyper_values(self.param_groups[place])):
            if isinstance(value, Tensor):
                buffer[i].copy_(value.reshape(()))
                known[i] = math.nan
                if capturing:  # each replay copies it
                    self._captured.append(value)
            elif value != known[i]:
                if capturing:
                    raise RuntimeError(
                        f"{HYPER[i]} of parameter group {place} changed from {known[i]} to {value} "
                        f"and cannot be copied during a capture; {PREPARE}"
                    )
                buffer[i].fill_(value)  # fill_ does not synchronize
                known[i] = value

    def _hyper_of(self, place: int, device: torch.device) -> Tensor:
        if (place, device) not in self._hyper:
            buffer = torch.empty(5, dtype=torch.float64, device=device)
            self._hyper[place, device] = (buffer, [math.nan] * 5)
            self._copy_hyperparameters(place, device, capturing=False)
        return self._hyper[place, device][0]

    def _dense_grad(self, index: int, param: Tensor) -> Tensor:
        """Return the gradient of a parameter as a contiguous tensor.

        This is the gradient itself if it is contiguous. If it is not, it is copied to a contiguous
        tensor, which has the same address in every step.

        Raises:
            RuntimeError: if the gradient is sparse.
        """
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"gradients must be dense, but the gradient of parameter {index} is {grad.layout}"
            )
        if grad.is_contiguous():
            return grad
        old = self._dense_grads.get(param)
        if old is None or not _is(old, grad.shape, grad.dtype, grad.device):
            old = torch.empty_like(grad, memory_format=torch.contiguous_format)
            self._dense_grads[param] = old
        return old.copy_(grad)

    def _tables_for(self, device: torch.device, params: list[Updated], capturing: bool) -> Tables:
        layout = table_layout([updated[-1] for updated in params], self.block_size)
        tables: Tables | None = self._tables.get(device)
        if tables is None or tables.layout != layout:
            if capturing:
                raise RuntimeError(f"{stale_reason(layout, tables)}; {PREPARE}")
            self._require_fit(params, layout)
            tables = self._tables[device] = Tables(layout, device, like=tables)
        if capturing and all(tables is not other for other in self._captured):
            self._captured.append(tables)
        return tables

    def _require_fit(self, params: list[Updated], layout: TableLayout | None = None) -> None:
        """Raise a RuntimeError that names all tensors that do not fit their parameters.

        With a layout, a parameter of which only the gradient has moved is not checked again:
        gradients can move in every step.
        """
        errors: list[str] = []
        for i, (index, position, group, tensors) in enumerate(params):
            param, grad = tensors[:2]
            if layout is not None:
                row = layout.rows[i]
                checked = (row[0], row[2:], layout.sizes[i], layout.variants[i])
                same = self._checked.get(index) == checked
                if same and grad.shape == param.shape and grad.device == param.device:
                    continue
                self._checked[index] = checked
            name, dtypes = parameter_name(index, group, position), state_dtypes(param, group)
            errors += misfits(name, param, tensors.others(), dtypes)
        if errors:
            self._checked.clear()
            raise RuntimeError("; ".join(errors))

    def _state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
            for name, dtype in state_dtypes(param, group).items():
                state[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if "master" in state:
                state["master"].copy_(param)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return state and options as Optimizer.state_dict, with each step as a float64.

        torch.optim.AdamW can then load the state dict, which it could not with an integer.
        """
        given: dict[str, Any] = super().state_dict()
        # The dictionaries are those of the optimizer, and must not change.
        given["state"] = {
            i: {**state, "step": state["step"].double()} if "step" in state else state
            for i, state in given["state"].items()
        }
        return given

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
            for name in ("step", *state_dtypes(param, group)):
                value = given.get(name, param if name == "master" else None)
                found = None if value is None else tuple(torch.as_tensor(value).shape)
                # Old versions of torch have a number as the step, or a tensor with one element.
                valid = [(), (1,)] if name == "step" else [tuple(param.shape)]
                if found not in valid:
                    shape = "no tensor" if found is None else f"shape {found}"
                    errors.append(
                        f"{name} of parameter {saved_id} must have shape {valid[0]}, got {shape}"
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
            shape = torch.Size() if name == "step" else param.shape
            value = torch.as_tensor(given.get(name, param)).reshape(shape)
            tensor = old.get(name)
            if tensor is None or not _is(tensor, shape, dtype, param.device):
                tensor = torch.empty(shape, dtype=dtype, device=param.device)
            new[name] = tensor.copy_(value)
        self.state[param] = new


def _is(tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, device)
