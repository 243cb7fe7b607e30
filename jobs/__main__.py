"""Commands for submitted sweeps: `python -m jobs status`, `logs`, `cancel`, `retry` and others."""

from __future__ import annotations

if __name__ == "__main__":
    from systems.terminal import exit_on_interrupt

    exit_on_interrupt()  # before the imports below, which take longer

from typing import Any

import typer
from typer.core import TyperGroup

from jobs.command_line.invocation import of_another_module
from jobs.commands.cancel import cancel
from jobs.commands.carry import carry
from jobs.commands.check import check
from jobs.commands.hours import hours
from jobs.commands.logs import logs
from jobs.commands.replay import replay
from jobs.commands.retry import retry
from jobs.commands.sources import sources
from jobs.commands.status import status
from jobs.commands.watch import WatchingCommand
from systems.terminal import run_command

STATUS = """
Examples:

\b
  python -m jobs status logs/flash --json
  python -m jobs status --watch
  python -m jobs status --where 'status == error and seq_len > 4096'
"""


class Commands(TyperGroup):
    """Group of commands that names the module of a command that belongs to another one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if wrong := of_another_module(args[0], self.commands):
            ctx.fail(wrong)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog="These commands inspect and control what was submitted with python -m jobs.submit. "
    "Example: python -m jobs status logs/flash",
)
app.command(epilog=STATUS, cls=WatchingCommand)(status)
app.command(epilog="Example: python -m jobs logs 3fa2 --follow")(logs)
app.command(epilog="Example: python -m jobs cancel logs/flash --where 'dtype == fp16'")(cancel)
app.command(epilog="Example: python -m jobs retry logs/flash --where 'status == oom'")(retry)
app.command(epilog="Example: python -m jobs replay 3fa2")(replay)
app.command(epilog="Example: python -m jobs sources 3fa2 --in logs/flash")(sources)
app.command(epilog="Example: python -m jobs hours logs/flash --by status")(hours)
app.command(epilog="Example: python -m jobs carry && rsync -a --exclude .git ./ gpubox:sweeps/")(
    carry
)
app.command(epilog="Example: python -m jobs check my_kernels/flash.py:MyFlash")(check)


if __name__ == "__main__":
    run_command(app)
