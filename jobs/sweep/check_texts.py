"""Checks the texts under tables, as far as that is possible without records."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes

from jobs.errors import TableError, nearest
from jobs.run import Run
from jobs.sweep.conditions import Check
from jobs.sweep.text_language import (
    BESIDE_PARAMETERS,
    FUNCTIONS,
    LOOKUPS,
    TextFunctions,
    ambiguity,
    environment,
    value_problem,
)

_INCLUDES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def text_problems(text: str, fields: list[str], check: Check) -> list[str]:
    """Check a text's syntax, its names of functions, filters, values and parameters, the values of
    its parameters, and the published figures that it wants.

    Args:
        fields: the benchmark's parameters.
        check: why one of them cannot have a value.
    """
    jinja = environment()
    try:
        tree = jinja.parse(text)
        jinja.compile(text)  # knows the filters
        names = meta.find_undeclared_variables(tree) - {*FUNCTIONS, *jinja.globals}
    except TemplateSyntaxError as error:
        return [f"text: line {error.lineno}: {error.message}"]
    except (RecursionError, SyntaxError):  # Python's parser raises either
        return ["text: nested too deeply"]
    except ValueError as error:  # a constant such as 10 ** (10 ** 5)
        return [f"text: {error}"]
    found = [f"text: no function {name!r}{nearest(name, FUNCTIONS)}" for name in sorted(names)]
    for other in tree.find_all(_INCLUDES):
        found.append(f"text: line {other.lineno}: a text cannot include another")
    for name, call in _calls(tree):
        problems = _call_problems(name, call, fields, check)
        found += [f"text: line {call.lineno}: {what}" for what in problems]
    return found


def ambiguities(text: str, runs: list[Run]) -> list[str]:
    """Check that each call of a text fits one run only. `text_problems` found nothing in it."""
    found = []
    for name, call in _calls(environment().parse(text)):
        _, given = _arguments(name, call)
        params = _constants(given)
        if name == "published" or _is_open(call) or len(params) < len(given) or "device" in params:
            continue
        params.pop("repeat", None)
        fit = [run for run in runs if params.items() <= run.params.items()]
        if len(fit) > 1:
            found.append(f"text: line {call.lineno}: {name}(): {ambiguity(fit, params)}")
    return found


def _calls(tree: nodes.Template) -> Iterator[tuple[str, nodes.Call]]:
    """Each call of a lookup, and the lookup's name."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in LOOKUPS:
            yield call.node.name, call


def _is_open(call: nodes.Call) -> bool:
    """True where a call has arguments that cannot be seen: `*` or `**` something."""
    return call.dyn_args is not None or call.dyn_kwargs is not None


def _arguments(name: str, call: nodes.Call) -> tuple[dict[str, nodes.Expr], dict[str, nodes.Expr]]:
    """By name, the arguments that a lookup declares, and all others: the parameters of a run, or
    the columns of a row.

    Raises:
        TypeError: one is missing, or there are too many.
    """
    function = inspect.signature(TextFunctions().by_name[name])
    bind = function.bind_partial if _is_open(call) else function.bind
    declared = bind(*call.args, **{given.key: given.value for given in call.kwargs}).arguments
    return declared, declared.pop("params", {})


def _constants(given: dict[str, nodes.Expr]) -> dict[str, Any]:
    """The arguments that are constants."""
    found = {}
    for name, node in given.items():
        try:
            found[name] = node.as_const()
        except nodes.Impossible:
            continue
    return found


def _call_problems(name: str, call: nodes.Call, fields: list[str], check: Check) -> list[str]:
    """Check a call's arguments, as far as they can be seen."""
    try:
        declared, given = _arguments(name, call)
    except TypeError as error:
        return [f"{name}(): {error}"]
    known, params = _constants(declared), _constants(given)
    if name == "published":
        whole = len(known) + len(params) == len(declared) + len(given)
        return _figure_problems(known, params) if whole and not _is_open(call) else []
    known.pop("phase", None)  # only records tell which there are
    if "name" not in known:
        known |= {"name": "time", "unit": None}  # of whatever value, the statistic must be one
    found = [value_problem(**known)]
    for param in given:
        if param not in (*fields, *BESIDE_PARAMETERS):
            found.append(f"no parameter {param!r}{nearest(param, fields)}")
        elif param in fields and param in params:
            found.append(check(param, params[param]))
    return [what for what in found if what]


def _figure_problems(known: dict[str, Any], params: dict[str, Any]) -> list[str]:
    """Check that there is one published figure like this."""
    try:
        TextFunctions().published(**known, **params)
    except TableError as error:
        return [str(error)]
    return []
