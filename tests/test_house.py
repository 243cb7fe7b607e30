"""Imports follow the table in CONTRIBUTING.md, and are not circular."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

from tests.jobs.harness import ROOT

Graph = dict[str, set[str]]

# With --against, the present `jobs` executes the `systems` of another checkout, back to commit
# 2616937580. A process that does so starts in one of RUN_OTHER_CODE. What these and the modules of
# `jobs` that they import use of `systems` must exist in every such checkout, with the same meaning.
RUN_OTHER_CODE = ("jobs.launch.check_checkout", "jobs.worker.torchrun", "jobs.worker.run_process")
OF_OTHER_CODE: Graph = {
    "systems.benchmark": {"ARTIFACTS", "Unsupported", "WrongOutput"},
    "systems.external.parameter": {"Implementation"},
    "systems.external.reference": {"is_reference"},
    # Found by name: modules in the package, and a module if the benchmark has imported it.
    "systems.benchmarks": set(),
    "systems.measure.windows": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a module imports: at its top, in functions, or for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "write imports from the root"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else node.module


@cache
def imports() -> Graph:
    """Return the modules that each module of the project imports, from the project or not."""
    paths = [ROOT / "aggregate.py"]
    paths += [path for name in ("jobs", "systems") for path in (ROOT / name).rglob("*.py")]
    modules = {module_name(path): path.read_text(encoding="utf-8") for path in paths}
    return {
        name: set(imported(ast.parse(text), modules))
        for name, text in sorted(modules.items())
        if text  # leave out empty __init__.py files
    }


@cache
def rows() -> list[tuple[set[str], set[str]]]:
    """Return the rows of the import table in CONTRIBUTING.md, top to bottom.

    A row has the names of its packages or modules, and the names that they may import.
    """
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| package |"))
    table: list[tuple[set[str], set[str]]] = []
    for line in takewhile(lambda line: line.startswith("|"), lines[head + 2 :]):
        _, package, _, given, _ = line.split("|")
        names, may_import = re.findall(r"`(.+?)`", package), set(re.findall(r"`(.+?)`", given))
        if given.split(",")[0].strip() == "above":
            package = names[0].partition(".")[0]
            above = [name for earlier, _ in table for name in earlier]
            may_import |= {name for name in above if row_of(name, [package])}
        table.append((set(names), may_import))
    return table


def row_of(module: str, names: Iterable[str]) -> str | None:
    """Return the longest of `names` that is the module itself or a package around it."""
    fitting = [name for name in names if module == name or module.startswith(f"{name}.")]
    return max(fitting, key=len, default=None)


def wrong_ways(imports: Mapping[str, set[str]], allowed: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that the table does not allow, and the modules that are in no row."""
    wrong = []
    for module, targets in imports.items():
        own = row_of(module, allowed)
        if own is None:
            wrong.append(f"{module} is in no row")
            continue
        for target in sorted(targets):
            top = target.partition(".")[0]
            if top not in sys.stdlib_module_names:
                target_row = row_of(target, allowed) or top
                if target_row not in allowed[own]:
                    wrong.append(f"{module} imports {target}; {own} may not import {target_row}")
    return wrong


def test_no_circle() -> None:
    """A CycleError has the modules, or the rows of the table, of one circle."""
    TopologicalSorter(imports()).prepare()
    assert len(rows()) > 10
    TopologicalSorter({name: may for names, may in rows() for name in names}).prepare()


def test_imports_go_the_way_that_contributing_says() -> None:
    allowed = {name: names | may_import for names, may_import in rows() for name in names}
    assert {row_of(module, allowed) for module in imports()} >= set(allowed), (
        "a row without modules"
    )
    found = wrong_ways(imports(), allowed)
    assert not found, "\n".join(found)


def uses_of_systems(module: str) -> Iterator[tuple[str, str]]:
    """Yield modules of `systems` that a module imports or names in a string, and what of them."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"systems[\w.]*", str(node.value)):
            yield str(node.value).rstrip("."), ""


def test_little_of_another_checkout_is_used_by_the_launcher() -> None:
    reached: set[str] = set()
    waiting = list(RUN_OTHER_CODE)
    while waiting:
        reached.add(module := waiting.pop())
        named = {".".join(target.split(".")[:n]) for target in imports()[module] for n in (1, 2, 3)}
        waiting += [m for m in named & imports().keys() - reached if m.startswith("jobs")]
    used: Graph = {}
    for source, name in {use for module in reached for use in uses_of_systems(module)}:
        if source.partition(".")[0] == "systems":
            used.setdefault(source, set()).update({name} - {""})
    assert used == OF_OTHER_CODE
