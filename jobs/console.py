"""The console command `sweeps COMMAND ...`: all commands, in any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jobs import ROOT
from jobs.cli.main import main as run


def main() -> None:
    """Run `sweeps`."""
    if (hiding := _hiding()) and "_SWEEPS_COMPLETE" not in os.environ:
        print(f"{hiding} hides a package of {ROOT}; run sweeps in another folder", file=sys.stderr)
        raise SystemExit(2)
    # As `python -m` does, so that benchmarks can be imported from the current folder. A console
    # script has the folder of the script there.
    sys.path.insert(0, os.getcwd())
    run("sweeps")


def _hiding() -> Path | None:
    """Return a package or module in the current folder that jobs would import instead of ours."""
    here = Path.cwd()
    names = (f"{name}{end}" for name in ("jobs", "systems") for end in (".py", "/__init__.py"))
    return next((here / name for name in names if here != ROOT and (here / name).exists()), None)


if __name__ == "__main__":
    main()
