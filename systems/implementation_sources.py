"""Modules that a run does not use, by the implementations that its parameters select.

Used by the functions `sources` of benchmarks, see `systems.benchmark.Sources`.
"""

from __future__ import annotations

from systems.attentions import ATTENTIONS
from systems.benchmark import Sources
from systems.external.reference import is_reference

# An edit of these tables changes no result, nor does a newly known fault.
_ALWAYS = (__name__, "systems.attentions", "systems.triton_faults")
_FLASH = "systems.kernels.flash_attention"
_EXTERNAL = ("systems.external.attention",)
# Benchmarks call the implementations directly.
_UNUSED = (f"{_FLASH}.api", f"{_FLASH}.implementations")
_WRAPPERS = (
    "ddp", "peer_ddp", "peer_means", "fsdp", "sharded_weights", "peer_layers",
    "sharded_optimizer", "peer_memory",
)  # fmt: skip
_NEEDS = {  # modules that a wrapper imports
    "peer_ddp": ("ddp", "peer_means", "peer_memory"),
    "fsdp": ("sharded_weights", "peer_layers", "peer_means", "peer_memory"),
    "sharded_optimizer": ("peer_memory",),
}


def without_other_attentions(*implementations: str) -> Sources:
    """Return the sources of a run with these implementations of attention."""
    own = [_modules(name) for name in implementations]
    used = {module for names in own for module in names}
    every = (*_UNUSED, *_EXTERNAL, *(module for name in ATTENTIONS for module in _modules(name)))
    left_out = (name for name in dict.fromkeys(every) if name not in used)
    # They are imported by the module of the table, which is left out, so they are stated here.
    return Sources(tuple(names[0] for names in own), (*_ALWAYS, *left_out))


def _modules(implementation: str) -> tuple[str, ...]:
    if is_reference(implementation):
        return _EXTERNAL
    name = implementation.removesuffix("_compiled")
    return tuple(f"{_FLASH}.{module}" for module in ATTENTIONS[name])


def of_training(attention: str, optimizer: str, *wrappers: str) -> Sources:
    """Return the sources of a training that uses these modules of `systems.parallel`, if any.

    Names of modules are ddp, peer_ddp, fsdp, sharded_optimizer.
    """
    # The gradients are checked against those with naive attention.
    attentions = without_other_attentions(attention, "naive")
    used = {name for wrapper in wrappers for name in (wrapper, *_NEEDS.get(wrapper, ()))}
    others = [f"systems.parallel.{name}" for name in _WRAPPERS if name not in used]
    optimizers = () if optimizer == "fused" else ("systems.kernels.adamw",)
    left_out = (*attentions.left_out, *_ALWAYS, *others, *optimizers)
    return Sources(attentions.modules, tuple(dict.fromkeys(left_out)))
