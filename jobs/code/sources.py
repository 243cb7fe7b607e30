"""Hash of the sources that a run measures: its modules and all modules that they import.

Modules of this project and of the user's repository count. Installed packages and the standard
library do not, nor do files that are not Python. Nothing is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from jobs import ROOT
from jobs.code.imports import Import, SourceFile, read_source
from jobs.code.measured_files import find, is_project
from jobs.code.state import is_installed, repository_root
from systems.external.reference import find_module, is_reference
from systems.external.source import package_root

_OWN_PACKAGES = ("jobs", "systems")


class SourceTree:
    """The source files at one moment. All results are cached, so later changes are not seen."""

    def __init__(self) -> None:
        self.files = cache(self._files)
        self.hash_of = cache(self._hash_of)
        self.source = cache(self._source)
        self._find_module = cache(find_module)
        self._is_project = cache(is_project)

    def _files(self, name: str, left_out: tuple[str, ...] = ()) -> frozenset[Path] | None:
        """Return the files of a module and of all modules that it imports, directly or not.

        Imports inside functions count, imports below `if TYPE_CHECKING:` do not. The `__init__.py`
        files of a module's packages count, too. The modules and packages `left_out`, and what only
        they import, do not count. Paths are absolute. The result is None if there is no module of
        this name, which is dotted, or a reference such as `my_kernels/flash.py:MyFlash`.
        """
        start = find(name) if is_reference(name) else self._find(name, ())
        if start is None:
            return None
        folders = _folders_of(start)
        root = package_root(start)
        found = {start}
        if not is_reference(name):
            found |= set(self._along(name, ()))
        elif root != start.parent:
            found |= set(self._along(".".join(start.parent.relative_to(root).parts), (root,)))
        waiting = list(found)
        while waiting:
            path = waiting.pop()
            for imported in self._imported(path, left_out):
                if imported not in found and self._is_local(imported, folders):
                    found.add(imported)
                    waiting.append(imported)
        return frozenset(found)

    def _hash_of(self, files: frozenset[Path]) -> str:
        """Return the hash, 16 hexadecimal digits, of what counts of files, without their names."""
        digests = {source.digest for path in files if (source := self.source(path))}
        return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]

    def _source(self, path: Path) -> SourceFile | None:
        """Return what counts of a file, or None if the file cannot be read."""
        try:
            return read_source(path)
        except OSError:
            return None

    def _imported(self, path: Path, left_out: tuple[str, ...]) -> Iterator[Path]:
        """Yield the files that a file imports, with those of the packages that contain them."""
        source = self.source(path)
        if source is None or not source.imports:
            return
        root = package_root(path)
        folders = (root,) if root == path.parent else (root, path.parent)
        for item in source.imports:
            module = _absolute(item, path, root)
            if module is None or _is_within(module, left_out):
                continue
            if not item.level and module.partition(".")[0] in sys.stdlib_module_names:
                continue
            yield from self._along(module, folders)
            for name in item.names:
                submodule = f"{module}.{name}" if module else name
                if name != "*" and not _is_within(submodule, left_out):
                    file = self._find(submodule, folders)
                    if file is not None:
                        yield file

    def _along(self, module: str, folders: tuple[Path, ...]) -> list[Path]:
        """Return the files of a module and of the packages that contain it."""
        parts = module.split(".")
        names = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return [file for name in names if (file := self._find(name, folders)) is not None]

    def _find(self, module: str, folders: tuple[Path, ...]) -> Path | None:
        is_own = module.partition(".")[0] in _OWN_PACKAGES
        return self._find_module(module, (ROOT,) if is_own else folders)

    def _is_local(self, path: Path, folders: tuple[Path, ...]) -> bool:
        return self._is_project(path) or (
            not is_installed(path) and any(path.is_relative_to(f) for f in folders)
        )


def _is_within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _folders_of(path: Path) -> tuple[Path, ...]:
    """Return the folders whose files count for a file of the user: its repository's."""
    root = repository_root(path)
    folders = [Path(os.getcwd()), package_root(path), *([root] if root else [])]
    return tuple(dict.fromkeys(folders))


def _absolute(item: Import, path: Path, root: Path) -> str | None:
    """Return the dotted name of an imported module. None if it is outside of all packages.

    `root` is the folder from which the file is imported, from `package_root`.
    """
    if not item.level:
        return item.module
    parts = path.parent.relative_to(root).parts
    if item.level - 1 > len(parts):
        return None
    package = parts[: len(parts) - item.level + 1]
    return ".".join([*package, *filter(None, [item.module])])
