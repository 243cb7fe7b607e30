"""Parses YAML, records the line and column of every value, and rejects ambiguous YAML 1.1 syntax.

A value is identified by its path, a tuple of keys and indices such as `("grid", "seq_len", 2)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from jobs.errors import Position, Problem, shown

DataPath = tuple[str | int, ...]
# Aliases can expand a small file to a huge or deep document. No real sweep reaches these limits.
MAX_NODES = 100_000
MAX_DEPTH = 20
MAX_INT = 2**64


class Fault(NamedTuple):
    """An error at the value at a path, or at its key."""

    what: str
    path: DataPath
    at_key: bool = False


Faults = Iterator[Fault]


def fault(what: str, *path: str | int, at_key: bool = False) -> Fault:
    """Return an error at a path from the value that is checked."""
    return Fault(what, path, at_key)


def below(faults: Faults, *path: str | int) -> Faults:
    """Yield the errors of a value that lies at a path."""
    return (Fault(what, (*path, *inner), at_key) for what, inner, at_key in faults)


@dataclass
class Document:
    """The result of parsing a YAML text: its data, with positions, and the errors."""

    data: Any = None
    source: str = ""
    # The positions of the key and of the value at a path. For an item of a list they are the same.
    places: dict[DataPath, tuple[Position, Position]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def at(self, path: DataPath, key: bool = False) -> Position:
        """Return the position of the value at a path, or of its key.

        Without one, it is that of the innermost enclosing value.
        """
        for length in range(len(path), -1, -1):
            if found := self.places.get(path[:length]):
                return found[0 if key and length == len(path) else 1]
        return Position(self.source)

    def refuse(self, what: str, path: DataPath = (), key: bool = False) -> None:
        """Add an error at the value at a path, or at its key."""
        self.problems.append(Problem(self.at(path, key), what))

    def place(self, path: DataPath, where: Position) -> None:
        """Give one position to the value at a path as a whole, such as an argument."""
        kept = {inner: at for inner, at in self.places.items() if inner[: len(path)] != path}
        self.places = kept | {path: (where, where)}


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WRITTEN_TAG = re.compile(r"(?:&\S+\s+)?(!\S*)")  # an anchor may precede the tag
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_PLAIN: dict[str, bool | None] = {"true": True, "True": True, "false": False, "False": False}
_PLAIN |= dict.fromkeys(["", "~", "null", "Null", "NULL"])
# Ambiguous or forbidden unquoted values, as regular expressions, each with its error message
_TRAPS = {
    r"y|Y|n|N|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|TRUE|FALSE": "YAML 1.1 reads this as a "
    "boolean; write true or false, or quote it",
    r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9]*)?|[-+]?0[0-9_]+|[-+]?0[xXoObB][0-9a-fA-F_]+"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?(\.[0-9]|[0-9])[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?": (
        "YAML versions read this as different numbers or as text; write it in decimal, without _ "
        "or a leading 0 and with a point before an exponent (1.0e-4), or quote it"
    ),
    r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)": "infinity and NaN are not allowed; write a finite number",
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?": "YAML 1.1 reads this as a date; quote it",
}


def parse(content: str | bytes, source: str) -> Document:
    """Parse one YAML document. Errors are not raised, but listed in its `problems`.

    The `data` is None if the content is empty or cannot be parsed.
    """
    start = Position(source, 1, 1)
    document = Document(None, source, {(): (start, start)})
    try:
        text = content.decode() if isinstance(content, bytes) else content
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            document.data = _Builder(document).build(node, ())
        return document
    except UnicodeDecodeError as error:
        at = _place(source, error.object[: error.start].decode())
        what = f"byte 0x{error.object[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
    except yaml.reader.ReaderError as error:
        at = _place(source, text[: error.position])
        what = f"character U+{error.character:04X} is not allowed in YAML; remove it"
    except yaml.MarkedYAMLError as error:
        at = _marked(source, error.problem_mark or error.context_mark or loader.get_mark())
        what = "not valid YAML: " + " ".join(x for x in (error.context, error.problem) if x)
    except (RecursionError, ValueError) as error:  # PyYAML raises these for some invalid texts
        at = _marked(source, loader.get_mark())
        what = f"not valid YAML: {error}"
    document.problems = [Problem(at, what)]
    return document


def entries(data: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the indices and entries of a list of mappings, without values of another type."""
    listed = enumerate(data if isinstance(data, list) else [])
    return ((i, entry) for i, entry in listed if isinstance(entry, dict))


