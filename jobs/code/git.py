"""Calls of git. They change no repository, take no locks and have a timeout.

All functions raise GitError if git gives no answer.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from jobs.errors import CommandError

CODE = (".py", ".so", ".cu", ".cuh", ".cpp", ".h")  # how names of files with code end
TIMEOUT_S = 30.0  # of a git command that reads; git may hang on a file system that does not answer
# Variables that a surrounding git command, such as a hook, sets. They select another repository.
_LEAKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
_SETTINGS = (
    "core.fsmonitor=false",
    "core.quotePath=false",
    "core.hooksPath=/dev/null",  # executes no hooks of the repository
    "core.safecrlf=false",  # line ends are no errors
)
_hung: set[Path] = set()  # repositories whose git command did not end; not asked again


class GitError(CommandError):
    """Raised if git gives no answer."""


@dataclass(frozen=True)
class WorkingTree:
    """Result of `git status`."""

    commit: str | None  # None: the repository has no commit
    changed: bool  # whether tracked files differ from the commit
    untracked: list[str]  # names of files that are neither tracked nor ignored

    @property
    def is_dirty(self) -> bool:
        """Whether code may differ from the commit. New files without code do not count."""
        return self.changed or any(name.endswith(CODE) for name in self.untracked)


def git(
    root: Path,
    *arguments: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float | None = None,
) -> bytes:
    """Run a git command and return its output."""
    limit_s = timeout_s or TIMEOUT_S
    silent = GitError(f"git did not answer within {limit_s:g} s in {root}")
    if root in _hung:
        raise silent
    without = {name: value for name, value in os.environ.items() if name not in _LEAKS}
    options = ["--no-optional-locks", *(word for one in _SETTINGS for word in ("-c", one))]
    try:
        done = subprocess.run(
            ["git", *options, *arguments],
            cwd=root,
            env=without | {"LC_ALL": "C"} | dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        _hung.add(root)
        raise silent from None
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        first = words[0].removeprefix("fatal: ")
        raise GitError(f"git {arguments[0]} failed with exit code {done.returncode}: {first}")
    return done.stdout


def status(root: Path, ignored: list[str]) -> WorkingTree:
    """Return the commit of a repository, and whether files, except ignored ones, differ from it."""
    options = ("--porcelain=v2", "--branch", "--untracked-files=all", "--no-renames", "-z")
    output = git(root, "status", *options, *_except(ignored))
    lines = output.decode(errors="replace").split("\0")
    commit = next((line[13:] for line in lines if line.startswith("# branch.oid ")), None)
    return WorkingTree(
        commit=None if commit == "(initial)" else commit,
        changed=any(line.startswith(("1 ", "2 ", "u ")) for line in lines),
        untracked=sorted(line[2:] for line in lines if line.startswith("? ")),
    )


def diff(root: Path, ignored: list[str]) -> bytes:
    """Return the binary diff of the tracked files, except ignored ones, against the commit."""
    options = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames")
    return git(root, "diff", *options, "HEAD", *_except(ignored))


def tracked(root: Path, names: list[str]) -> set[str]:
    """Return those of the given files that git tracks, also in submodules, relative to the root."""
    options = ("-z", "--recurse-submodules")
    return set(_names(git(root, "--literal-pathspecs", "ls-files", *options, "--", *names)))


def tracked_files(root: Path, ignored: list[str]) -> list[str]:
    """Return the names of all tracked files but ignored ones, including those of submodules."""
    return _names(git(root, "ls-files", "-z", "--recurse-submodules", *_except(ignored)))


def _names(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _except(ignored: list[str]) -> list[str]:
    return ["--", ".", *(f":(exclude,literal){name}" for name in ignored)]
