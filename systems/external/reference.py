"""References to code outside this project, such as `my_kernels/flash.py:MyFlash`.

A reference is `FILE.py:NAME` or `PACKAGE.MODULE:NAME`. Files are relative to the folder in which
the command is run. Modules are searched as by `import`, beginning in this folder.

This module finds source files without importing them. It does not import torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_]\w*$", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", re.ASCII)


class BadReference(ValueError):
    """Raised if a reference is malformed, or names nothing or something of another kind."""


@dataclass(frozen=True)
class Reference:
    """A name in a Python file or module outside this project."""

    source: str  # path of a .py file, or dotted name of a module
    name: str  # name of a function, class or other object at the top level of the source

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse `FILE.py:NAME` or `PACKAGE.MODULE:NAME`.

        The path of a file in the current folder becomes relative to this folder.

        Raises:
            BadReference: if the text has another form.
        """
        source, _, name = text.rpartition(":")
        is_module = _MODULE.match(source) and not source.endswith(".py")
        if not _NAME.match(name) or not (source.endswith(".py") or is_module):
            raise BadReference(
                f"a reference must be FILE.py:NAME or PACKAGE.MODULE:NAME, got {text!r}"
            )
        if source.endswith(".py"):
            source = os.path.normpath(source)
            if os.path.isabs(source) and Path(source).is_relative_to(Path.cwd()):
                source = str(Path(source).relative_to(Path.cwd()))
        return cls(source, name)

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py")

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"

    def find(self) -> Path:
        """Return the path of the source file. The file is not imported.

        Raises:
            BadReference: if there is no such file or module.
        """
        if self.is_file:
            if not os.path.isfile(self.source):
                raise BadReference(f"there is no file {self.source!r} in {os.getcwd()!r}")
            return Path(self.source).absolute()
        found = find_module(self.source)
        if found is None:
            raise BadReference(
                f"there is no module {self.source!r}, neither in {os.getcwd()!r} nor among the "
                "installed packages"
            )
        return found


def is_reference(value: object) -> bool:
    """Return whether the value of a parameter is a reference, and not a name of this project."""
    return isinstance(value, str) and ":" in value


def find_module(name: str, folders: Iterable[Path] = ()) -> Path | None:
    """Return the source file of a module or package, or None if there is none, without an import.

    Packages without `__init__.py` (namespace packages) are found, too. `folders` are searched
    first, then the current folder.
    """
    first, *rest = name.split(".")
    file, inside = _in_folders(first, [*map(str, folders), os.getcwd(), *sys.path])
    if file is None and not inside:  # for example an editable installation
        file, inside = _by_finders(first)
    for part in rest:
        file, inside = _in_folders(part, inside)
    return file


def is_importable(name: str, folders: Iterable[Path] = ()) -> bool:
    """Return whether a top-level module exists, also in `folders`, without an import."""
    paths = [*map(str, folders), os.getcwd()]
    return PathFinder.find_spec(name, paths) is not None or any(
        finder.find_spec(name, None) is not None for finder in sys.meta_path
    )


def _in_folders(name: str, folders: Iterable[str]) -> tuple[Path | None, list[str]]:
    """Search a module in folders. Return its file, if any, and the folders of its submodules."""
    namespace = []
    for folder in folders:
        package = Path(folder or os.curdir) / name
        # Unlike methods of Path, these functions return False if a name is too long.
        if os.path.isfile(package / "__init__.py"):
            return (package / "__init__.py").absolute(), [str(package)]
        if os.path.isfile(f"{package}.py"):
            return Path(f"{package}.py").absolute(), []
        if os.path.isdir(package):
            namespace.append(str(package))
    return None, namespace


def _by_finders(name: str) -> tuple[Path | None, list[str]]:
    """Search a top-level module with the import system's finders, without importing the module."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            is_source = spec.origin is not None and spec.origin.endswith(".py")
            file = Path(str(spec.origin)) if is_source else None
            return file, list(spec.submodule_search_locations or [])
    return None, []
