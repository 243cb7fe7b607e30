"""Bad references are refused before a submission with one line, without importing the code.

tests/jobs/bad_input has the errors of references that a command tells.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from systems.external.reference import BadReference, Reference, find_module
from systems.external.source import check_source, likely_kind
from tests.jobs.harness import ROOT, call

RIGHT = """
import torch
import helper
raise RuntimeError("importing this file executes it")

def attend(q, k, v, is_causal=False): ...
def attend_causal(q, k, v, causal): ...
def course_adapter(): ...
def with_keyword(q, k, v, *, is_causal): ...
@torch.compile
def compiled(*inputs): ...
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False): ...
class Child(Flash): ...
class DDP(torch.nn.Module):
    def __init__(self, module): ...
class Buckets(DDP):
    def __init__(self, module, bucket_size_mb): ...
class Inherits(DDP): ...
class FSDP(torch.nn.Module):
    def __init__(self, module, compute_dtype=None): ...
class Sharded(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs): ...
if torch.cuda.is_available():
    def on_gpu(q, k, v, is_causal): ...
alias = attend
"""
WRONG = [  # (source, name, kind, words of the error)
    ("import torch\nclass M(torch.nn.Module): ...", "M", "attention", "must be a function that"),
    ("def f(q, k, v, mask, causal): ...", "f", "attention", "must take (q, k, v, is_causal)"),
    ("def f(q, k, v, c, *, key): ...", "f", "attention", "must take (q, k, v, is_causal)"),
    ("import triton\n@triton.jit\ndef g(q, k, v, o): ...", "g", "attention", "is a Triton kernel"),
    ("class W:\n  def __init__(self, module, a, b): ...", "W", "ddp", "must take (module, bucket"),
    ("class O:\n  def __init__(self, params): ...", "O", "optimizer", "optimizer_cls, **options)"),
    ("def f(q, k, v): ...", "g", "attention", "x.py has no 'g' (it defines f)"),
    ("\nfrom helper import missing\ndef f(q, k, v): ...", "f", "attention", "has no 'missing'"),
    ("from broken import x\ndef f(q, k, v): ...", "f", "attention", "broken.py:1: there is no"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("value = 1\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\nx = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((n, "attention") for n in ("attend", "attend_causal", "course_adapter", "with_keyword")),
        *((n, "attention") for n in ("compiled", "Flash", "Child", "on_gpu", "alias")),
        *((n, "ddp") for n in ("DDP", "Buckets", "Inherits")),
        ("FSDP", "fsdp"),
        ("Sharded", "optimizer"),
    ],
)
def test_every_form_is_accepted_without_executing_the_file(
    folder: Path, name: str, kind: str
) -> None:
    (folder / "my").mkdir()
    (folder / "my" / "code.py").write_text(RIGHT)
    (folder / "my" / "helper.py").touch()  # found beside the file, as if it were a script
    reference = Reference.parse(f"my/code.py:{name}")
    check_source(reference, kind)
    assert likely_kind(reference) == (None if name == "alias" else kind)


@pytest.mark.parametrize(("source", "name", "kind", "words"), WRONG)
def test_a_wrong_source_is_refused(
    folder: Path, source: str, name: str, kind: str, words: str
) -> None:
    (folder / "x.py").write_text(source)
    with pytest.raises(BadReference) as caught:
        check_source(Reference.parse(f"x.py:{name}"), kind)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_change_of_the_file_is_seen(folder: Path) -> None:
    path = folder / "x.py"
    path.write_text("def f(q): ...")
    with pytest.raises(BadReference):
        check_source(Reference.parse("x.py:f"), "attention")
    before = path.stat()
    path.write_text("def f(q, k, v, is_causal): ...")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    check_source(Reference.parse("x.py:f"), "attention")


@pytest.mark.parametrize("text", ["x.py", "x.py:", ":f", "x.py:a.b", "a b:f", "x.py:9"])
def test_a_malformed_reference(text: str) -> None:
    with pytest.raises(BadReference, match=r"must be FILE\.py:NAME or PACKAGE\.MODULE:NAME, got"):
        Reference.parse(text)


def test_one_file_has_one_spelling(folder: Path) -> None:
    spellings = ["x.py:f", "./x.py:f", "a/../x.py:f", f"{folder}/x.py:f"]
    assert {str(Reference.parse(text)) for text in spellings} == {"x.py:f"}


def test_modules_are_found_without_importing_them(folder: Path) -> None:
    (folder / "space" / "inner").mkdir(parents=True)
    (folder / "space" / "inner" / "module.py").write_text("raise SystemExit")
    assert find_module("space.inner.module") == folder / "space" / "inner" / "module.py"
    assert find_module("space.inner.other") is None and "space" not in sys.modules
    assert find_module("systems.model") == ROOT / "systems" / "model.py"


def test_a_submission_does_not_execute_the_file(folder: Path) -> None:
    (folder / "code.py").write_text(RIGHT)
    sweep = ROOT / "sweeps" / "quickstart.yaml"
    done = call("jobs.submit", sweep, "implementation=code.py:Flash", "--dry-run", "--local")
    assert done.returncode == 0, done.stdout


def test_an_extension_module_is_importable(folder: Path) -> None:
    """Compiled modules, and those that are built into Python, have no source file."""
    (folder / f"compiled{EXTENSION_SUFFIXES[0]}").touch()
    (folder / "x.py").write_text("import compiled, yaml._yaml, _cffi_backend_or_none as x\n")
    with pytest.raises(BadReference, match="no module '_cffi_backend_or_none'"):
        check_source(Reference.parse("x.py:x"), "attention")
    (folder / "x.py").write_text("import compiled, torch._C\ndef f(q, k, v): ...\n")
    check_source(Reference.parse("x.py:f"), "attention")


@pytest.mark.parametrize(
    "imports",
    [
        "from helper import *",
        "import sys\nsys.path.insert(0, 'lib')\nimport in_lib",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import missing",
        "try:\n    import missing\nexcept ImportError:\n    missing = None",
    ],
)
def test_imports_that_may_succeed_are_accepted(folder: Path, imports: str) -> None:
    (folder / "x.py").write_text(f"{imports}\ndef f(q, k, v, is_causal): ...\n")
    check_source(Reference.parse("x.py:f"), "attention")
