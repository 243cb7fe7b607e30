"""Parses YAML, records the line and column of every value, and rejects ambiguous YAML 1.1 syntax.

`parse(text, source)` returns a `Document`: plain Python data, the position of each value, and a
list of all errors. A value is identified by its path, a tuple of keys and indices such as
`("grid", "seq_len", 2)`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from jobs.errors import Position, Problem

DataPath = tuple[str | int, ...]
# Aliases can expand a small file to a huge or deep document. No real sweep reaches these limits.
MAX_NODES = 100_000
MAX_DEPTH = 20
MAX_INT = 2**64
TOO_MANY = f"a file must have at most {MAX_NODES} keys and values, counting each use of an alias"


@dataclass
class Document:
    """The result of parsing a YAML text: plain data, positions and errors.

    A position is a file, line and column. Positions are stored by path. A path is a tuple of keys
    and indices that identifies a value or key, such as `("grid", "seq_len", 2)`.
    """

    data: Any = None
    source: str = ""
    positions: dict[DataPath, Position] = field(default_factory=dict)  # positions of values
    keys: dict[DataPath, Position] = field(default_factory=dict)  # positions of keys
    problems: list[Problem] = field(default_factory=list)

    def at(self, path: DataPath) -> Position:
        """Return the position (file, line and column) of the value at a path.

        A path is a tuple of keys and indices, such as `("grid", "seq_len", 2)`. If the value has no
        recorded position, return the position of the innermost enclosing value that has one.
        """
        for end in range(len(path), -1, -1):
            if path[:end] in self.positions:
                return self.positions[path[:end]]
        return Position(self.source)

    def at_key(self, path: DataPath) -> Position:
        """Return the position (file, line and column) of the key at a path.

        A path is a tuple of keys and indices, such as `("grid", "seq_len")`. If the key has no
        recorded position, return `at(path)`.
        """
        return self.keys.get(path) or self.at(path)


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)$")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
_WRITTEN_TAG = re.compile(r"(?:&\S+\s+)?(!\S*)")  # an anchor may precede the tag
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TRUE_FALSE = {"true": True, "True": True, "false": False, "False": False}
_NULL = {"", "~", "null", "Null", "NULL"}
# Patterns of ambiguous or forbidden unquoted values, each with its error message.
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
        "YAML 1.1 reads a leading 0 as octal; write the number without the 0, or quote it",
    ),
    (
        re.compile(r"[-+]?0[xXoObB][0-9a-fA-F_]+$"),
        "YAML versions differ in hexadecimal, octal and binary numbers; write it in decimal",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
        "YAML 1.1 reads this as text, not as a number; write it with a point and a sign, "
        "such as 1.0e-4",
    ),
    (
        re.compile(r"[-+]?(\.[0-9]|[0-9])[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?$"),
        "some YAML versions read this as a number, others as text; write the number without _",
    ),
    (
        re.compile(r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)$"),
        "infinity and NaN are not allowed; write a finite number",
    ),
    (
        re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?$"),
        "YAML 1.1 reads this as a date; quote it",
    ),
]


def parse(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        source: name of the text in positions, usually the path of the file.

    Returns:
        The document. Its `data` is None if the text is empty or cannot be parsed. Errors are not
        raised, but are listed in its `problems`.
    """
    document = Document(source=source, positions={(): Position(source, 1, 1)})
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        what = f"character U+{error.character:04X} is not allowed in YAML; remove it"
        document.problems.append(Problem(_place(source, text[: error.position]), what))
        return document
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        what = " ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem(_marked(source, mark), f"not valid YAML: {what}"))
    except (ValueError, RecursionError) as error:  # PyYAML raises these for some invalid texts
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        where = _marked(source, loader.get_mark())
        document.problems.append(Problem(where, f"not valid YAML: {what}"))
    except _TooManyNodes as error:
        document.problems.append(Problem(_marked(source, error.args[0]), TOO_MANY))
    else:
        try:
            document.data = _Builder(document).build(node, ()) if node is not None else None
        except _TooManyNodes as error:  # aliases count at each use
            document.problems = [Problem(_marked(source, error.args[0]), TOO_MANY)]
    return document


class _TooManyNodes(Exception):
    """Raised with the position of the first node after MAX_NODES nodes."""


class _Loader(yaml.SafeLoader):
    """Loader that stops after MAX_NODES nodes, which take seconds to parse."""

    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.count += 1
        if self.count > MAX_NODES:
            raise _TooManyNodes(self.get_mark())
        return super().compose_node(parent, index)