def _marked(source: str, mark: yaml.Mark) -> Position:
    return Position(source, mark.line + 1, mark.column + 1)


def _place(source: str, before: str) -> Position:
    """Return the position (file, line and column) directly after a text."""
    lines = re.split(r"\r\n|\r|\n", before)
    return Position(source, len(lines), len(lines[-1]) + 1)


class _Refused(Exception):
    """Raised with the error message for the node that is being read."""


class _Builder:
    """Converts PyYAML's nodes to data with positions, and collects the errors in a `Document`."""

    def __init__(self, document: Document):
        self.document = document
        self.count = 0  # number of nodes built so far

    def build(self, node: yaml.Node, path: DataPath, key_at: Position | None = None) -> Any:
        """Return the value of a node. If it is refused, report an error and return None."""
        at = _marked(self.document.source, node.start_mark)
        self.document.places[path] = (key_at or at, at)
        try:
            return self.value(node, path)
        except _Refused as error:
            self.document.problems.append(Problem(at, str(error)))
            return None

    def value(self, node: yaml.Node, path: DataPath) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            what = f"more than {MAX_NODES} keys and values, counting each use of an alias"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if len(path) > MAX_DEPTH:  # for example an alias inside the value that it refers to
            raise _Refused(f"values must not be nested more than {MAX_DEPTH} levels deep")
        _refuse_tag(node)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, path: DataPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = _marked(self.document.source, key_node.start_mark)
            try:
                key = _key(key_node)
                if key in result:
                    first, _ = self.document.places[*path, key]
                    what = f"duplicate key {key!r}, first set on line {first.line}; remove one"
                    raise _Refused(what)
            except _Refused as error:
                self.document.problems.append(Problem(at, str(error)))
                continue
            result[key] = self.build(value_node, (*path, key), at)
        return result


def _refuse_tag(node: yaml.Node) -> None:
    """Refuse a node with a tag in the text. PyYAML gives a tag to every node."""
    written = _WRITTEN_TAG.match(node.start_mark.buffer or "", node.start_mark.pointer)
    if written:
        raise _Refused(f"tag {shown(written[1], 40)!r} is not allowed; write a plain value")


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Refused("a key must be text, not a list or a mapping")
    _refuse_tag(node)
    if node.style is None and node.value == "<<":
        raise _Refused("merge keys (<<) are not allowed; use the key base or an alias")
    # `on` is a key of tables, and `n` is a common parameter. As a key they are unambiguous: no key
    # is a boolean.
    if node.style is None and node.value in ("on", "n", "N", "y", "Y"):
        return str(node.value)
    key = _scalar(node)
    if not isinstance(key, str):
        raise _Refused(f"key {node.value!r} must be text; quote it")
    return key


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if _SURROGATE.search(text):  # JSON writes characters above U+FFFF as surrogate pairs
        try:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            what = "a lone surrogate (\\ud800 to \\udfff) is not a character; remove it"
            raise _Refused(what) from None
    if node.style is not None:  # quoted text, or a block scalar
        return text
    if text in _PLAIN:
        return _PLAIN[text]
    if _INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) <= len(str(MAX_INT)) and abs(int(digits)) <= MAX_INT:
            return int(digits)
        raise _Refused(f"{shown(text, 40)!r}: an integer must have at most 64 bits")
    if _FLOAT.fullmatch(text):
        if math.isfinite(float(text)):
            return float(text)
        raise _Refused(f"{shown(text, 40)!r}: this number is too large for a 64-bit float")
    for form, what in _TRAPS.items():
        if re.fullmatch(form, text):
            raise _Refused(f"{shown(text, 40)!r}: {what}")
    return text
