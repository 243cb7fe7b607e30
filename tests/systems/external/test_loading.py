"""External code is imported from its file, in packages and outside of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from systems.external.attention import ExternalAttention
from systems.external.loading import load
from systems.external.reference import BadReference
from systems.kernels.flash_attention import Call, attention_reference
from tests.jobs.harness import ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_file_in_a_package_imports_relatively(folder: Path) -> None:
    write(folder / "pkg" / "inner" / "flash.py", "from ..tiles import SIZE\ndef f(): return SIZE")
    write(folder / "pkg" / "tiles.py", "SIZE = 4")
    write(folder / "pkg" / "__init__.py", "")
    write(folder / "pkg" / "inner" / "__init__.py", "")
    assert load("pkg/inner/flash.py:f")() == 4
    assert load("pkg.inner.flash:f") is load("pkg/inner/flash.py:f")


def test_a_helper_of_another_folder_is_not_used(folder: Path) -> None:
    """With --debug, several runs share a process."""
    for name in ("one", "two"):
        write(folder / name / "flash.py", "from helper import NAME\ndef f(): return NAME")
        write(folder / name / "helper.py", f"NAME = {name!r}")
    assert load("one/flash.py:f")() == "one"
    assert load("two/flash.py:f")() == "two"
    assert load("one/flash.py:f")() == "one"


def test_a_file_may_have_the_name_of_another_module(folder: Path) -> None:
    write(folder / "a" / "json.py", "def f(): return 'a'")
    write(folder / "b" / "json.py", "def f(): return 'b'")
    assert (load("a/json.py:f")(), load("b/json.py:f")()) == ("a", "b")
    import json

    assert json.loads("1") == 1


def test_a_package_of_another_place_is_not_mistaken(folder: Path) -> None:
    write(folder / "sub" / "yaml" / "__init__.py", "")
    write(folder / "sub" / "yaml" / "mine.py", "def f(): ...")
    import yaml  # noqa: F401

    with pytest.raises((BadReference, ModuleNotFoundError)):
        load("sub/yaml/mine.py:f")


HEADS, NO_HEADS = "b, h, n, d", "b, n, d"
FUNCTION = """
def f(q, k, v, {parameters}):
    {axes} = q.shape
    return naive(q, k, v, {given})
"""
AUTOGRAD = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        {axes} = q.shape
        return naive(q, k, v, is_causal)
"""
SETUP_CONTEXT = """
class f(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, is_causal):
        b, n, d = q.shape
        return naive(q, k, v, is_causal)
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
"""
FORMS = {
    "function": FUNCTION.format(parameters="is_causal=False", axes=HEADS, given="is_causal"),
    "causal": FUNCTION.format(parameters="causal", axes=HEADS, given="causal"),
    "three dimensions": FUNCTION.format(parameters="is_causal", axes=NO_HEADS, given="is_causal"),
    "keywords": FUNCTION.format(parameters="**options", axes=HEADS, given="**options"),
    "scale before is_causal": FUNCTION.format(
        parameters="scale=None, is_causal=False", axes=HEADS, given="is_causal, scale"
    ),
    "autograd": AUTOGRAD.format(name="f", axes=NO_HEADS),
    "autograd, four dimensions": AUTOGRAD.format(name="f", axes=HEADS),
    "setup_context": SETUP_CONTEXT,
    "adapter": AUTOGRAD.format(name="F", axes=NO_HEADS) + "def f():\n    return F\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_form_of_attention_is_called_rightly(folder: Path, form: str, causal: bool) -> None:
    head = "import torch\nfrom systems.kernels.flash_attention import naive\n"
    write(folder / "own.py", head + FORMS[form])
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    attention = ExternalAttention("own.py:f")
    assert attention.unsupported_reason(causal) is None
    attention.find_shape(q, causal)
    out = attention(q, k, v, is_causal=causal)
    exact = attention_reference(q, k, v, q, Call(causal)).out
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert attention.takes_heads == (HEADS in FORMS[form])


def test_attention_may_read_its_saved_tensors_twice_under_checkpointing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpointing lets a function read them once; examples/my_attention.py reads them twice.

    Without checkpointing there are no hooks, which would add to the measured time on the host.
    """
    hooks, make = [], torch.autograd.graph.saved_tensors_hooks

    def watched(*pair: Any) -> Any:
        hooks.append(pair)
        return make(*pair)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", watched)
    attention = ExternalAttention(f"{ROOT}/examples/my_attention.py:MyAttention")
    x = torch.randn(1, 2, 8, 4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return attention(x.sin(), x.cos(), x * 2, True)

    (known,) = torch.autograd.grad(block(x).sum(), x)
    assert not hooks
    (found,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    assert torch.equal(found, known)


def test_what_is_no_attention(folder: Path) -> None:
    text = "import torch\nx = 3\nf = torch.nn.Linear\ng = lambda q, k, v: (q, k)\n"
    text += "def h(q, k, v, scale=1.0): ..."
    write(folder / "own.py", text)
    with pytest.raises(BadReference, match="must be a function or a torch"):
        ExternalAttention("own.py:x")
    with pytest.raises(BadReference, match="is a class"):
        ExternalAttention("own.py:f")
    scaled = ExternalAttention("own.py:h")
    assert "has no parameter is_causal" in str(scaled.unsupported_reason(True))
    pair = ExternalAttention("own.py:g")
    assert "supports only causal=False" in str(pair.unsupported_reason(True))
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"must return a tensor of shape .*, got tuple"):
        pair(q, q, q)
