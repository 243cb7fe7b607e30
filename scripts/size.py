"""Print the lines of each room of the project beside the target in CONTRIBUTING.md (make size).

python scripts/size.py [ROOT]

Lines are those of Python files: code, docstrings, and other (comments and blank lines). Files in
tests/ count as tests only. Nothing fails; the sizes are there to be looked at.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Rows of the table in CONTRIBUTING.md: | name | `files` `files` ... | target |
ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| (?P<files>(`[^`|]+` ?)+) *\| (?P<target>[\d,]*) *\|$", re.M
)
REST = "elsewhere"
TOP = ("jobs", "systems", "scripts", "examples", "aggregate.py")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    code: int = 0
    docstrings: int = 0
    other: int = 0  # comments and blank lines

    @property
    def lines(self) -> int:
        return self.code + self.docstrings + self.other

    def __add__(self, more: Size) -> Size:
        sums = (self.code + more.code, self.docstrings + more.docstrings, self.other + more.other)
        return Size(*sums)


def size_of(path: Path) -> Size:
    text = path.read_text()
    doc: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            doc.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    rest = [line.strip() for i, line in enumerate(text.splitlines(), 1) if i not in doc]
    code = sum(bool(line) and not line.startswith("#") for line in rest)
    return Size(code, len(doc), len(rest) - code)


def main() -> None:
    root = Path(sys.argv[1]) if sys.argv[1:] else ROOT
    rooms = list(ROW.finditer((ROOT / "CONTRIBUTING.md").read_text()))
    room_of: dict[Path, str] = {}
    for room in rooms:
        for pattern in re.findall(r"`([^`]+)`", room["files"]):
            for path in root.glob(f"{pattern}**/*.py" if pattern.endswith("/") else pattern):
                room_of[path] = room["name"]  # the last row that names a file
    sizes: dict[str, Size] = defaultdict(Size)
    tests: dict[str, int] = defaultdict(int)
    for path in root.glob("**/*.py"):
        top = path.relative_to(root).parts[0]
        if top == "tests":
            tests[room_of.get(path, REST)] += size_of(path).lines
        elif top in TOP:
            sizes[room_of.get(path, REST)] += size_of(path)
    print(row("room", "lines", "target", "code", "docstrings", "other", "tests"))
    targets = {room["name"]: room["target"] for room in rooms}
    targets |= {REST: ""} if REST in sizes.keys() | tests.keys() else {}
    sizes["all"], tests["all"] = sum(sizes.values(), Size()), sum(tests.values())
    for name, target in (targets | {"all": ""}).items():
        one = sizes[name]
        print(row(name, one.lines, target, one.code, one.docstrings, one.other, tests[name]))


def row(name: str, *cells: str | int) -> str:
    texts = (cell if isinstance(cell, str) else f"{cell:,}" for cell in cells)
    return f"{name:40}" + "".join(f"{text:>11}" for text in texts)


if __name__ == "__main__":
    main()
