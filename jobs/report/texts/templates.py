"""Renders the texts below the tables of a sweep, with numbers taken from the records.

The texts are in a Jinja2 template, such as `examples/quickstart_texts.md.j2`. The template has one
block for each table with a text:

    {% block forward_bf16 %}
    cuDNN takes {{ value("time", "forward", implementation="sdpa_cudnn", seq_len=128) | n }} ms.
    {% endblock %}

The module `language` defines the filters, the module `lookups` the functions. If a run failed or is
missing, its numbers are rendered as `not measured`, so a report can be made from incomplete
results. An unknown table, function, parameter or metric is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes

from jobs.errors import TableError, nearest
from jobs.frame.results import Result
from jobs.report.texts.language import Compared, environment
from jobs.report.texts.lookups import Lookups
from jobs.report.views import select, without_recorded
from jobs.results.run_states import Observation
from jobs.sweep.views import Table
from jobs.user_files import InvalidFile, read_bytes

# Exceptions that the expressions of a template can raise.
_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
    NameError, MemoryError,
)  # fmt: skip


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
        self._template = self._compile(source)
        for name in self._template.blocks:
            if name not in tables:
                raise TableError(
                    f"{path}: block {name!r}: the sweep has no such table{nearest(name, tables)}"
                )

    def _compile(self, source: str) -> Template:
        jinja = environment()
        try:
            body = jinja.parse(source).body
            template = jinja.from_string(source)
        except TemplateSyntaxError as error:
            raise TableError(f"{self.path}:{error.lineno}: {error.message}") from error
        except RecursionError:
            raise TableError(f"{self.path}: an expression is nested too deeply") from None
        except SyntaxError as error:  # raised by Python's compiler, for example for f(a=1, a=2)
            raise TableError(f"{self.path}: {error.msg}") from None
        except ValueError as error:  # Jinja computes constants here, such as 10 ** (10 ** 5)
            raise TableError(f"{self.path}: {error}") from None
        for node in body:
            if not isinstance(node, nodes.Block) and not _is_blank(node):
                raise TableError(
                    f"{self.path}:{node.lineno}: text must be in a block that names its table: "
                    "{% block TABLE %}...{% endblock %}"
                )
        return template

    def render(
        self,
        observation: Observation,
        view: Table,
        results: list[Result],
        warn: Callable[[str], None],
    ) -> str:
        """Return the text below a table. "" if the template has no block for the table.

        Args:
            results: all results of the folder. The text can also use runs that are not in the table
                because of the `where` condition of the table.
            warn: called with each warning.

        Raises:
            TableError: if the text cannot be rendered, e.g. because an expression is invalid.
        """
        block = self._template.blocks.get(view.name)
        if block is None:
            return ""
        jinja = self._template.environment
        try:
            shown = select(observation, without_recorded(view), results)
            lookups = Lookups(shown.results, lambda what: warn(f"{self.path.name}: {what}"))
            text = jinja.concat(block(self._template.new_context(lookups.by_name))).strip()
        except Compared:
            return "Not measured: a number that this text depends on is missing."
        except _RAISED as error:
            what = str(error) or "too little memory"  # MemoryError has no text
            raise TableError(f"{self.path}:{self._line_of(error)} {what}") from None
        return text.encode("utf-8", "replace").decode("utf-8")  # without lone surrogates

    def _line_of(self, error: Exception) -> str:
        """Return the line of the template that raised an error, such as `12:`.

        Return "" if the line is not known.
        """
        trace, line = error.__traceback__, 0
        while trace is not None:
            # This is Jinja's file name for a template.
            if trace.tb_frame.f_code.co_filename == "<template>":
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return f"{line}:" if line else ""


def _is_blank(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Output) and all(
        isinstance(part, nodes.TemplateData) and not part.data.strip() for part in node.nodes
    )
