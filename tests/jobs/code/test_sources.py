"""Which files count for the hash of a module of the user, and which edits change it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jobs.code.sources import SourceTree
from systems.attentions import ATTENTIONS
from tests.jobs.checkout import Checkout

KERNEL = '''\
from typing import TYPE_CHECKING

import torch

from . import tiles

if TYPE_CHECKING:
    from my_kernels import types_only
else:
    from my_kernels.fallback import fallback


def MyFlash(q, k, v, is_causal):
    """Compute attention."""
    import helper
    return helper.VALUE
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A repository with a package of kernels. It is the current folder."""
    own = Checkout(tmp_path / "own")
    own.write("my_kernels/__init__.py", "from my_kernels import common\n")
    own.write("my_kernels/flash.py", KERNEL)
    for name in ("tiles", "common", "fallback", "types_only", "unused"):
        own.write(f"my_kernels/{name}.py", f"NAME = '{name}'\n")
    own.write("helper.py", "from systems.kernels.flash_attention import naive\nVALUE = 1\n")
    own.write(".venv/lib/python3/site-packages/installed.py", "X = 1\n")
    own.write("bench.py", "import installed\nimport my_kernels.flash\n")
    own.write("queue/__init__.py", "from . import calendar\n")
    own.write("queue/calendar.py", "NAME = 1\n")
    monkeypatch.chdir(own.folder)
    monkeypatch.syspath_prepend(str(own.folder / ".venv/lib/python3/site-packages"))
    return own


def names(tree: SourceTree, name: str, left_out: tuple[str, ...] = ()) -> set[str]:
    """Return the paths of the files of a module, relative to the current folder."""
    return {
        str(path.relative_to(os.getcwd()))
        for path in tree.files(name, left_out) or ()
        if path.is_relative_to(os.getcwd())
    }


def hash_of(name: str) -> str:
    tree = SourceTree()
    files = tree.files(name)
    assert files is not None
    return tree.hash_of(files)


REFERENCE = "my_kernels/flash.py:MyFlash"
KERNELS = {f"my_kernels/{name}.py" for name in ("__init__", "flash", "tiles", "common", "fallback")}


def test_all_imported_modules_of_the_repository_count_but_no_installed_ones(own: Checkout) -> None:
    tree = SourceTree()
    for reference in (REFERENCE, "my_kernels.flash:MyFlash"):
        assert names(tree, reference) == KERNELS | {"helper.py"}
    # What a module of the user imports of this project counts, whichever attention it calls.
    found = tree.files(REFERENCE) or ()
    assert {"implementations", "forward_launch", "d64"} <= {path.stem for path in found}
    assert not any(path.stem == "timing" for path in found)
    own_modules = {"/".join(modules[0].split(".")) + ".py" for modules in ATTENTIONS.values()}
    assert all(any(str(path).endswith(f"/{name}") for path in found) for name in own_modules)
    assert names(tree, "bench") == KERNELS | {"helper.py", "bench.py"}
    left_out = ("my_kernels.tiles", "helper")
    assert names(tree, "bench", left_out) == KERNELS - {"my_kernels/tiles.py"} | {"bench.py"}
    assert names(tree, "bench", ("my_kernels",)) == {"bench.py"}
    # Names of the standard library, in relative imports
    queue = {"queue/__init__.py", "queue/calendar.py"}
    assert names(tree, "queue/__init__.py:NAME") == queue
    assert tree.files("gone.py:X") is None and tree.files("gone.bench") is None


def test_only_edits_of_code_that_counts_change_the_hash(
    own: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy without git, as a snapshot, is the same code."""
    before = hash_of(REFERENCE)
    shutil.copytree(own.folder, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    own.write("my_kernels/unused.py", "NAME = 'edited'\n")
    own.write("my_kernels/types_only.py", "NAME = 'edited'\n")
    own.write("my_kernels/flash.py", "# New\n" + KERNEL.replace("Compute", "Return the"))
    assert hash_of(REFERENCE) == before
    own.write("my_kernels/tiles.py", "NAME = 'edited'\n")
    after = hash_of(REFERENCE)
    assert after != before
    own.write("helper.py", "VALUE = 2\n")
    assert hash_of(REFERENCE) not in (before, after)
    monkeypatch.chdir(tmp_path / "copy")
    assert hash_of(REFERENCE) == before
