"""Checks of external code that read its source and do not execute it.

A submission checks references such as `my_kernels/flash.py:MyFlash` before it starts jobs. An
import of the file would import torch, which takes seconds and which a login node may lack. Errors
that `check_source` does not find appear when a run imports the file.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from systems.external.reference import BadReference, Reference, find_module, is_importable

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Modules whose presence is not checked, because a login node may lack them.
_UNCHECKED_MODULES = ("torch", "triton")
_OWN_PACKAGES = ("jobs", "systems")  # packages of this project
_OWN_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kind:
    """A kind of implementation, and the parameters with which it is called."""

    what: str  # for messages
    parameters: tuple[str, ...]  # names of the parameters that are passed
    required: int  # number of these parameters that every implementation must take
    is_function: bool = False  # True: a class must be a torch.autograd.Function

    @property
    def call(self) -> str:
        return f"({', '.join(self.parameters)})"


KINDS = {
    "attention": Kind("attention", ("q", "k", "v", "is_causal"), 3, is_function=True),
    "ddp": Kind("a DDP wrapper", ("module", "bucket_size_mb"), 1),
    "fsdp": Kind("an FSDP wrapper", ("module", "compute_dtype"), 1),
    "optimizer": Kind("a sharded optimizer", ("params", "optimizer_cls", "**options"), 2),
}


def check_source(reference: Reference, kind: str) -> None:
    """Check the source of an external implementation, of a kind in KINDS, without executing it.

    Raises:
        BadReference: if the file or the name does not exist, if a file has a syntax error, if a
            module or name that it imports is missing, if its package has the name of a package
            of this project, or if the signature does not fit the kind.
    """
    path = reference.find()
    root = package_root(path)
    package = path.relative_to(root).parts[0]
    if package in _OWN_PACKAGES and root != path.parent and root != _OWN_ROOT:
        raise BadReference(
            f"{reference}: the package {package!r} has the name of a package of this project; "
            "rename it"
        )
    _check(path, path.stat().st_mtime_ns, reference, kind)


@lru_cache(maxsize=1024)  # a sweep checks the same reference once for each of its runs
def _check(path: Path, mtime_ns: int, reference: Reference, kind: str) -> None:
    tree = _parse(path)
    _check_name(tree, reference.name, str(reference.source))
    _check_imports(path, tree, {path})
    definition = _definition(tree, reference.name)
    if definition is not None:  # else it is imported or assigned, so its signature is unknown
        _check_signature(tree, definition, reference, KINDS[kind])


def likely_kind(reference: Reference) -> str | None:
    """Return the kind, a key of KINDS, of an implementation, or None if that is unclear.

    Raises:
        BadReference: if the file or the name does not exist, or if the file has a syntax error.
    """
    path = reference.find()
    tree = _parse(path)
    _check_name(tree, reference.name, str(reference.source))
    definition = _definition(tree, reference.name)
    if definition is None:
        return None
    names = _parameters(tree, definition) or []
    if names[:1] == ["module"]:
        return "fsdp" if _is_sharded(tree, definition, names) else "ddp"
    is_class = isinstance(definition, ast.ClassDef)
    bases = _bases(tree, definition)
    if names[:2] == ["params", "optimizer_cls"] or any(b.endswith("Optimizer") for b in bases):
        return "optimizer"
    if is_class:
        return "attention" if _is_autograd_function(tree, definition) else None
    return "attention" if len(names) in (0, 3, 4, 5) else None


def _is_sharded(tree: ast.Module, definition: Definition, parameters: list[str]) -> bool:
    """Return whether a wrapper of a module seems to be an FSDP wrapper."""
    methods = [
        node.name
        for one in _family(tree, definition)
        for node in ast.walk(one)
        if isinstance(node, Definition)
    ]
    return "compute_dtype" in parameters or any("gather_full" in name for name in methods)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        # Source with a NUL character has no line.
        where = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise BadReference(f"{where}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise BadReference(f"{path} cannot be read: {error}") from None


def _statements(body: list[ast.stmt], optional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements at the top level, and whether `if` or `try` may skip them."""
    for node in body:
        yield node, optional
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(node, Definition):
                yield from _statements(getattr(node, inner, []), True)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, True)


