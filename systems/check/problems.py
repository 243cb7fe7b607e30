"""What the checks of trainings find wrong: missing gradients, errors above limits, long lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from systems.benchmark import WrongOutput

MAX_NAMES = 6  # maximum number of names in a message


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by name, without the prefix that torch.compile adds in a compiled block."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model as this rank has them, by name.

    Raises:
        WrongOutput: if a parameter has no gradient.
    """
    named = named_parameters(model)
    missing = [name for name, parameter in named.items() if parameter.grad is None]
    if missing:
        raise WrongOutput(f"backward computed no gradient for {', '.join(missing)}")
    return {name: p.grad for name, p in named.items() if p.grad is not None}


def above(errors: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Return the errors above their limits, and NaN, such as "loss 1.00e-02 (at most 5e-03)"."""
    return [
        f"{name} {error:.2e} (at most {limits[name]:.0e})"
        for name, error in errors.items()
        if not error <= limits[name]  # true for NaN, too
    ]


def listed(names: Sequence[str]) -> str:
    """Join the first names, and tell how many more there are."""
    left = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f", and {left} more" if left > 0 else "")
