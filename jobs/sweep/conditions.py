"""Conditions on runs, such as `seq_len > 4096 and implementation == naive`.

The text is parsed into a tree and checked. It is never evaluated as code. A comparison is a name,
an operator and a value. The name is that of a parameter, or of a value of a run or record such as
`run.status`, whose prefix may be left out if no parameter has this name. The value is a number, a
word with or without quotes, true, false, null, or a list of these. For a run whose benchmark lacks
the parameter, a comparison is neither true nor false.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.errors import nearest
from jobs.formatting import format_scalar, is_number
from jobs.sweep.benchmarks import Benchmarks

MAX_LENGTH = 2000
MAX_DEPTH = 50
Check = Callable[[str, Any], str | None]  # (name, value) -> error message, or None if valid
_RUN = "run."
_OPERATORS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ORDERED = (operator.lt, operator.le, operator.gt, operator.ge)
# Returns True or False, or None if a run does not have the compared parameters.
_Decide = Callable[[Mapping[str, Any]], bool | None]
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ConditionError(ValueError):
    """Raised if a text is not a valid condition, or cannot be evaluated for a run."""


@dataclass(frozen=True)
class Names:
    """The names that a condition may contain, and their values."""

    parameters: Collection[str]  # of all benchmarks at hand
    recorded: Collection[str] = ()  # values of runs and records, without the prefix `run.`
    # Returns an error message if a parameter, or a name with the prefix `run.`, can never equal a
    # plain value. By default, all values are valid.
    check: Check = lambda name, value: None

    def full(self, name: str) -> str | None:
        """Return the name of a parameter, or of another value with its prefix. None: unknown."""
        if name in self.parameters:
            return name
        recorded = name.removeprefix(_RUN)
        return _RUN + recorded if recorded in self.recorded else None


class Condition:
    """A condition on runs. Call it with the values of a run by their names.

    Raises ConditionError if the text is no condition on these names, or no run can have a value.
    """

    def __init__(self, text: str, names: Names, most: float = MAX_LENGTH):
        self.text = text
        self.names: set[str] = set()  # those in the condition, as from `Names.full`
        self._allowed = names
        self._decide = self._logic(_parse(text, most))

    def __call__(self, run: Mapping[str, Any]) -> bool:
        """Return whether the condition is True for parameters, and other values with `run.`.

        Raises ConditionError if `<`, `<=`, `>` or `>=` compares other values than numbers.
        """
        return self._decide(run) is True

    def _logic(self, node: ast.expr) -> _Decide:
        if isinstance(node, ast.BoolOp):
            parts = [self._logic(value) for value in node.values]
            return _joined(parts, decisive=isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self._logic(node.operand)
            return lambda run: None if (held := part(run)) is None else not held
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        raise ConditionError(
            f"{ast.unparse(node)!r} in {self.text!r} is not a comparison of a parameter; "
            "write for example seq_len > 4096"
        )

    def _comparison(self, node: ast.Compare) -> _Decide:
        if len(node.ops) > 1:
            raise ConditionError(
                f"{self.text!r}: {ast.unparse(node)!r} has several operators; write for example "
                "seq_len > 1024 and seq_len <= 4096"
            )
        name = self._subject(node.left)
        compare = _OPERATORS.get(type(node.ops[0]))
        if compare is None:
            raise ConditionError(
                f"{self.text!r}: the operator in {ast.unparse(node)!r} must be one of "
                "==, !=, <, <=, >, >=, in, not in"
            )
        wanted = self._literal(node.comparators[0], name)
        if isinstance(wanted, list) != isinstance(node.ops[0], (ast.In, ast.NotIn)):
            raise ConditionError(
                f"{self.text!r}: a list such as [128, 256] is required after 'in' and 'not in' "
                "and is not allowed elsewhere"
            )
        is_ordered = compare in _ORDERED
        self._check(name, wanted, is_ordered)
        self.names.add(name)

        def decide(run: Mapping[str, Any]) -> bool | None:
            if name not in run:
                return None
            value = run[name]
            if is_ordered and not (is_number(value) and is_number(wanted)):
                shown = " with ".join(map(format_scalar, (value, wanted)))
                raise ConditionError(
                    f"{self.text!r} compares {shown}, which have no order"
                    + (f"; write {name} != null and {self.text}" * (None in (value, wanted)))
                )
            return compare(value, wanted)

        return decide

    def _subject(self, node: ast.expr) -> str:
        """Return the full name with which a comparison begins."""
        given, names = ast.unparse(node), self._allowed
        has_prefix = given.startswith(_RUN)
        name = names.full(given) if has_prefix or isinstance(node, ast.Name) else None
        if name is not None:
            return name
        known = {*names.parameters, *names.recorded}
        hint = nearest(given, [_RUN + x for x in names.recorded] if has_prefix else list(known))
        if isinstance(node, ast.Constant):
            hint = "; begin with a name, such as seq_len > 4096"
        raise ConditionError(f"{self.text!r}: {given!r} is not a parameter{hint}")

    def _check(self, name: str, value: Any, is_bound: bool) -> None:
        """Refuse a value that can never equal the compared one, but for numbers as bounds."""
        for one in value if isinstance(value, list) else [value]:
            if is_bound and not isinstance(one, str):
                continue
            wrong = self._allowed.check(name, one)
            if is_bound and wrong is None:
                wrong = f"words such as {one!r} have no order"
            if wrong is not None:
                raise ConditionError(f"{self.text!r}: {wrong}")

    def _literal(self, node: ast.expr, subject: str) -> Any:
        """Return the value that a node of the tree stands for in a comparison of a name."""
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, type(None))):
            return as_in_runs(node.value)
        if isinstance(node, ast.Name):
            both = (subject, node.id)
            if all(name in self._allowed.parameters for name in both):
                raise ConditionError(
                    f"{self.text!r} compares two parameters; write a value, or {node.id} in quotes"
                )
            word, value = node.id, _WORDS.get(node.id.lower(), node.id)
            # Some parameters have the word `none` as a value, not null.
            wrong = self._allowed.check
            is_word = wrong(subject, value) is not None and wrong(subject, word) is None
            return word if value == word or is_word else value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._literal(item, subject) for item in node.elts]
        match node:
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as x)) if is_number(x):
                return -x
        raise ConditionError(
            f"{self.text!r}: {ast.unparse(node)!r} is not a plain value "
            "(number, word, text in quotes, true, false, null, or a list of these)"
        )


def condition_of(given: str | Mapping[str, Any], benchmarks: Benchmarks) -> Condition:
    """Return the condition of an entry of `exclude`, of `--where`, or of sustained runs.

    A mapping has a value, or a list of values, for each name. Raises ConditionError.
    """
    names = Names(benchmarks.fields, ["benchmark"], benchmarks.never_equals)
    if isinstance(given, str):
        return Condition(given, names)
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    text = " and ".join(f"{name} in {values!r}" for name, values in lists.items())
    return Condition(text, names, math.inf)


def _parse(text: str, most: float) -> ast.expr:
    if len(text) > most:
        what = f"a comparison must have at most {most} characters, got {len(text)}"
        raise ConditionError(what)
    try:
        with warnings.catch_warnings():  # Python warns about a text such as `1if x`
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        word = re.search(r"(?<![\w'\".+-])\d[\w.]*[A-Za-z]\w*(?!['\"])", text)  # such as 4bb999b
        hint = f"; write {word[0]} in quotes" if word else ""
        if re.search(r"(?<![=!<>])=(?!=)", text):
            hint = "; write == to compare"
        elif not hint:
            hint = "; write text with other characters than letters, digits and _ in quotes"
        example = "expected for example 'seq_len > 4096 and dtype == bf16'"
        raise ConditionError(f"{text!r} is not a comparison; {example}{hint}") from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ConditionError(f"a comparison must not be nested more than {MAX_DEPTH} levels deep")
    return tree


def _joined(parts: list[_Decide], decisive: bool) -> _Decide:
    """Return `and` of the parts if False is decisive, or `or` if True is.

    Without a decisive part, the result is None if one part is None.
    """

    def decide(run: Mapping[str, Any]) -> bool | None:
        is_unknown = False
        for part in parts:
            held = part(run)
            if held is decisive:  # as in Python, the later parts are not evaluated
                return decisive
            is_unknown |= held is None
        return None if is_unknown else not decisive

    return decide