def decode(data: bytes, source: str) -> tuple[str, Problem | None]:
    """Decode the content of a file as UTF-8.

    Returns:
        The text and None. If a byte is invalid, an empty text and an error with its position.
    """
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        what = f"byte 0x{data[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
        return "", Problem(_place(source, before), what)


def _marked(source: str, mark: yaml.Mark) -> Position:
    return Position(source, mark.line + 1, mark.column + 1)


def _place(source: str, before: str) -> Position:
    """Return the position (file, line and column) directly after a text."""
    lines = re.split(r"\r\n|\r|\n", before)
    return Position(source, len(lines), len(lines[-1]) + 1)


class _Builder:
    """Converts PyYAML's nodes to plain Python data.

    The builder adds two things to a `Document`: the position (file, line and column) of each key
    and value, and the errors.
    """

    def __init__(self, document: Document):
        self.document = document
        self.open: set[int] = set()  # ids of the nodes being built, to find recursive aliases
        self.count = 0  # number of nodes built so far

    def problem(self, node: yaml.Node, message: str) -> None:
        self.document.problems.append(Problem(self.position(node), message))

    def position(self, node: yaml.Node) -> Position:
        return _marked(self.document.source, node.start_mark)

    def build(self, node: yaml.Node, path: DataPath) -> Any:
        self.document.positions[path] = self.position(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise _TooManyNodes(node.start_mark)
        if len(path) > MAX_DEPTH:
            self.problem(node, f"values must not be nested more than {MAX_DEPTH} levels deep")
            return None
        if id(node) in self.open:
            self.problem(node, "an alias inside the value that it refers to is not allowed")
            return None
        if self.tagged(node):
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self.scalar(node)
        finally:
            self.open.discard(id(node))

    def tagged(self, node: yaml.Node) -> bool:
        """Report an error and return True if the file gives this node a tag, such as !!int.

        PyYAML assigns a tag to every node. Therefore this function searches the text of the file
        for a written tag.
        """
        mark = node.start_mark
        written = mark.buffer is not None and _WRITTEN_TAG.match(mark.buffer, mark.pointer)
        if written:
            self.problem(node, f"tag {_short(written[1])!r} is not allowed; write a plain value")
        return bool(written)

    def mapping(self, node: yaml.MappingNode, path: DataPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, "a key must be text, not a list or a mapping")
                continue
            if self.tagged(key_node):
                continue
            if key_node.value == "<<" and key_node.style is None:
                self.problem(
                    key_node, "merge keys (<<) are not allowed; use the key base or an alias"
                )
                continue
            problems_before = len(self.document.problems)
            # `on` is a key of tables, and `n` is a common parameter. As a key they are unambiguous:
            # no key is a boolean.
            plain = key_node.style is None and key_node.value in ("on", "n", "N", "y", "Y")
            key = key_node.value if plain else self.scalar(key_node)
            if not isinstance(key, str):
                if len(self.document.problems) == problems_before:
                    self.problem(key_node, f"key {key_node.value!r} must be text; quote it")
                continue
            if key in result:
                first = self.document.keys[(*path, key)]
                self.problem(
                    key_node,
                    f"duplicate key {key!r}, first set on line {first.line}; remove one of the two",
                )
                continue
            self.document.keys[(*path, key)] = self.position(key_node)
            result[key] = self.build(value_node, (*path, key))
        return result

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if _SURROGATE.search(text):  # JSON writes characters above U+FFFF as surrogate pairs
            try:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self.problem(
                    node, "a lone surrogate (\\ud800 to \\udfff) is not a character; remove it"
                )
                return None
        if node.style is not None:  # quoted text, or a block scalar
            return text
        if text in _NULL:
            return None
        if text in _TRUE_FALSE:
            return _TRUE_FALSE[text]
        if _INT.match(text):
            digits = text.replace("_", "")
            if len(digits) <= len(str(MAX_INT)) and abs(int(digits)) <= MAX_INT:
                return int(digits)
            self.problem(node, f"{_short(text)!r}: an integer must have at most 64 bits")
            return None
        if _FLOAT.match(text):
            if math.isfinite(float(text)):
                return float(text)
            self.problem(node, f"{_short(text)!r}: this number is too large for a 64-bit float")
            return None
        for pattern, message in _TRAPS:
            if pattern.match(text):
                self.problem(node, f"{_short(text)!r}: {message}")
                return None
        return text


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
