"""The console command `sweeps`: `sweeps submit|status|logs|...|tables|compare|export|report`.

Its commands are those of `python -m jobs.submit`, `python -m jobs` and `python aggregate.py`.
`sweeps --install-completion` installs the completion of commands, options, sweep files, results
folders and runs for bash, zsh or fish.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "sweeps":  # the console script
    from systems.terminal import exit_on_interrupt

    exit_on_interrupt()  # before the imports below, which take longer

import gc
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from jobs import ROOT, submit
from jobs import __main__ as commands
from jobs.command_line.invocation import CONSOLE, REPORTS, spelled_for_console
from systems.terminal import run_command

COMPLETION = f"_{CONSOLE.upper()}_COMPLETE"  # environment variable that asks for completions


class Commands(TyperGroup):
    """Group of the commands of all modules. `aggregate`, which imports much, only for its own."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["submit", *get_command(commands.app).commands, *REPORTS]  # type: ignore[attr-defined]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "submit":
            return _with_help_of_console(get_command(submit.app))
        app = _aggregate() if cmd_name in REPORTS else commands.app
        found = get_command(app).commands.get(cmd_name)  # type: ignore[attr-defined]
        return found and _with_help_of_console(found)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog="Example: sweeps submit sweeps/flash.yaml --dry-run",
)


@app.callback()
def sweeps() -> None:
    """Submit sweeps that measure GPU kernels and distributed training, and show their results.

    These commands are also those of python -m jobs.submit, python -m jobs and python aggregate.py.
    The option --install-completion makes the tab key complete their arguments in bash, zsh and
    fish.
    """


def _aggregate() -> typer.Typer:
    """Import `aggregate` of this project, even if the current folder has a module of this name."""
    sys.path.insert(0, str(ROOT))
    try:
        import aggregate
    finally:
        sys.path.remove(str(ROOT))
    gc.disable()  # as in `aggregate`
    return aggregate.app


def _with_help_of_console(command: Any) -> Any:
    """Return a command whose help names the commands of `sweeps`."""
    for part in (command, *command.params):
        for text in ("help", "epilog"):
            if getattr(part, text, None):
                setattr(part, text, spelled_for_console(getattr(part, text)))
    return command


def _hiding() -> str | None:
    """Return the path of a package or module in the current folder that hides one of this project.

    Jobs run in the current folder and would import it instead of this project.
    """
    if Path.cwd() == ROOT:
        return None
    names = (f"{name}{end}" for name in ("jobs", "systems") for end in (".py", "/__init__.py"))
    return next((name for name in names if Path(name).exists()), None)


def main() -> None:
    """Run the command `sweeps`."""
    hiding = _hiding()
    if hiding is not None and COMPLETION not in os.environ:
        folder = Path(hiding).absolute()
        submit.fail(f"{folder} hides a package of {ROOT}; run {CONSOLE} in another folder")
    # As `python -m` does, so that benchmarks can be imported from the current folder. A console
    # script has the folder of the script there.
    sys.path.insert(0, os.getcwd())
    run_command(partial(app, prog_name=CONSOLE))


if __name__ == "__main__":
    main()
