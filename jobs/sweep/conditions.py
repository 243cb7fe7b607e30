"""Parses comparisons of a run's parameters, such as `seq_len > 4096 and implementation == naive`.

Comparisons are used in `exclude`, in the `where` of a table or plot, and in `--where`. The text is
parsed into a tree and checked against the parameters. It is never evaluated as code. A comparison
may contain parameter names, numbers, quoted or unquoted words, true, false, null, lists,
parentheses and the operators `==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `and`, `or`, `not`.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.errors import nearest

MAX_LENGTH = 2000
MAX_DEPTH = 50
Check = Callable[[str, Any], str | None]  # (parameter, value) -> error message, or None if valid
Evaluate = Callable[[Mapping[str, Any]], Any]
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
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ORDERED = tuple(_OPERATORS[order] for order in _ORDERS)
_LISTS = (ast.List, ast.Tuple)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True)
class _Part:
    """A part of a condition."""

    # Returns True or False, or None if the run does not have the compared parameters.
    decide: Callable[[Mapping[str, Any]], bool | None]
    can_hold: bool  # whether it can be True
    can_fail: bool  # whether it can be False


class ConditionError(ValueError):
    """Raised if a text is not a valid comparison, or cannot be evaluated for a run."""


class UnknownParameter(ConditionError):
    """Raised if a comparison contains no known parameter, or starts with an unknown name.

    A comparison starts with an unknown name if its left side is a word that is not a parameter,
    neither of the run nor of another run.
    """


class Condition:
    """A comparison of parameters, such as `seq_len > 4096`. Call it with the parameters of a run.

    Args:
        text: the comparison.
        names: names of the parameters that the comparison may contain.
        check: function that checks the plain values in the comparison, such as 4096. It takes the
            name of a parameter and a value. It returns an error message if the parameter can never
            equal the value, else None. If `check` is None, plain values are not checked.
        recorded: other names that the comparison may contain, such as `commit`. They count as a
            name only as the first word of a comparison, as in `status == ok` or `'ok' == status`.
            Elsewhere they are words, as in `store == gpu`. Their other side is a value, never a
            parameter: `benchmark == attention` is about the benchmark with this name.
        of_others: parameters that other runs have. A comparison of them is neither True nor False
            for a run without them: `size == small or seq_len == 128` depends on seq_len alone, and
            `not size == small` is not True. Runs without them do not satisfy `size != small`.
        collect: keep the messages of `check` in `wrong` instead of raising ConditionError.

    Raises:
        ConditionError: if the text is not a valid comparison of these parameters.
    """

    def __init__(
        self,
        text: str,
        names: list[str],
        check: Check | None = None,
        recorded: Sequence[str] = (),
        of_others: Collection[str] = (),
        collect: bool = False,
    ):
        self.text = text
        # Parameters and plain values that `check` accepts, and the error messages of the others.
        self.valid: set[tuple[str, str]] = set()
        self.wrong: dict[tuple[str, str], str] = {}
        self._collect = collect
        self.named: set[str] = set()  # parameters in the comparison, without those of others
        self._names = set(names)
        self._recorded = set(recorded)
        self._of_others = set(of_others) - self._names
        self._start: ast.expr | None = None  # first word of the comparison that is being parsed
        self._compared: list[str] = []  # parameters in this comparison
        self._check = check
        if len(text) > MAX_LENGTH:
            raise ConditionError(
                f"a comparison must have at most {MAX_LENGTH} characters, got {len(text)}"
            )
        try:
            with warnings.catch_warnings():  # Python warns about a text such as `1if x`
                warnings.simplefilter("ignore")
                tree = ast.parse(text.strip(), mode="eval").body
            if _is_deeper(tree, MAX_DEPTH):
                raise ConditionError(
                    f"a comparison must not be nested more than {MAX_DEPTH} levels deep"
                )
            self._part = self._logic(tree)
        except ConditionError:
            raise
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ConditionError(
                f"{text!r} is not a comparison; expected for example "
                f'"seq_len > 4096 and dtype == bf16"{_quotes_hint(text)}'
            ) from None

    @classmethod
    def equal(cls, values: Mapping[str, Any]) -> Condition:
        """Return a condition that is True if every given parameter has its given value.

        Args:
            values: for each parameter, the required value or a list of allowed values. Names and
                values are not checked.
        """
        condition = cls.__new__(cls)
        condition.named = set(values)
        condition.text = ", ".join(f"{name}: {value}" for name, value in values.items())
        wanted = {
            name: [as_in_runs(one) for one in (given if isinstance(given, list) else [given])]
            for name, given in values.items()
        }
        condition._part = _Part(
            lambda params: all(params[k] in v for k, v in wanted.items()), True, True
        )
        return condition

    @property
    def can_hold(self) -> bool:
        """False if the condition compares parameters of other runs, so that it is never True."""
        return self._part.can_hold

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Return True if the comparison is True for these parameters.

        Raises:
            ConditionError: if `<`, `<=`, `>` or `>=` compares other values than numbers.
        """
        return self._part.decide(params) is True

    def _logic(self, node: ast.expr) -> _Part:
        if isinstance(node, ast.BoolOp):
            parts = [self._logic(value) for value in node.values]
            if isinstance(node.op, ast.And):
                return _all(parts)
            return _negation(_all([_negation(part) for part in parts]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negation(self._logic(node.operand))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        raise ConditionError(
            f"{ast.unparse(node)!r} in {self.text!r} is not a comparison of a parameter; "
            "write for example seq_len > 4096"
        )

    def _compare(self, node: ast.Compare) -> _Part:
        terms = [node.left, *node.comparators]
        self._start = next((term for term in terms if isinstance(term, ast.Name)), None)
        if any(self._is_missing(term, terms) for term in terms):
            return _Part(lambda params: None, can_hold=False, can_fail=False)
        if not any(self._is_parameter(term) for term in terms) or (
            isinstance(node.left, ast.Name) and not self._is_parameter(node.left)
        ):
            words = [term.id for term in terms if isinstance(term, ast.Name)]
            given = words[0] if words else ast.unparse(node.left)
            known = [*self._names, *self._of_others, *self._recorded]
            raise UnknownParameter(
                f"{self.text!r}: {given!r} is not a parameter{nearest(given, known)}"
            )
        self._compared = [
            term.id for term in terms if isinstance(term, ast.Name) and self._is_parameter(term)
        ]
        steps = []
        for left, op, right in zip(terms, node.ops, terms[1:], strict=False):
            compare = _OPERATORS.get(type(op))
            if compare is None:
                raise ConditionError(
                    f"{self.text!r}: the operator in {ast.unparse(node)!r} must be one of "
                    "==, !=, <, <=, >, >=, in, not in"
                )
            wants_list = isinstance(op, (ast.In, ast.NotIn))
            if isinstance(right, _LISTS) != wants_list or isinstance(left, _LISTS):
                raise ConditionError(
                    f"{self.text!r}: a list such as [128, 256] is required after 'in' and 'not in' "
                    "and is not allowed elsewhere"
                )
            for term, other in ((left, right), (right, left)):
                self._check_literals(term, other, op)
            steps.append((self._term(left), compare, self._term(right)))

        names = list(self._compared)

        def holds(params: Mapping[str, Any]) -> bool:
            for left, compare, right in steps:
                a, b = left(params), right(params)
                if compare in _ORDERED and not (_is_number(a) and _is_number(b)):
                    raise ConditionError(_no_order(self.text, a, b, names))
                if not compare(a, b):
                    return False
            return True

        return _Part(holds, can_hold=True, can_fail=True)

    def _is_parameter(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Name):
            return False
        if node is self._start:
            return node.id in self._names or node.id in self._recorded
        return node.id in self._names and self._starts_with_a_parameter()

    def _starts_with_a_parameter(self) -> bool:
        """Return False if the comparison starts with a recorded name, such as `benchmark`."""
        start = self._start
        return not isinstance(start, ast.Name) or start.id not in self._recorded - self._names

    def _is_missing(self, node: ast.expr, terms: list[ast.expr]) -> bool:
        """Return True if a side of a comparison is a parameter that the run does not have.

        A word after the operator is not such a parameter if it is a valid value of the compared
        parameter.
        """
        if not isinstance(node, ast.Name) or node.id not in self._of_others:
            return False
        if self._is_parameter(node):  # a name such as `commit`
            return False
        if node is self._start or self._check is None:
            return True
        return not any(
            isinstance(term, ast.Name)
            and self._is_parameter(term)
            and not self._check(term.id, node.id)
            for term in terms
        )

    def _is_value(self, word: str) -> bool:
        """Return whether a compared parameter has a word such as `none` as a value, not null."""
        return self._check is not None and any(
            self._check(name, word) is None and self._check(name, _WORDS[word.lower()]) is not None
            for name in self._compared
            if word.lower() in _WORDS
        )

    def _check_literals(self, term: ast.expr, other: ast.expr, op: ast.cmpop) -> None:
        """Raise ConditionError if a parameter can never equal the plain value in a comparison.

        Probably the value is a typo. Bounds, such as 4096 in `seq_len > 4096`, are not checked.

        Args:
            term: the side of the comparison that may be a plain value.
            other: the side that may be a parameter.
            op: the operator.
        """
        if self._check is None or not isinstance(other, ast.Name):
            return
        if not self._is_parameter(other) or self._is_parameter(term):
            return
        value = self._literal(term)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(op, _ORDERS) and not isinstance(one, str):
                continue  # a bound need not be a valid value of the parameter
            wrong = self._check(other.id, one)
            if isinstance(op, _ORDERS) and wrong is None:
                raise ConditionError(
                    f"{self.text!r}: words such as {one!r} have no order; "
                    "<, <=, > and >= need two numbers"
                )
            if wrong is None:
                self.valid.add((other.id, repr(one)))
            elif self._collect:
                self.wrong[other.id, repr(one)] = f"{self.text!r}: {wrong}"
            else:
                raise ConditionError(f"{self.text!r}: {wrong}")

    def _term(self, node: ast.expr) -> Evaluate:
        if isinstance(node, ast.Name) and self._is_parameter(node):
            name = node.id
            self.named.add(name)
            return lambda params: params[name]
        value = self._literal(node)
        return lambda params: value

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(
            node.value, (int, float, str, bool, type(None))
        ):
            return as_in_runs(node.value)
        if isinstance(node, ast.Name):
            word = node.id
            return word if self._is_value(word) else _WORDS.get(word.lower(), word)
        if isinstance(node, _LISTS):
            return [self._literal(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._literal(node.operand)
            if isinstance(value, (int, float)):
                return -value
        raise ConditionError(
            f"{self.text!r}: {ast.unparse(node)!r} is neither a parameter nor a plain value "
            "(number, text, true, false, null, or a list of these); "
            "write text with other characters than letters, digits and _ in quotes"
        )


def _all(parts: list[_Part]) -> _Part:
    """Return the part that is False if one part is False, else None if one is None, else True."""

    def decide(params: Mapping[str, Any]) -> bool | None:
        result: bool | None = True
        for part in parts:
            held = part.decide(params)
            if held is False:  # as in Python, the later parts are not evaluated
                return False
            if held is None:
                result = None
        return result

    return _Part(decide, all(part.can_hold for part in parts), any(part.can_fail for part in parts))


def _negation(part: _Part) -> _Part:
    def decide(params: Mapping[str, Any]) -> bool | None:
        held = part.decide(params)
        return None if held is None else not held

    return _Part(decide, can_hold=part.can_fail, can_fail=part.can_hold)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _no_order(text: str, a: Any, b: Any, names: list[str]) -> str:
    """Return the error message for two values that cannot be ordered."""
    message = f"{text!r} compares {_shown(a)} with {_shown(b)}, which have no order; "
    if None in (a, b) and names:
        return f"{message}add a comparison before it: {names[0]} != null and {text}"
    return f"{message}<, <=, > and >= need two numbers"


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _quotes_hint(text: str) -> str:
    """Return a hint on a word that starts with a digit, such as 4bb999b, or "" without one."""
    word = re.search(r"(?<![\w'\".+-])\d[\w.]*[A-Za-z]\w*(?!['\"])", text)
    return f"; write {word[0]} in quotes" if word else ""


def _is_deeper(tree: ast.AST, depth: int) -> bool:
    """Return True if a tree has more than `depth` levels below its root.

    The function is not recursive, so that it cannot exceed Python's recursion limit.
    """
    level = [tree]
    for _ in range(depth):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)
