"""The part of a source file that counts for its hash: no comments, docstrings or blank lines.

The result does not depend on the version of Python. It is the text of the file, in which the parts
that do not count are cut out, and not its syntax tree, because trees differ between versions.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import token
import tokenize
from collections.abc import Iterator

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Python 3.12 and later split f-strings into tokens. Earlier versions have one token for each.
_STARTS = {getattr(token, name, -1) for name in ("FSTRING_START", "TSTRING_START")}
_ENDS = {getattr(token, name, -1) for name in ("FSTRING_END", "TSTRING_END")}
# A comment or a string without its prefix. Exact in code that Python 3.11 can parse, where an
# f-string cannot contain its own quotes, and much faster than the tokenizer of Python 3.11.
_COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""",
    re.DOTALL,
)
# Stands for a line break inside a string. Source code cannot contain this character.
_BREAK = "\0"

Edit = tuple[int, int, str]  # first and last position in the text, and its replacement


def decoded(data: bytes) -> str:
    """Return the text of a source file, with `\\n` at the ends of lines.

    Raises SyntaxError or UnicodeDecodeError if the encoding that it declares is unknown or wrong.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def counted_text(text: str, tree: ast.Module) -> str:
    """Return the text of a source file without comments, docstrings, blank lines, trailing spaces.

    Those inside strings count. `text` is from `decoded`. Raises SyntaxError or tokenize.TokenError
    if it cannot be split into tokens.
    """
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    edits = [*_docstrings(tree, lines, starts), *_comments_and_strings(text, starts)]
    kept: list[str] = []
    position = 0
    for start, end, replacement in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
        if start >= position:  # else it is inside a docstring
            kept += [text[position:start], replacement]
            position = end
    kept.append(text[position:])
    counted = (line.rstrip() for line in "".join(kept).split("\n"))
    return "\n".join(line for line in counted if line).replace(_BREAK, "\n")


def _docstrings(tree: ast.Module, lines: list[str], starts: list[int]) -> Iterator[Edit]:
    """Yield the edits that remove the docstrings. `starts` has the position of each line."""

    def position(line: int, column: int) -> int:
        # Columns of the syntax tree are bytes of UTF-8.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.expr):  # which contains no statements
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None and first.end_col_offset is not None
            start = position(first.lineno, first.col_offset)
            yield start, position(first.end_lineno, first.end_col_offset), ""


def _comments_and_strings(text: str, starts: list[int]) -> Iterator[Edit]:
    """Yield the edits that remove comments and mark line breaks inside strings."""
    if sys.version_info < (3, 12):
        for found in _COMMENT_OR_STRING.finditer(text):
            kept = "" if found[0].startswith("#") else found[0].replace("\n", _BREAK)
            yield *found.span(), kept
        return
    depth = 0  # of f-strings in f-strings
    outermost = 0  # start of the outermost f-string
    for item in tokenize.generate_tokens(io.StringIO(text).readline):
        start = starts[item.start[0] - 1] + item.start[1]
        end = starts[item.end[0] - 1] + item.end[1]
        if item.type in _STARTS:
            outermost = outermost if depth else start
            depth += 1
        elif item.type in _ENDS:
            depth -= 1
            if not depth:
                yield outermost, end, text[outermost:end].replace("\n", _BREAK)
        elif depth:
            continue
        elif item.type == token.STRING:
            yield start, end, text[start:end].replace("\n", _BREAK)
        elif item.type == token.COMMENT:
            yield start, end, ""
