"""FusedAdamW: AdamW that updates all parameters with two kernel launches.

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
so capture again after it. The graph reads tables of the optimizer, which must outlive the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from systems.kernels.adamw.reference import Operands, adamw_reference, stream
from systems.kernels.device import runs_kernels

if TYPE_CHECKING:
    from systems.kernels.adamw.kernel import Tables

Group = dict[str, Any]  # an element of `param_groups`
Form = tuple[torch.dtype, torch.Size]  # of a tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16)
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")  # order of `Operands.hyper`
PREPARE = (
    "call FusedAdamW.prepare() before the capture, when gradients exist, and keep the gradients at "
    "their addresses with zero_grad(set_to_none=False)"
)


class FusedAdamW(Optimizer):
    """AdamW with fused Triton kernels, with the same update as torch.optim.AdamW.

    Source: Loshchilov & Hutter 2019, algorithm 2. The state of a parameter is

        step                   0-dimensional int64
        exp_avg, exp_avg_sq    moments, in state_dtype
        master                 master weights in float32, if any; `load_master` sets them

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
            indices of the parameter and the element, so they are the same on every device.

    Raises:
        ValueError: if any option or parameter is invalid; the message names all those of the first
            such group.
    """

    _tables: dict[torch.device, Tables]  # tables of the last step
    _captured: list[Tables | Tensor]  # what captured graphs read, kept alive
    # (group index, device) -> float64 (5,) on the device, and its values on the host.
    _hyper: dict[tuple[int, torch.device], tuple[Tensor, list[float]]]
    _checked: dict[Tensor, tuple[object, ...]]  # parameter -> addresses and sizes that fit

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
        for name in ("_tables", "_hyper", "_checked"):
            self.__dict__.setdefault(name, {})
        self.__dict__.setdefault("_captured", [])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # called by pickle, deepcopy and load_state_dict
        self._init_caches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ValueError: as the constructor; the group is not added.
        """
        super().add_param_group(param_group)
        if errors := self._errors_of(self.param_groups[-1]):
            self.param_groups.pop()
            raise ValueError("; ".join(errors))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the result of closure.

        Raises:
            RuntimeError: if a gradient is sparse, a parameter is not contiguous, or a gradient or
                state tensor has another shape, dtype or device than its parameter requires; nothing
                on that device is updated. After `p.data` has got another shape, delete
                optimizer.state[p]. During a capture, also if neither `prepare` nor `step` was
                called before, if tensors, their addresses or hyperparameters have changed since, or
                if a gradient is not contiguous or lazily negated, which is copied.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for device, params in self._operands().items():
            if runs_kernels(device):
                self._tables_for(device, params).launch()
                # Kernels do not tell autograd that they write, but a backward would be wrong.
                torch.autograd.graph.increment_version([operands.param for operands in params])
                continue
            self._require_fit(params)
            for operands in params:
                adamw_reference(operands)
        return loss

    @torch.no_grad()
    def prepare(self) -> None:
        """Create state and tables and compile the kernels, so that `step` can be captured.

        No parameter changes. Call this method when all gradients exist and will keep their
        addresses, on the stream of the capture or on one that the capture waits for
        (torch.cuda.graph waits for all streams).

        Raises:
            RuntimeError: as `step`, or if it is called during a capture.
        """
        if _capturing():
            raise RuntimeError(f"a capture has begun; {PREPARE}")
        for device, params in self._operands().items():
            if runs_kernels(device):
                self._tables_for(device, params).launch(dry=True)

    @torch.no_grad()
    def update_hyperparameters(self) -> None:
        """Copy changed lr, betas, eps and weight_decay from `param_groups` to the device.

        Each `step` does so, but a replay of a captured step does not. The copy runs on the current
        stream.

        Raises:
            RuntimeError: if a number has changed and a capture runs: every replay would restore it.
        """
        for place, device in self._hyper:
            if place < len(self.param_groups):  # else the group has been removed
                self._hyper_on(place, device)

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, with each step as a float64, as torch.optim.AdamW needs it."""
        given: dict[str, Any] = super().state_dict()
        # The dictionaries are those of the optimizer, and must not change.
        given["state"] = {
            i: {**state, "step": state["step"].double()} if "step" in state else state
            for i, state in given["state"].items()
        }
        return given

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options from a state dict of FusedAdamW or torch.optim.AdamW.

        State tensors are cast to the dtypes that the loaded options require. (torch would cast them
        to the dtype of the parameter.) They are copied into those that exist, so a captured graph
        continues with the loaded state. If the state dict has no master weights, they are
        initialized from the parameters, so load the model first. Options that a group of the state
        dict lacks, as those of torch.optim.AdamW, stay as they are.

        Raises:
            ValueError: if any option or tensor is invalid; the message names all of them, and
                nothing is changed.
        """
        loaded: list[tuple[Tensor, str, Tensor, Form]] = []

        def take_state(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            errors, owners = [], self._owners()
            groups = list(given["param_groups"])
            # torch checks afterwards that there are as many groups and parameters in both.
            for index, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=False)):
                own = {name: mine[name] for name in self.defaults if name in mine}
                groups[index] = {**own, **theirs}
                group = {**groups[index], "params": mine["params"]}
                errors += self._errors_of(group)
                for param, i in zip(mine["params"], theirs["params"], strict=False):
                    if not (state := given["state"].get(i)):
                        continue
                    for name, form in _state_forms(param, group).items():
                        value = torch.as_tensor(state.get(name, param if name == "master" else []))
                        if name == "step" and value.numel() == 1:
                            value = value.reshape(())  # old versions of torch save a vector
                        loaded.append((param, name, value, form))
                        if value.shape != form[1]:
                            got = f"shape {tuple(value.shape)}" if name in state else "no tensor"
                            what = f"{name} of {owners[param][0]}"
                            errors.append(f"{what} must have shape {tuple(form[1])}, got {got}")
            if errors:
                raise ValueError("; ".join(errors))
            return {**given, "state": {}, "param_groups": groups}

        before = self.state
        # This hook runs last, so it receives the state dict after all other hooks have changed it.
        handle = self.register_load_state_dict_pre_hook(take_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, name, value, (dtype, shape) in loaded:
            tensor = before.get(param, {}).get(name)
            form = (dtype, shape, param.device)
            if tensor is None or (tensor.dtype, tensor.shape, tensor.device) != form:
                tensor = torch.empty(shape, dtype=dtype, device=param.device)
            self.state[param][name] = tensor.copy_(value)

    @torch.no_grad()
    def load_master(self, masters: Mapping[Any, Tensor]) -> None:
        """Set master weights to the float32 values from which 16-bit parameters were cast.

        `masters` has them by parameter; they are copied. The parameters are set to the same values,
        rounded to nearest.

        Raises:
            ValueError: if a key is not a parameter with master weights, or if a value is not
                float32 of its shape. The message names all errors, and nothing is changed.
        """
        owners = self._owners()
        errors = []
        for param, value in masters.items():
            name, group = owners.get(param, ("a tensor that is not a parameter", None))
            form = _state_forms(param, group).get("master") if group else None
            if (value.dtype, value.shape) != form:
                wanted = _plain(*form, value.device) if form else "none"
                errors.append(f"master of {name} must be {wanted}, got {_described(value)}")
        if errors:
            raise ValueError("; ".join(errors))
        for param, value in masters.items():
            state = self.state.get(param) or self._new_state(param, owners[param][1])
            state["master"].copy_(value)
            param.copy_(value)

    def _operands(self) -> dict[torch.device, list[Operands]]:
        """Return the operands of every parameter that has a gradient, by device.

        Missing state is created and changed hyperparameters are copied. During a capture, both are
        errors.
        """
        found: dict[torch.device, list[Operands]] = {}
        index = -1
        for place, group in enumerate(self.param_groups):
            hypers: dict[torch.device, Tensor] = {}
            seed, stochastic = group["seed"], group["stochastic_rounding"] is not False
            for param in group["params"]:
                index += 1
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout != torch.strided:
                    name = self._owners()[param][0]
                    raise RuntimeError(f"the gradient of {name} must be dense, got {grad.layout}")
                state = self.state.get(param) or self._new_state(param, group)
                device = param.device
                hyper = hypers.get(device)
                if hyper is None:
                    hyper = hypers[device] = self._hyper_on(place, device)
                operands = Operands(
                    param, grad.resolve_neg().contiguous(), state["exp_avg"], state["exp_avg_sq"],
                    state.get("master"), state["step"], hyper, stream(seed, index), stochastic,
                )  # fmt: skip
                found.setdefault(device, []).append(operands)
        return found

    def _hyper_on(self, place: int, device: torch.device) -> Tensor:
        """Return the hyperparameters of a group on a device, after copying those that changed."""
        buffer, known = self._hyper.get((place, device)) or (
            torch.empty(len(HYPER), dtype=torch.float64, device=device),
            [math.nan] * len(HYPER),
        )
        group = self.param_groups[place]
        values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and not value.is_cpu:
                buffer[i].copy_(value.reshape(()))  # the host would have to wait for the value
                known[i] = math.nan
                if _capturing():  # each replay copies it
                    self._captured.append(value)
            elif (number := float(value)) != known[i]:
                if _capturing():
                    raise RuntimeError(
                        f"{HYPER[i]} of parameter group {place} changed from {known[i]} to "
                        f"{number} and cannot be copied during a capture; {PREPARE}"
                    )
                buffer[i].fill_(number)  # fill_ does not synchronize
                known[i] = number
        self._hyper[place, device] = (buffer, known)
        return buffer

    def _new_state(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        if _capturing():
            raise RuntimeError(f"{self._owners()[param][0]} has no state on the device; {PREPARE}")
        state = self.state[param] = {
            name: torch.zeros(shape, dtype=dtype, device=param.device)
            for name, (dtype, shape) in _state_forms(param, group).items()
        }
        if "master" in state:
            state["master"].copy_(param)
        return state

    def _tables_for(self, device: torch.device, params: list[Operands]) -> Tables:
        from systems.kernels.adamw.kernel import Tables, layout_of

        layout = layout_of(params)
        tables: Tables | None = self._tables.get(device)
        if tables is None or tables.layout != layout:
            if _capturing():
                known = () if tables is None else set(zip(*tables.layout, strict=True))
                now, owners = zip(params, zip(*layout, strict=True), strict=True), self._owners()
                moved = [owners[o.param][0] for o, row in now if row not in known]
                raise RuntimeError(
                    "tensors changed or moved since the last FusedAdamW.prepare() or step(): those "
                    f"of {', '.join(moved) or 'parameters without a gradient'}; {PREPARE}"
                )
            # Gradients can move in every step, so a parameter of which only the gradient has moved
            # is not checked again.
            fits = {
                o.param: (row[0], *row[2:], form)
                for o, row, form in zip(params, *layout, strict=True)
            }
            unchecked = [
                o for o in params
                if self._checked.get(o.param) != fits[o.param]
                or o.grad.shape != o.param.shape or o.grad.device != device
            ]  # fmt: skip
            if unchecked:
                self._require_fit(unchecked)
            self._checked |= fits
            tables = self._tables[device] = Tables(layout, device, like=tables)
        if _capturing():
            self._captured.append(tables)
        return tables

    def _owners(self) -> dict[Tensor, tuple[str, Group]]:
        """Return the name in messages and the group of each parameter."""
        owners: dict[Tensor, tuple[str, Group]] = {}
        index = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for place, param in enumerate(group["params"]):
                name = f" ({names[place]})" if names else ""
                owners[param] = (f"parameter {index}{name}", group)
                index += 1
        return owners

    def _errors_of(self, group: Group) -> list[str]:
        """Return one error message for each invalid option or parameter of a parameter group."""
        errors = [
            f"{name} must be a number of at least 0, got {group[name]!r}"
            for name in ("lr", "eps", "weight_decay")
            if not (_is_number(group[name], tensor=name == "lr") and group[name] >= 0)
        ]
        betas = group["betas"]
        if len(betas) != 2 or not all(_is_number(b, tensor=True) and 0 <= b < 1 for b in betas):
            errors.append(f"betas must be two numbers in [0, 1), got {betas!r}")
        state_dtype, seed = group["state_dtype"], group["seed"]
        if state_dtype not in STATE_DTYPES:
            errors.append(f"state_dtype must be one of {STATE_DTYPES}, got {state_dtype!r}")
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            errors.append(f"seed must be an integer in [0, 2^32), got {seed!r}")
        # The other options of torch.optim.AdamW, foreach, fused and capturable, change no result.
        refused = ("amsgrad", "maximize", "differentiable")
        errors += [f"{name} is not supported" for name in refused if group.get(name)]
        if group.get("decoupled_weight_decay") is False and group["weight_decay"] != 0:
            errors.append("decoupled_weight_decay=False is not supported with a weight_decay")
        owners = self._owners()
        return errors + [e for p in group["params"] for e in _parameter_errors(owners[p][0], p)]

    def _require_fit(self, params: list[Operands]) -> None:
        """Raise a RuntimeError with all tensors that do not fit. Kernels trust their sizes."""
        owners = self._owners()
        errors = []
        for o in params:
            name, group = owners[o.param]
            errors += _parameter_errors(name, o.param)
            dtype = o.grad.dtype if o.grad.dtype in DTYPES else o.param.dtype
            forms = {"gradient": (dtype, o.param.shape), **_state_forms(o.param, group)}
            names = ("gradient", "exp_avg", "exp_avg_sq", "master", "step")
            for what, tensor in zip(names, o[1:], strict=False):
                wanted = _plain(*forms[what], o.param.device) if what in forms else "none"
                given = _described(tensor) if isinstance(tensor, Tensor) else "none"
                if wanted != given:
                    errors.append(f"{what} of {name} must be {wanted}, got {given}")
        if errors:
            raise RuntimeError("; ".join(errors))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _state_forms(param: Tensor, group: Group) -> dict[str, Form]:
    """Return the dtype and the shape of each optimizer state tensor of a parameter, by name."""
    state_dtype, master = group["state_dtype"], group["master_weights"]
    forms = {
        "step": (torch.int64, torch.Size()),
        "exp_avg": (state_dtype, param.shape),
        "exp_avg_sq": (state_dtype, param.shape),
    }
    has_master = state_dtype == torch.float32 if master is None else master
    if has_master and param.dtype != torch.float32:
        forms["master"] = (torch.float32, param.shape)
    return forms


def _is_number(value: object, tensor: bool) -> bool:
    if tensor and isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real)


def _parameter_errors(name: str, param: Tensor) -> list[str]:
    described = _described(param)
    if param.dtype in DTYPES and described == _plain(param.dtype, param.shape, param.device):
        return []
    return [f"{name} must be contiguous, with a dtype in {DTYPES}, got {described}"]


def _plain(dtype: torch.dtype, shape: Iterable[int], device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _described(tensor: Tensor) -> str:
    """Return the properties of a tensor. If it is contiguous, they are those of `_plain`."""
    if is_traceable_wrapper_subclass(tensor):  # a kernel cannot read it at its address
        return f"{type(tensor).__name__}; give its local tensor"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    negated = " lazily negated" if tensor.is_neg() else ""
    freed = " without memory" if tensor.untyped_storage().nbytes() < tensor.nbytes else ""
    return _plain(tensor.dtype, tensor.shape, tensor.device) + strides + negated + freed
