"""The text of a source file that counts."""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from jobs.code.imports import read_source
from jobs.code.source_text import counted_text, decoded
from tests.jobs.harness import ROOT

OTHER_PYTHONS = ("python3.11", "python3.12", "python3.13")
PRINT_DIGESTS = (
    "import sys; from pathlib import Path; from jobs.code.imports import read_source; "
    "[print(read_source(Path(name)).digest) for name in sys.argv[1:]]"
)
TRICKY = r'''
import os


def f(x, *, y="#"):  # a comment
    """A docstring with 'quotes' and # no comment."""
    é = "é"; text = f"{x!r:#x} {y + '#'} # text"  # é
    long = f"""first@@
    {x:>{len(é)}}

    # text
    """
    return text, long, r"\"#", b"#", """a

    b"""


@decorator("#")  # why
class C:
    'Docstring' " in two parts"  # comment

    @property
    async def g(self):
        """Only a docstring."""

    def h(self): "Docstring"; return 1
'''.replace("@@", "  ")
COUNTED = r'''import os
def f(x, *, y="#"):
    é = "é"; text = f"{x!r:#x} {y + '#'} # text"
    long = f"""first@@
    {x:>{len(é)}}

    # text
    """
    return text, long, r"\"#", b"#", """a

    b"""
@decorator("#")
class C:
    @property
    async def g(self):
    def h(self): ; return 1'''.replace("@@", "  ")


def counted(text: str) -> str:
    text = decoded(text.encode())
    return counted_text(text, ast.parse(text))


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    assert counted(TRICKY) == COUNTED
    assert counted(TRICKY.replace("\n", "\r\n")) == COUNTED


def test_code_counts() -> None:
    for edit in (("y + '#'", "y + '##'"), ("first  \n", "first\n"), ("a\n\n    b", "a\n    b")):
        assert counted(TRICKY.replace(*edit)) != COUNTED


SOURCES = sorted(ROOT.glob("systems/**/*.py"))
SOME = SOURCES[::10]


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p in SOME else pytest.mark.exhaustive) for p in SOURCES],
    ids=lambda path: path.stem,
)
def test_removing_what_does_not_count_keeps_the_program(path: Path) -> None:
    text = decoded(path.read_bytes())
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    first = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    docstrings = [((d.lineno, d.col_offset), (d.end_lineno, d.end_col_offset)) for d in first]
    kept = [t.string for t in tokens(text) if not any(a <= t.start < b for a, b in docstrings)]
    assert kept == [token.string for token in tokens(counted_text(text, ast.parse(text)))]


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def tokens(text: str) -> list[tokenize.TokenInfo]:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in found if token.type not in LAYOUT]


def test_all_text_of_a_file_with_a_syntax_error_counts(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    digests = set()
    for text in ("def f(:\n", "def f(:\n# comment\n", "x = '\0'\n"):
        path.write_text(text)
        digests.add(read_source(path).digest)
        assert not read_source(path).imports
    assert len(digests) == 3


@pytest.mark.slow
@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_other_versions_of_python_give_the_same_hash(python: str, tmp_path: Path) -> None:
    if (
        not shutil.which(python)
        or subprocess.run([python, "-c", ""], capture_output=True).returncode
    ):
        pytest.skip(f"needs {python}")
    (tmp_path / "tricky.py").write_text(TRICKY)
    files = [str(tmp_path / "tricky.py"), *map(str, SOURCES)]
    digests = [
        subprocess.run(
            [program, "-c", PRINT_DIGESTS, *files],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for program in (sys.executable, python)
    ]  # fmt: skip
    assert digests[0] == digests[1] and len(digests[0].split()) == len(files)
