"""Record the dtypes of weights, layer outputs, loss and gradients of a small model under autocast.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/mixed_precision.yaml --local
"""

from __future__ import annotations

from typing import Any, Literal

from systems.benchmark import BenchmarkParams

VERSION = 1


class Params(BenchmarkParams):
    """Parameters of the benchmark: the dtype of autocast."""

    autocast: Literal["fp16", "bf16"]  # dtype that is passed to torch.autocast


def run(params: Params) -> dict[str, Any]:
    """Run a small model once under autocast, and record dtypes.

    Facts:
        dtypes: those of the weights, the layer outputs, the loss and the gradients, by name.
    """
    import torch
    from torch import Tensor, nn

    from systems.dtypes import TORCH_DTYPES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    first, norm, last = (
        nn.Linear(20, 10, bias=False),
        nn.LayerNorm(10),
        nn.Linear(10, 5, bias=False),
    )
    model = nn.Sequential(first, nn.ReLU(), norm, last).to(device)
    seen: dict[str, Tensor] = {"weights": first.weight}
    for name, layer in (("first layer", first), ("layer norm", norm), ("logits", last)):

        def note(_: nn.Module, __: Any, out: Tensor, name: str = name) -> None:
            seen[name] = out

        layer.register_forward_hook(note)
    targets = torch.arange(4, device=device)
    with torch.autocast(device.type, TORCH_DTYPES[params.autocast]):
        seen["loss"] = nn.functional.cross_entropy(
            model(torch.randn(4, 20, device=device)), targets
        )
    seen["loss"].backward()
    assert first.weight.grad is not None
    seen["gradients"] = first.weight.grad
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}
    return {"facts": {"dtypes": dtypes}}
