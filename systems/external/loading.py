"""Import external code. This executes the code, so only runs and `python -m jobs check` do it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from systems.external.reference import BadReference, Reference, find_module
from systems.external.source import package_root

_folders: set[Path] = set()  # the folder that was added to sys.path for external code


def load(text: str) -> Any:
    """Import the file or module of a reference, and return the object with the given name.

    A file in a package (a folder with `__init__.py`) is imported as a module of this package. Any
    other file is imported like a script: it can import files in its folder.

    Raises:
        BadReference: if the file or the name does not exist.
        Exception: any exception that the code raises while it is imported.
    """
    reference = Reference.parse(text)
    module = module_of(reference)
    try:
        return getattr(module, reference.name)
    except AttributeError:
        raise BadReference(f"{reference.source} has no {reference.name!r}") from None


def module_of(reference: Reference) -> ModuleType:
    """Import the file or module of a reference. Exceptions are those of `load`."""
    path = reference.find()
    _search_first(Path.cwd())
    if not reference.is_file:
        return importlib.import_module(reference.source)
    root = package_root(path)
    _forget_other_folders(root)
    _search_first(root)
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    imported = getattr(sys.modules.get(name), "__file__", path)
    is_taken = find_module(name) != path or imported is None or Path(imported) != path
    if root == path.parent and is_taken:
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        return sys.modules.get(name) or _import_file(name, path)
    module = importlib.import_module(name)
    if not module.__file__ or not path.samefile(module.__file__):
        raise BadReference(
            f"{reference.source} must be importable as {name!r}, but this name belongs to "
            f"{module.__file__}; rename the folder or the file"
        )
    return module


def _forget_other_folders(root: Path) -> None:
    """Forget modules that were imported for external code in another folder.

    With --debug, runs share a process, and a file could get a helper of the same name from another
    folder.
    """
    for folder in _folders - {root}:
        if str(folder) in sys.path and folder != Path.cwd():
            sys.path.remove(str(folder))
            for name, module in list(sys.modules.items()):
                file = getattr(module, "__file__", None)
                is_installed = "site-packages" in str(file)
                if file and not is_installed and Path(file).is_relative_to(folder):
                    del sys.modules[name]
    _folders.clear()
    if root != Path.cwd() and str(root) not in sys.path:
        _folders.add(root)


def _search_first(folder: Path) -> None:
    """Make imports search this folder before installed packages, as for a script in the folder."""
    if str(folder) not in sys.path and not (folder == Path(os.getcwd()) and "" in sys.path):
        sys.path.insert(0, str(folder))


def _import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
