"""The commands of this project, as one application.

The module of a command is imported when it is called. It has a function of the same name (list_
for list, which is a builtin) and its EXAMPLES.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from jobs.cli.output import fail
from jobs.errors import CommandError, InputError, TableError

COMMANDS = {
    "submit": "Run a sweep: expand its file into runs, group them into jobs, and start the jobs.",
    "status": "Show the state of each run in a results folder.",
    "list": "List the results folders here, the newest last.",
    "show": "Show one page about a run.",
    "logs": "Print the output of a run and, if the run failed, the reason.",
    "cancel": "Cancel all queued and running jobs of a results folder.",
    "retry": "Submit the failed and missing runs of a results folder again.",
    "replay": "Repeat one run on this machine in the foreground.",
    "tables": "Print the tables of a results folder.",
    "attempts": "List all attempts of the runs in a results folder, with their median times.",
    "compare": "Compare measured times, by run and phase.",
    "export": "Write the results of folders as one flat table, for pandas and other programs.",
    "report": "Write one document with the answers to the problems of CS336, assignment 2.",
    "hours": "Show how many GPU-hours each sweep used, and for what.",
    "check": "Check an attention, a DDP or FSDP wrapper or a sharded optimizer of your own.",
    "carry": "Write the state of this git repository to the file .code_state.json in its root.",
}

REPORTS = ("tables", "attempts", "compare", "export", "report")  # read many records


class Command(TyperCommand):
    """A command with examples. An option that has one value must not be given twice."""

    examples: str  # one per line, without the name of the command; lines with # are comments

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter(given).items():
            has_value = not getattr(option, "is_flag", True)  # arguments have no is_flag
            if count > 1 and has_value and not option.multiple:
                join = "; join the conditions with 'and'" if option.name == "where" else ""
                ctx.fail(f"{option.opts[0]} is given {count} times, but has only one value{join}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (InputError, CommandError, TableError) as error:
            fail(str(error))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as the user can type them."""
        lines = self.examples.strip().splitlines()
        with formatter.section("Examples" if len(lines) > 1 else "Example"):
            for line in lines:
                text = line if line.startswith("#") else f"{ctx.command_path} {line}"
                formatter.write(f"  {text.rstrip()}\n")
        if ctx.parent is None:  # the user left out the name of the command
            formatter.write("\nOther commands: python -m jobs --help\n")


class Lazy(TyperCommand):
    """Stands for a command until it is called. It knows only the name and one line of help."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **more: Any) -> Any:
        return load(str(self.name)).make_context(info_name, args, parent, **more)


def load(name: str) -> TyperCommand:
    """Import the module of a command and return the command."""
    if name in REPORTS:
        # Collections would take a third of the time with 100,000 records, which have no cycles.
        gc.disable()
    module = import_module(f"jobs.cli.{name}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = getattr(module, name if hasattr(module, name) else f"{name}_")
    app.command(name, cls=getattr(module, "COMMAND_CLASS", Command))(function)
    loaded = get_command(app)
    loaded.examples = module.EXAMPLES  # type: ignore[attr-defined]
    return loaded  # type: ignore[return-value]


app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, epilog="A command with --help describes itself."
)
for _name, _summary in COMMANDS.items():
    app.command(_name, cls=Lazy, help=_summary)(lambda: None)


@app.callback()
def sweeps() -> None:
    """Submit sweeps that measure GPU kernels and distributed training, and show their results.

    `python -m jobs`, `python -m jobs.submit`, `python aggregate.py` and `sweeps` accept all
    commands. `python -m jobs.submit SWEEP` stands for submit, `python aggregate.py FOLDER` for
    tables. `sweeps --install-completion` makes the tab key complete arguments in bash, zsh and
    fish.
    """


def command(arguments: Sequence[str], default: str | None = None) -> Any:
    """Return the application, or its command `default` if the first argument is no command."""
    if default is None or (arguments and arguments[0] in COMMANDS):
        return get_command(app)
    return load(default)
