"""List all messages in the source code of the project, for proofreading.

python scripts/list_messages.py [PATH ...]

A message is a string that has several words and is not a docstring. Expressions in f-strings are
shown as {...}.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DEFAULT_PATHS = ["aggregate.py", "jobs", "systems", "scripts"]
SEVERAL_WORDS = re.compile(r"[A-Za-z{}'.,;:]+ [A-Za-z{}'(]")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message."""
    tree = ast.parse(source)
    parts_and_docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            parts_and_docstrings.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts_and_docstrings.update(node.values)
    for node in ast.walk(tree):
        if node in parts_and_docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(_part(value) for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if SEVERAL_WORDS.search(text):
            yield node.lineno, " ".join(text.split())


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return f"{{{ast.unparse(node.value)}}}" if isinstance(node, ast.FormattedValue) else ""


def main() -> None:
    for root in map(Path, sys.argv[1:] or DEFAULT_PATHS):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for line, text in messages(path.read_text()):
                print(f"{path}:{line}: {text}")


if __name__ == "__main__":
    main()
