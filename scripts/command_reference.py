"""Print the command-line reference as Markdown, generated from the help of the commands.

python scripts/command_reference.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo
from typer.utils import get_params_from_function

sys.path.insert(0, str(Path(__file__).parents[1]))

import aggregate
from jobs import __main__ as jobs_commands
from jobs import submit
from jobs.command_line.invocation import CONSOLE
from jobs.console import sweeps

WORDS = {Path: "PATH", str: "TEXT", int: "NUMBER", float: "NUMBER", list: "TEXT"}


@dataclass
class Parameter:
    """An argument or option of a command, read from the signature of its function."""

    name: str
    kind: Any  # type of the value, without None
    info: ArgumentInfo | OptionInfo
    default: Any

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, OptionInfo)

    def spelling(self) -> str:
        """Return how the parameter is written on the command line."""
        if not self.is_option:
            name = (self.info.metavar or self.name).strip("[]{}.").upper()
            if get_origin(self.kind) is list:
                return f"{name} ..." if self.default is ... else f"[{name} ...]"
            return name if self.default is ... else f"[{name}]"
        option = next(iter(self.info.param_decls or ()), f"--{self.name.replace('_', '-')}")
        if self.kind is bool:
            return option
        if isinstance(self.kind, EnumType):
            return f"{option} {'|'.join(self.kind)}"
        return f"{option} {self.info.metavar or WORDS[self.kind]}"

    def meaning(self) -> str:
        """Return the help text. The default is appended if the help text does not mention it."""
        text = " ".join((self.info.help or "").split())
        if self.default in (None, False, ...) or "default" in text:
            return text
        return f"{text} [default: {self.default}]"


def main() -> None:
    lines: list[str] = []
    console = ["| command | the same as |", "| --- | --- |"]
    for name, app in (
        ("python -m jobs.submit", submit.app),
        ("python -m jobs", jobs_commands.app),
        ("python aggregate.py", aggregate.app),
    ):
        for command in app.registered_commands:
            assert command.callback is not None
            subcommand = command.name or command.callback.__name__
            only = len(app.registered_commands) == 1
            called = name if only else f"{name} {subcommand}"
            lines += section(called, command.callback)
            console.append(f"| `{CONSOLE} {subcommand}` | `{called}` |")
    lines += [f"## {CONSOLE}", "", inspect.getdoc(sweeps) or "", "", *console]
    print("\n".join(lines).rstrip())


def section(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Yield the lines of a command's section: usage, description, arguments and options."""
    given = sorted(parameters(function), key=lambda parameter: parameter.is_option)
    arguments = [parameter.spelling() for parameter in given if not parameter.is_option]
    options = ["[OPTIONS]"] if len(arguments) < len(given) else []
    yield from (f"## {name}", "", "```", " ".join([name, *arguments, *options]), "```", "")
    yield from (inspect.getdoc(function) or "", "")
    yield from ("| argument or option | meaning |", "| --- | --- |")
    for parameter in given:
        cells = (f"`{parameter.spelling()}`", parameter.meaning())
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    for name, parameter in get_params_from_function(function).items():
        kind = parameter.annotation
        if isinstance(kind, UnionType):
            (kind,) = (one for one in get_args(kind) if one is not type(None))
        yield Parameter(name, kind, parameter.default, parameter.default.default)


if __name__ == "__main__":
    main()
