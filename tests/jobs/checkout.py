"""Git repositories for tests: small ones, and a checkout of this project that a test may change."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.jobs.harness import ROOT, call, run_python

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgSign=false")
# A benchmark that returns a constant, to tell which version of its file was executed.
BENCHMARK = """\
import os

from systems.benchmark import BenchmarkParams

PRELOAD = ()

class Params(BenchmarkParams):
    index: int = 0

def run(params):
    import helper
    facts = {"code": helper.VALUE, "round": os.environ.get("RUN_ROUND")}
    return {"samples_ms": {"forward": [1.0]}, "facts": facts}
"""
SWEEP = "{name: own, benchmark: own.bench, grid: {index: [%s]}, runs_per_job: 1}"


class Checkout:
    """A git repository in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        command = ["git", *AUTHOR, *arguments]
        return subprocess.run(
            command, cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self, **files: str) -> str:
        """Write files, given as `name="text"` for name.py, commit everything, return the commit."""
        for name, text in files.items():
            self.write(f"{name}.py", text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")
        return self.git("rev-parse", "HEAD")

    def python(
        self, *arguments: str | Path, project: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m ARGUMENTS` in this folder. `stdout` of the result contains stderr, too."""
        environment = {"PYTHONPATH": str(project), **environment}
        return run_python("-m", *arguments, environment=environment, folder=self.folder)

    def submit(self, *options: str | Path, project: Path | None = None) -> str:
        """Submit own.yaml to the local queue, which must succeed, and return what was printed.

        Args:
            project: checkout of this project whose command is run. None: call that of the tests.
        """
        command = ("jobs.submit", "own.yaml", "--local", *options)
        done = self.python(*command, project=project) if project else self.call(*command)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def call(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Like `python` with this project, but call the command in the test's process."""
        sys.path.insert(0, str(self.folder))
        try:
            with contextlib.chdir(self.folder):
                return call(*arguments)
        finally:
            sys.path.remove(str(self.folder))
            for name, module in list(sys.modules.items()):
                if any(Path(path).is_relative_to(self.folder) for path in _paths(module)):
                    del sys.modules[name]


def _paths(module: ModuleType) -> list[str]:
    """Return the path of a module, or the folders of a package."""
    path = getattr(module, "__file__", None)
    return [path] if path else list(getattr(module, "__path__", []))


def own_repository(folder: Path, indices: str = "0") -> Checkout:
    """Return a committed repository with a benchmark, its helper module and a sweep."""
    own = Checkout(folder)
    own.write("own/bench.py", BENCHMARK)
    own.write("own.yaml", SWEEP % indices)
    own.write(".gitignore", "__pycache__/\nlogs/\n.code_state.json\n")
    own.commit(helper="VALUE = 'old'\n")
    return own


def project_checkout(folder: Path) -> Checkout:
    """Return a repository that contains this project, too, with one commit."""
    for name in ("jobs", "systems"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return own_repository(folder)
