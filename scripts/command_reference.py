"""Print the command-line reference as Markdown, generated from the help of the commands.

python scripts/command_reference.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.cli.application import COMMANDS, app, load


def main() -> None:
    print(get_command(app).help)
    for name in COMMANDS:
        print("\n".join(section(name)))


def section(name: str) -> Iterator[str]:
    """Yield the lines of a command's section: usage, description, arguments and options."""
    command = load(name)
    context = typer.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from ("", f"## {name}", "", "```", usage, "```", "", command.help or "", "")
    yield from ("| argument or option | meaning |", "| --- | --- |")
    for parameter in command.params:
        spelling, meaning = parameter.get_help_record(context) or ("", "")
        cells = (f"`{spelling}`", " ".join(meaning.split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
