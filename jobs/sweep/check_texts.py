"""The checks of the texts under tables, as far as a sweep and its runs tell without records."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes

from jobs.errors import TableError, nearest
from jobs.run import Run
from jobs.sweep.conditions import Check
from jobs.sweep.text_language import (
    ASKING,
    BESIDE_PARAMETERS,
    FUNCTIONS,
    TextFunctions,
    environment,
    several_runs,
    wrong_value,
)

_TAKES_IN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def text_problems(text: str, fields: list[str], check: Check) -> list[str]:
    """What is wrong with a text as far as it can be told without records: its syntax, names of
    functions, filters, values and parameters, values that a parameter cannot have, figures that
    nobody published.

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
    except (RecursionError, SyntaxError):  # as Python's own parser has it
        return ["text: nested too deeply"]
    except ValueError as error:  # of a constant, 10 ** (10 ** 5)
        return [f"text: {error}"]
    found = [f"text: no function {name!r}{nearest(name, FUNCTIONS)}" for name in sorted(names)]
    for other in tree.find_all(_TAKES_IN):
        found.append(f"text: line {other.lineno}: a text cannot take in another")
    for name, call in _calls(tree):
        wrong = _wrong(name, call, fields, check)
        found += [f"text: line {call.lineno}: {what}" for what in wrong]
    return found


def ambiguities(text: str, runs: list[Run]) -> list[str]:
    """Where a text in which `text_problems` found nothing asks for one run, and several of these
    would fit."""
    found = []
    for name, call in _calls(environment().parse(text)):
        _, given = _arguments(name, call)
        params = _constants(given)
        if name == "published" or _is_open(call) or len(params) < len(given) or "device" in params:
            continue
        params.pop("repeat", None)
        fit = [run for run in runs if params.items() <= run.params.items()]
        if len(fit) > 1:
            found.append(f"text: line {call.lineno}: {name}(): {several_runs(fit, params)}")
    return found


def _calls(tree: nodes.Template) -> Iterator[tuple[str, nodes.Call]]:
    """Each place that asks for a number or a state, and the function that it calls."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in ASKING:
            yield call.node.name, call


def _is_open(call: nodes.Call) -> bool:
    """Whether a call has more arguments than can be seen: `*` or `**` something."""
    return call.dyn_args is not None or call.dyn_kwargs is not None


def _arguments(name: str, call: nodes.Call) -> tuple[dict[str, nodes.Expr], dict[str, nodes.Expr]]:
    """By name, the arguments that a function declares, and all others: those that a run or a row
    is to have.

    Raises:
        TypeError: one is missing, or there are too many.
    """
    function = inspect.signature(TextFunctions().by_name[name])
    bind = function.bind_partial if _is_open(call) else function.bind
    declared = bind(*call.args, **{given.key: given.value for given in call.kwargs}).arguments
    return declared, declared.pop("params", {})


def _constants(given: dict[str, nodes.Expr]) -> dict[str, Any]:
    """Those that are the same whatever was measured."""
    found = {}
    for name, node in given.items():
        try:
            found[name] = node.as_const()
        except nodes.Impossible:
            continue
    return found


def _wrong(name: str, call: nodes.Call, fields: list[str], check: Check) -> list[str]:
    """What is wrong with a call's arguments, as far as they can be seen."""
    try:
        declared, given = _arguments(name, call)
    except TypeError as error:
        return [f"{name}(): {error}"]
    known, params = _constants(declared), _constants(given)
    if name == "published":
        whole = len(known) + len(params) == len(declared) + len(given)
        return _unpublished(known, params) if whole and not _is_open(call) else []
    known.pop("phase", None)  # only records tell which there are
    if "name" not in known:
        known |= {"name": "time", "unit": None}  # of whatever value, the statistic must be one
    found = [wrong_value(**known)]
    for param in given:
        if param not in (*fields, *BESIDE_PARAMETERS):
            found.append(f"no parameter {param!r}{nearest(param, fields)}")
        elif param in fields and param in params:
            found.append(check(param, params[param]))
    return [what for what in found if what]


def _unpublished(known: dict[str, Any], params: dict[str, Any]) -> list[str]:
    """Why there is no one figure of others like this."""
    try:
        TextFunctions().published(**known, **params)
    except TableError as error:
        return [str(error)]
    return []