def _names(tree: ast.Module) -> tuple[set[str], bool]:
    """Return the names that a module defines, and whether it may define more than these."""
    names: set[str] = set()
    more = False
    for node, _ in _statements(tree.body):
        if isinstance(node, Definition):
            names.add(node.name)
            more |= node.name == "__getattr__"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                more |= alias.name == "*"
                names.add(alias.asname or alias.name.partition(".")[0])
        else:
            names |= {
                item.id
                for item in ast.walk(node)
                if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
            }
    return names, more


def _check_name(tree: ast.Module, name: str, source: str) -> None:
    names, more = _names(tree)
    if name in names or more:
        return
    valid = [node.name for node, _ in _statements(tree.body) if isinstance(node, Definition)]
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = f" (it defines {', '.join(valid[:20])})" if valid else ""
    raise BadReference(f"{source} has no {name!r}{hint}{listed}")


def _definition(tree: ast.Module, name: str) -> Definition | None:
    found = [
        node
        for node, _ in _statements(tree.body)
        if isinstance(node, Definition) and node.name == name
    ]
    return found[-1] if found else None


# ---- imports -------------------------------------------------------------------------------------


def _check_imports(path: Path, tree: ast.Module, seen: set[Path]) -> None:
    """Check that the modules which a file imports exist, also those that local files import.

    Only imports that always run are checked, and none of a file that mentions sys.path.
    """
    if any(isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.path" for n in ast.walk(tree)):
        return
    for node, optional in _statements(tree.body):
        if optional or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        modules: list[tuple[str, list[str]]]
        if isinstance(node, ast.Import):
            modules = [(alias.name, []) for alias in node.names]
        else:
            prefix = _package(path, node.level) if node.level else ""
            source = ".".join(filter(None, (prefix, node.module or "")))
            modules = [(source, [alias.name for alias in node.names])]
        for module, names in modules:
            _check_import(path, node.lineno, module, names, seen)


def _check_import(path: Path, line: int, module: str, names: list[str], seen: set[Path]) -> None:
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names or first in _UNCHECKED_MODULES or not module:
        return
    roots = [package_root(path), path.parent]
    found = find_module(module, roots)
    if found is None and not is_importable(first, roots):
        raise BadReference(f"{path}:{line}: there is no module {first!r}")
    is_local = found is not None and any(
        found.is_relative_to(folder) for folder in (*roots, Path.cwd())
    )
    if found is None or not is_local or "site-packages" in found.parts or found in seen:
        return
    seen.add(found)
    tree = _parse(found)
    defined, more = _names(tree)
    for name in names:
        if (
            name != "*"
            and name not in defined
            and not more
            and find_module(f"{module}.{name}", roots) is None
        ):
            raise BadReference(f"{path}:{line}: {found} has no {name!r}")
    _check_imports(found, tree, seen)


def package_root(path: Path) -> Path:
    """Return the folder from which a file is imported: the parent of its outermost package."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _package(path: Path, level: int) -> str:
    """Return the dotted name of the package to which a relative import in a file refers."""
    parts = path.parent.relative_to(package_root(path)).parts
    return ".".join(parts[: len(parts) - level + 1])


# ---- signatures ----------------------------------------------------------------------------------


def _check_signature(
    tree: ast.Module, definition: Definition, reference: Reference, kind: Kind
) -> None:
    decorators = [ast.unparse(decorator) for decorator in definition.decorator_list]
    if any(name.startswith(("triton.jit", "jit", "triton.autotune")) for name in decorators):
        raise BadReference(
            f"{reference} is a Triton kernel; name the function that launches it, which takes "
            f"{kind.call}"
        )
    if isinstance(definition, ast.ClassDef) and kind.is_function:
        if not _may_be_autograd_function(tree, definition):
            raise BadReference(
                f"{reference} is a class; {kind.what} must be a function that takes {kind.call} or "
                "a torch.autograd.Function"
            )
    elif isinstance(definition, ast.ClassDef) and _is_autograd_function(tree, definition):
        raise BadReference(
            f"{reference} is a torch.autograd.Function; {kind.what} must be a class or function "
            f"that takes {kind.call}"
        )
    arguments = _arguments(tree, definition)
    if decorators and isinstance(definition, ast.FunctionDef):
        return  # a decorator may change the signature
    if arguments is None:
        return
    positional = [*arguments.posonlyargs, *arguments.args]
    if _has_self(tree, definition):
        positional = positional[1:]
    least = len(positional) - len(arguments.defaults)
    has_no_parameters = not positional and not arguments.vararg and not arguments.kwonlyargs
    if has_no_parameters and isinstance(definition, ast.FunctionDef) and kind.is_function:
        return  # it returns the implementation, as the adapters of the CS336 tests do
    required_keywords = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None and argument.arg not in (*kind.parameters, "causal")
    ]
    too_few = len(positional) < kind.required and not arguments.vararg
    # Parameters after the required ones are passed by name, except for attention.
    unknown = not kind.is_function and any(
        argument.arg not in kind.parameters for argument in positional[kind.required : least]
    )
    no_options = kind is KINDS["optimizer"] and not arguments.kwarg
    if too_few or least > len(kind.parameters) or required_keywords or unknown or no_options:
        raise BadReference(
            f"{reference}: {kind.what} must take {kind.call}, got ({ast.unparse(arguments)})"
        )


def _arguments(tree: ast.Module, definition: Definition) -> ast.arguments | None:
    """Return the parameters of a function, or of `forward` or `__init__` of a class or its base.

    None if the method is not in the file.
    """
    if not isinstance(definition, ast.ClassDef):
        return definition.args
    wanted = "forward" if _is_autograd_function(tree, definition) else "__init__"
    for one in _family(tree, definition):
        for node in one.body:
            if isinstance(node, ast.FunctionDef) and node.name == wanted:
                return node.args
    return None


def _parameters(tree: ast.Module, definition: Definition) -> list[str] | None:
    arguments = _arguments(tree, definition)
    if arguments is None:
        return None
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return names[1:] if _has_self(tree, definition) else names


def _has_self(tree: ast.Module, definition: Definition) -> bool:
    """Return whether the first parameter is `self` or `ctx`, which the caller does not pass.

    `forward` of a torch.autograd.Function that defines `setup_context` has no `ctx`.
    """
    methods = {
        node.name
        for one in _family(tree, definition)
        for node in one.body
        if isinstance(node, ast.FunctionDef)
    }
    return isinstance(definition, ast.ClassDef) and "setup_context" not in methods


def _family(tree: ast.Module, definition: Definition) -> list[Definition]:
    """Return a definition and, for a class, its base classes in the same file."""
    family = [definition]
    for one in family:
        for base in one.bases if isinstance(one, ast.ClassDef) else ():
            parent = _definition(tree, ast.unparse(base))
            if parent is not None and parent not in family:
                family.append(parent)
    return family


def _bases(tree: ast.Module, definition: Definition) -> list[str]:
    """Return the base classes of a class, and of its bases, that are not in the same file."""
    return [
        ast.unparse(base)
        for one in _family(tree, definition)
        if isinstance(one, ast.ClassDef)
        for base in one.bases
        if _definition(tree, ast.unparse(base)) is None
    ]


def _is_autograd_function(tree: ast.Module, definition: Definition) -> bool:
    return any(base.endswith("Function") for base in _bases(tree, definition))


def _may_be_autograd_function(tree: ast.Module, definition: ast.ClassDef) -> bool:
    """Return whether a class may be a torch.autograd.Function, as far as its source shows."""
    known = ("Module", "ABC", "object", "Optimizer")
    return any(not base.endswith(known) for base in _bases(tree, definition))
