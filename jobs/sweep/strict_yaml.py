"""Parses YAML, records the line and column of every value, and rejects ambiguous YAML 1.1 syntax.

A value is identified by its path, a tuple of keys and indices such as `("grid", "seq_len", 2)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from jobs.errors import Position, Problem, shown

DataPath = tuple[str | int, ...]
# Aliases can expand a small file to a huge or deep document. No real sweep reaches these limits.
MAX_NODES = 100_000
MAX_DEPTH = 20
MAX_INT = 2**64
TOO_MANY = f"a file must have at most {MAX_NODES} keys and values, counting each use of an alias"


class PlacedDict(dict[str, Any]):
    """A mapping that knows the positions of its keys and values."""

    def __init__(self) -> None:
        self.keys_at: dict[str, Position] = {}
        self.values_at: dict[str, Position] = {}

    def put(self, key: str, value: Any, key_at: Position, value_at: Position) -> None:
        self[key] = value
        self.keys_at[key], self.values_at[key] = key_at, value_at

    def put_all(self, other: PlacedDict) -> None:
        self.update(other)
        self.keys_at.update(other.keys_at)
        self.values_at.update(other.values_at)


class PlacedList(list[Any]):
    """A list that knows the positions of its items."""

    def __init__(self) -> None:
        self.values_at: dict[int, Position] = {}


@dataclass
class Document:
    """The result of parsing a YAML text: its data, with positions, and the errors."""

    data: Any = None
    source: str = ""
    start: Position | None = None  # position of the data as a whole
    problems: list[Problem] = field(default_factory=list)

    def at(self, path: DataPath, key: bool = False) -> Position:
        """Return the position of the value at a path, or of its key.

        Without one, it is that of the innermost enclosing value. A value from the command line has
        one position as a whole.
        """
        found, here = self.start or Position(self.source), self.data
        for i, part in enumerate(path):
            places = getattr(here, "values_at", {})
            keys = getattr(here, "keys_at", {}) if key and i == len(path) - 1 else {}
            inner = keys.get(part) or places.get(part) or found
            if found.line or inner.source != found.source:
                found = inner
            try:
                here = here[part]
            except (LookupError, TypeError):
                break
        return found


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
    document = Document(None, source, Position(source, 1, 1))
    try:
        text = content.decode() if isinstance(content, bytes) else content
        loader = yaml.SafeLoader(text)
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        what = f"byte 0x{error.object[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
        document.problems.append(Problem(_place(source, before), what))
        return document
    except yaml.reader.ReaderError as error:
        what = f"character U+{error.character:04X} is not allowed in YAML; remove it"
        document.problems.append(Problem(_place(source, text[: error.position]), what))
        return document
    mark = None
    try:
        node = loader.get_single_node()
        if node is not None:
            document.start = _marked(source, node.start_mark)
            document.data = _Builder(document).build(node)
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "not valid YAML: " + " ".join(x for x in (error.context, error.problem) if x)
    except RecursionError:
        what = "not valid YAML: nested too deeply"
    except _TooManyNodes as error:  # aliases count at each use
        mark, what = error.args[0], TOO_MANY
    except ValueError as error:  # PyYAML raises these for some invalid texts
        what = f"not valid YAML: {error}"
    document.problems = [Problem(_marked(source, mark or loader.get_mark()), what)]
    return document


class _TooManyNodes(Exception):
    """Raised with the position of the first node after MAX_NODES nodes."""


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
        self.open: set[int] = set()  # ids of the nodes being built, to find recursive aliases
        self.count = 0  # number of nodes built so far

    def position(self, node: yaml.Node) -> Position:
        return _marked(self.document.source, node.start_mark)

    def build(self, node: yaml.Node, read: Callable[[yaml.Node], Any] | None = None) -> Any:
        """Return the value of a node. If it is refused, report an error and return None."""
        try:
            return (read or self.value)(node)
        except _Refused as error:
            self.document.problems.append(Problem(self.position(node), str(error)))
            return None

    def value(self, node: yaml.Node) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise _TooManyNodes(node.start_mark)
        if len(self.open) > MAX_DEPTH:
            raise _Refused(f"values must not be nested more than {MAX_DEPTH} levels deep")
        if id(node) in self.open:
            raise _Refused("an alias inside the value that it refers to is not allowed")
        _refuse_tag(node)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        self.open.add(id(node))
        result = self.mapping(node) if isinstance(node, yaml.MappingNode) else self.list(node)
        self.open.discard(id(node))
        return result

    def list(self, node: yaml.Node) -> PlacedList:
        result = PlacedList()
        for i, child in enumerate(node.value):
            result.values_at[i] = self.position(child)
            result.append(self.build(child))
        return result

    def mapping(self, node: yaml.Node) -> PlacedDict:
        result = PlacedDict()
        for key_node, value_node in node.value:
            key = self.build(key_node, _key)
            at = self.position(key_node)
            if key in result:
                first = f"first set on line {result.keys_at[key].line}; remove one"
                self.document.problems.append(Problem(at, f"duplicate key {key!r}, {first}"))
            elif key is not None:
                result.put(key, self.build(value_node), at, self.position(value_node))
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
