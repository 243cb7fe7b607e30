"""One case of bad input: a command line, the files that it needs, and words of its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Content = str | bytes | Callable[[Path], object]  # a function creates the file at a path
HEAD = "name: toy\nbenchmark: tests.benchmarks.toy\n"
ONE = "fixed: {size: 1}\n"
PLAN = ("--local", "--dry-run")


@dataclass(frozen=True)
class Case:
    """Bad input. All cases must end with exit code 2 and a short message."""

    words: tuple[str, ...]  # the command, as for tests.jobs.harness.call
    message: str  # part of the output: what is wrong, and where
    files: dict[str, Content] = field(default_factory=dict)  # by path in the current folder
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Create the files of the case in a folder."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                content = content.encode("utf-8", "surrogateescape")
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                content(path)


def sweep(text: str, message: str, head: str = HEAD, **files: Content) -> Case:
    """Return the case of a sweep file. Keywords are further files, by stem of a .yaml file."""
    given: dict[str, Content] = {"sweep.yaml": head + text}
    given |= {f"{name}.yaml": content for name, content in files.items()}
    return Case(("jobs.submit", "sweep.yaml", *PLAN), message, given)
