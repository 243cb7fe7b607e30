"""Reads which modules a source file imports, without executing it."""

from __future__ import annotations

import ast
import hashlib
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jobs.code.source_text import counted_text, decoded


@dataclass(frozen=True)
class Import:
    """An import statement for one module: `import MODULE` or `from MODULE import NAMES`."""

    module: str  # dotted name; "" for `from . import NAMES`
    names: tuple[str, ...] = ()  # may be submodules
    level: int = 0  # number of leading dots


@dataclass(frozen=True)
class SourceFile:
    """What counts of a source file."""

    digest: str  # SHA-256 of the text that counts
    imports: tuple[Import, ...] = ()
    functions: frozenset[str] = frozenset()  # names of the functions at the top level


def read_source(path: Path) -> SourceFile:
    """Read a source file. The result is cached until the file changes.

    All text of a file with a syntax error counts, and its imports are unknown.
    """
    about = path.stat()
    return _read(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4096)
def _read(path: Path, mtime_ns: int, size: int) -> SourceFile:
    data = path.read_bytes()
    try:
        text = decoded(data)
        tree = ast.parse(text, str(path))
        counted = counted_text(text, tree)
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return SourceFile(hashlib.sha256(data).hexdigest())
    functions = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    digest = hashlib.sha256(counted.encode("utf-8", "surrogatepass")).hexdigest()
    return SourceFile(digest, tuple(dict.fromkeys(_imports(tree))), functions)


def _imports(tree: ast.Module) -> Iterator[Import]:
    """Yield the imports of a module, also those in functions, but not those for types only."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(node.module or "", names, node.level)
        elif isinstance(node, ast.If) and _is_for_types(node.test):
            nodes += node.orelse
        elif not isinstance(node, ast.expr):
            nodes += ast.iter_child_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    """Return whether the condition of an `if` statement is TYPE_CHECKING."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"
