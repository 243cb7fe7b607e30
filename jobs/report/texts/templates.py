"""Renders the texts below the tables of a sweep, with numbers taken from the records.

The texts are in a Jinja2 template, such as `jobs/report/texts/flash.md.j2`. The template has one
block for each table with a text:

    {% block forward_bf16 %}
    cuDNN takes {{ value("time", "forward", implementation="sdpa_cudnn", seq_len=128) | n }} ms.
    {% endblock %}

The module `language` defines the filters, the module `lookups` the functions. If a run failed or is
missing, its numbers are rendered as `not measured`, so a report can be made from incomplete
results. An unknown table, function, parameter or metric is an error.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes

from jobs.errors import TableError, nearest
from jobs.report.results import Result
from jobs.report.texts.bounded import MEMORY_GB, call_bounded
from jobs.report.texts.language import Compared, environment
from jobs.report.texts.lookups import Lookups
from jobs.report.views import select_results, without_recorded
from jobs.results.run_states import Observation
from jobs.sweep.schema import Table
from jobs.user_files import InvalidFile, read_bytes

# Exceptions that the expressions of a template can raise.
_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
    NameError, MemoryError,
)  # fmt: skip
MAX_TEXT = 1_000_000  # limit of a text below a table, in characters
MAX_MESSAGE = 4000  # limit of an error message, in characters
MAX_CODE = 10_000_000  # limit of a compiled template, in bytes
_TOO_MUCH_MEMORY = f"needs more than {MEMORY_GB} GB of memory"


@dataclass(frozen=True)
class Rendered:
    """A text below a table, or the error that occurred when it was rendered."""

    text: str = ""  # "" if the template has no block for the table
    warnings: list[str] = field(default_factory=list)
    error: str | None = None

    def use(self, warn: Callable[[str], None]) -> str:
        """Return the text, and pass its warnings to a function.

        Raises:
            TableError: if the text could not be rendered.
        """
        for warning in self.warnings:
            warn(warning)
        if self.error is not None:
            raise TableError(self.error)
        return self.text


class StudyTexts:
    """Texts below the tables of a sweep, read from a Jinja2 template with one block per table.

    Raises:
        TableError: if the template cannot be read or parsed, has a block for an unknown table, or
            has text outside of its blocks.
    """

    def __init__(self, path: Path, tables: list[str]):
        self.path = path
        try:
            source = read_bytes(path).decode("utf-8-sig")  # with or without a byte order mark
        except (InvalidFile, UnicodeDecodeError) as error:
            raise TableError(f"{path} cannot be read: {error}") from None
        self._code, self._blocks = self._compile(source)
        for name in self._blocks:
            if name not in tables:
                raise TableError(
                    f"{path}: block {name!r}: the sweep has no such table{nearest(name, tables)}"
                )

    def _compile(self, source: str) -> tuple[bytes, list[str]]:
        """Return the code of the template, marshalled, and the names of its blocks."""

        def work(send: Callable[[Any], None]) -> None:
            try:
                send(self._compile_here(source))
            except TableError as error:
                send(str(error))

        messages, reason = call_bounded(work)
        if reason is not None:
            raise TableError(f"{self.path}: {reason} to compile")
        (message,) = messages
        if isinstance(message, str):
            raise TableError(message)
        code, names = message
        return code, names

    def _compile_here(self, source: str) -> tuple[bytes, list[str]]:
        """Compile the template in this process. Jinja evaluates constant expressions here."""
        jinja = environment()
        try:
            body = jinja.parse(source).body
            code = jinja.compile(source)
            names = list(Template.from_code(jinja, code, {}).blocks)
        except TemplateSyntaxError as error:
            raise TableError(f"{self.path}:{error.lineno}: {error.message}") from error
        except RecursionError:
            raise TableError(f"{self.path}: an expression is nested too deeply") from None
        except SyntaxError as error:  # raised by Python's compiler, for example for f(a=1, a=2)
            raise TableError(f"{self.path}: {error.msg}") from None
        except MemoryError:
            raise TableError(f"{self.path}: a constant {_TOO_MUCH_MEMORY}") from None
        except ValueError as error:  # for example, 10 ** (10 ** 5) is too large
            raise TableError(f"{self.path}: {error or 'a constant is too large'}") from None
        for node in body:
            if not isinstance(node, nodes.Block) and not _is_blank(node):
                raise TableError(
                    f"{self.path}:{node.lineno}: text must be in a block that names its table: "
                    "{% block TABLE %}...{% endblock %}"
                )
        data = marshal.dumps(code)
        if len(data) > MAX_CODE:
            raise TableError(f"{self.path}: a constant is too large")
        return data, names

    def render_all(
        self, observation: Observation, views: list[Table], results: list[Result]
    ) -> dict[str, Rendered]:
        """Render the texts below several tables, and return them by name of the table.

        A child process renders them, because a template can need any amount of CPU time and memory.
        If a block exceeds a limit, another child process renders the blocks after it. If a text
        cannot be rendered, e.g. because an expression is invalid, the result has the error. Results
        are all of the folder: a text can also use runs that the `where` condition of its table
        excludes.
        """
        rendered = {view.name: Rendered() for view in views}
        left = [view for view in views if view.name in self._blocks]
        while left:

            def work(send: Callable[[Any], None], views: list[Table] = left) -> None:
                jinja = environment()
                code = marshal.loads(self._code)
                template = Template.from_code(jinja, code, jinja.make_globals(None))
                for view in views:
                    send(self._render_here(template, observation, view, results))

            messages, reason = call_bounded(work)
            for view, message in zip(left, messages, strict=False):
                rendered[view.name] = message
            left = left[len(messages) :]
            if left:
                error = f"{self.path}: block {left[0].name!r} {reason}"
                rendered[left.pop(0).name] = Rendered(error=error)
        return rendered

    def _render_here(
        self, template: Template, observation: Observation, view: Table, results: list[Result]
    ) -> Rendered:
        """Render the text below a table in this process."""
        warnings: list[str] = []
        try:
            own, _ = select_results(observation, without_recorded(view), results)
            lookups = Lookups(own, lambda what: warnings.append(f"{self.path.name}: {what}"))
            text = self._render_block(template, template.blocks[view.name], lookups).strip()
            if len(text) <= MAX_TEXT:
                text = text.encode("utf-8", "replace").decode("utf-8")  # without lone surrogates
                return Rendered(text, warnings)
            problem = (
                f" block {view.name!r} must have at most {MAX_TEXT:,} characters, got {len(text):,}"
            )
        except Compared:
            words = "Not measured: a number that this text depends on is missing."
            return Rendered(words, warnings)
        except MemoryError as error:
            problem = f"{_line_of(error)} block {view.name!r} {_TOO_MUCH_MEMORY}"
        except _RAISED as error:
            problem = f"{_line_of(error)} {error}"
        return Rendered("", warnings, f"{self.path}:{problem[:MAX_MESSAGE]}")

    def _render_block(self, template: Template, block: Callable[..., Any], lookups: Lookups) -> str:
        jinja = template.environment
        try:
            return jinja.concat(block(template.new_context(lookups.by_name)))
        except Exception:
            jinja.handle_exception()  # raises it again, with line numbers of the template


def _is_blank(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Output) and all(
        isinstance(part, nodes.TemplateData) and not part.data.strip() for part in node.nodes
    )


def _line_of(error: Exception) -> str:
    """Return the line of the template that raised an error, such as `12:`.

    Return "" if the line is not known.
    """
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":  # Jinja's file name for a template
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{line}:" if line else ""
