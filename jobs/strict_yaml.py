"""YAML in which every value knows its line and column, and in which YAML 1.1's traps are errors.

`parse(text, source)` returns plain Python data and a map from path to position; what is wrong
comes back as a list of `Problem`s, all at once. A path is a tuple of keys and indices:
`("grid", "seq_len", 2)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
MAX_NODES = 200_000  # an alias may multiply a small file; nobody writes a sweep this large


@dataclass(frozen=True, order=True)
class Position:
    """A place in a source: 1-based line and column."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in the input, and where."""

    position: Position
    message: str

    def __str__(self) -> str:
        return f"{self.position}: {self.message}"


class InputError(ValueError):
    """Everything wrong with what the user gave, one line each."""

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(set(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass
class Document:
    """Plain data with the position of every value in it (and of every key, under `keys`)."""

    data: Any = None
    source: str = ""
    positions: dict[Path, Position] = field(default_factory=dict)
    keys: dict[Path, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def at(self, path: Path) -> Position:
        """The position of a path, or of the nearest enclosing value that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.positions:
                return self.positions[path[:end]]
        return Position(self.source)

    def at_key(self, path: Path) -> Position:
        return self.keys.get(path) or self.at(path)


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)$")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
_TRUE_FALSE = {"true": True, "True": True, "false": False, "False": False}
_NULL = {"", "~", "null", "Null", "NULL"}
# What YAML 1.1 (and so PyYAML) reads otherwise than it looks, with what to write instead.
_TRAPS: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(r"(y|Y|n|N|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|TRUE|FALSE)$"),
        "YAML 1.1 reads this as a boolean; write true or false, or quote it",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9]*)?$"),
        "YAML 1.1 reads this as a number in base 60; write plain seconds or minutes, or quote it",
    ),
    (
        re.compile(r"[-+]?0[0-9_]+$"),
        "YAML 1.1 reads a leading 0 as octal; write the number without it, or quote it",
    ),
    (
        re.compile(r"[-+]?0[xXoObB][0-9a-fA-F_]+$"),
        "hexadecimal, octal and binary are read differently by YAML versions; write it in decimal",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
        "YAML 1.1 reads this as text, not as a number; write it with a point and a sign (1.0e-4)",
    ),
    (
        re.compile(r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)$"),
        "infinity and NaN are not valid values here",
    ),
    (
        re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?$"),
        "YAML 1.1 reads this as a date; quote it",
    ),
]


def parse(text: str, source: str) -> Document:
    """Parse one YAML document. Never raises: look at `.problems`."""
    document = Document(source=source)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Position(source, mark.line + 1, mark.column + 1) if mark else Position(source)
        what = " ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem(where, f"not valid YAML: {what}"))
        return document
    except yaml.YAMLError as error:  # the reader's errors have an offset but no mark
        document.problems.append(Problem(Position(source), f"not valid YAML: {error}"))
        return document
    except RecursionError:
        document.problems.append(Problem(Position(source), "nested too deeply"))
        return document
    if node is None:
        document.problems.append(Problem(Position(source, 1, 1), "the file is empty"))
        return document
    document.data = _Builder(document).build(node, ())
    return document


class _Builder:
    def __init__(self, document: Document):
        self.document = document
        self.open: set[int] = set()
        self.count = 0

    def problem(self, node: yaml.Node, message: str) -> None:
        self.document.problems.append(Problem(self.position(node), message))

    def position(self, node: yaml.Node) -> Position:
        mark = node.start_mark
        return Position(self.document.source, mark.line + 1, mark.column + 1)

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.document.positions[path] = self.position(node)
        self.count += 1
        if self.count > MAX_NODES:
            if self.count == MAX_NODES + 1:
                self.problem(node, f"more than {MAX_NODES} values, aliases counted")
            return None
        if id(node) in self.open:
            self.problem(node, "an alias inside the value it names")
            return None
        if self.tagged(node):
            self.problem(node, f"tag {node.tag!r} is not read; write a plain value")
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
            return self.scalar(node)
        finally:
            self.open.discard(id(node))

    def tagged(self, node: yaml.Node) -> bool:
        """Whether the author wrote a tag: a tag that is not YAML's own, or a `!` where it starts."""
        mark = node.start_mark
        written = mark.buffer is not None and mark.buffer[mark.pointer : mark.pointer + 1] == "!"
        return written or not node.tag.startswith("tag:yaml.org,2002:")

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, "a key must be text, not a list or a mapping")
                continue
            key = key_node.value
            if key == "<<" and key_node.style is None:
                self.problem(key_node, "merge keys (<<) are not read; use base: or an alias")
                continue
            read = self.scalar(key_node)
            if not isinstance(read, str):
                if read is not None:
                    self.problem(key_node, f"key {key!r} must be text; quote it")
                continue
            if key in result:
                first = self.document.keys[(*path, key)]
                self.problem(
                    key_node,
                    f"duplicate key {key!r}, first on line {first.line} (the later one would win)",
                )
                continue
            self.document.keys[(*path, key)] = self.position(key_node)
            result[key] = self.build(value_node, (*path, key))
        return result

    def scalar(self, node: yaml.Node) -> Any:
        text = node.value
        if node.style is not None:  # quoted, or a block: text as it stands
            return text
        if text in _NULL:
            return None
        if text in _TRUE_FALSE:
            return _TRUE_FALSE[text]
        if _INT.match(text):
            return int(text.replace("_", ""))
        if _FLOAT.match(text):
            return float(text)
        for pattern, message in _TRAPS:
            if pattern.match(text):
                self.problem(node, f"{text!r}: {message}")
                return None
        return text
