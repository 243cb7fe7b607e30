"""Modules that a run does not use, by the implementations that its parameters select.

Used by the functions `sources` of benchmarks, see `systems.benchmark.Sources`. The modules are
listed here and not beside their tables of implementations, because those import torch.
"""

from __future__ import annotations

from systems.benchmark import Sources
from systems.external.reference import is_reference

# An edit of the tables below changes no result, nor does a newly known fault.
_ALWAYS = (__name__, "systems.triton_faults")
_FLASH = "systems.kernels.flash_attention"
_TRITON = tuple(
    f"{_FLASH}.{name}" for name in ("triton", "autograd", "kernel_choice", "ops", "layout")
)
# Modules of each implementation of attention. The Hopper implementation calls Triton kernels.
_SDPA = (f"{_FLASH}.peers.sdpa", f"{_FLASH}.layout")
_ATTENTION = {
    "naive": (f"{_FLASH}.naive",),
    "naive_compiled": (f"{_FLASH}.naive",),
    "flash_pytorch": (f"{_FLASH}.flash_pytorch",),
    "flash_triton": _TRITON,
    "flash_hopper": (f"{_FLASH}.hopper", *_TRITON),
    "flash_attn_4": (f"{_FLASH}.peers.flash_attn_4", f"{_FLASH}.layout"),
    "flex": (f"{_FLASH}.peers.flex",),
    "sdpa": (),
    "sdpa_flash": _SDPA,
    "sdpa_cudnn": _SDPA,
    "sdpa_efficient": _SDPA,
    "sdpa_math": _SDPA,
}
# Code of the user runs with the autocast of this project, which is in the module `autograd`.
_EXTERNAL = (f"{_FLASH}.external", f"{_FLASH}.autograd")
# Benchmarks call the implementations directly.
_UNUSED = tuple(f"{_FLASH}.{name}" for name in ("api", "arguments", "auto", "drop_in"))
_WRAPPERS = ("ddp", "fsdp", "sharded_weights", "sharded_optimizer")
_NEEDS = {"fsdp": ("sharded_weights",)}  # modules that a wrapper imports


def without_other_attentions(implementation: str, *others: str) -> Sources:
    """Return the sources of a run with one implementation of attention, or of several."""
    used = {module for name in others for module in _ATTENTION[name]}
    used |= set(_EXTERNAL if is_reference(implementation) else _ATTENTION[implementation])
    every = (*_UNUSED, *_EXTERNAL, *(name for names in _ATTENTION.values() for name in names))
    left_out = (name for name in dict.fromkeys(every) if name not in used)
    return Sources(left_out=(*_ALWAYS, *left_out))


def without_other_wrappers(*wrappers: str) -> Sources:
    """Return the sources of a run on several ranks.

    `wrappers` are the modules of `systems.parallel` that it uses: ddp, fsdp, sharded_optimizer.
    """
    used = {name for wrapper in wrappers for name in (wrapper, *_NEEDS.get(wrapper, ()))}
    left_out = (f"systems.parallel.{name}" for name in _WRAPPERS if name not in used)
    return Sources(left_out=(*_ALWAYS, *left_out))


def of_training(attention: str, optimizer: str, *wrappers: str) -> Sources:
    """Return the sources of a training: `wrappers` is as for `without_other_wrappers`."""
    # The gradients are checked against those with naive attention.
    left_out = without_other_attentions(attention, "naive").left_out
    left_out += without_other_wrappers(*wrappers).left_out
    left_out += () if optimizer == "fused" else ("systems.kernels.adamw",)
    return Sources(left_out=tuple(dict.fromkeys(left_out)))
