"""Comparisons over a run's parameters: `seq_len > 4096 and implementation == naive`.

Used by `exclude`, by a table's `where` and by `--filter`. The text is parsed into a small tree and
checked against the parameters; nothing is ever evaluated as code. Known are the parameters' names,
numbers, quoted or bare words, true, false, null, lists, `== != < <= > >= in`, `not in`, `and`,
`or`, `not` and parentheses.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 2000
Check = Callable[[str, Any], str | None]
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
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ConditionError(ValueError):
    """The text is not a comparison, or names what does not exist."""


def nearest(given: str, valid: list[str] | tuple[str, ...]) -> str:
    """`; did you mean 'x'?` where a valid name is close, and the valid names where they are few."""
    close = difflib.get_close_matches(given, valid, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(sorted(valid))})" if len(valid) <= 40 else hint


class Condition:
    """A parsed comparison.

    Args:
        text: the comparison.
        names: the parameters that may be named.
        check: (name, literal) -> what is wrong with comparing them for equality, or None.

    Raises:
        ConditionError: naming what was given and what is valid.
    """

    def __init__(self, text: str, names: list[str], check: Check | None = None):
        self.text = text
        self._names = set(names)
        self._check = check
        if len(text) > MAX_LENGTH:
            raise ConditionError(f"a comparison of {len(text)} characters; at most {MAX_LENGTH}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ConditionError(
                f"{text!r} is not a comparison; expected for example "
                '"seq_len > 4096 and dtype == bf16"'
            ) from None
        self._evaluate = self._logic(tree)

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Whether the comparison holds for these parameters."""
        return self._evaluate(params)

    def _logic(self, node: ast.expr) -> Callable[[Mapping[str, Any]], bool]:
        if isinstance(node, ast.BoolOp):
            parts = [self._logic(value) for value in node.values]
            combine = all if isinstance(node.op, ast.And) else any
            return lambda params: combine(part(params) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self._logic(node.operand)
            return lambda params: not part(params)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        raise ConditionError(
            f"{ast.unparse(node)!r} in {self.text!r} is not a comparison of a parameter"
        )

    def _compare(self, node: ast.Compare) -> Callable[[Mapping[str, Any]], bool]:
        terms = [node.left, *node.comparators]
        if not any(self._is_parameter(term) for term in terms):
            words = [term.id for term in terms if isinstance(term, ast.Name)]
            given = words[0] if words else ast.unparse(node.left)
            raise ConditionError(
                f"{self.text!r}: {given!r} is not a parameter{nearest(given, list(self._names))}"
            )
        if isinstance(node.left, ast.Name) and not self._is_parameter(node.left):
            given = node.left.id
            raise ConditionError(
                f"{self.text!r}: {given!r} is not a parameter{nearest(given, list(self._names))}"
            )
        steps = []
        for left, op, right in zip(terms, node.ops, terms[1:], strict=False):
            compare = _OPERATORS.get(type(op))
            if compare is None:
                raise ConditionError(f"{self.text!r}: only == != < <= > >= in and not in are known")
            if isinstance(op, (ast.In, ast.NotIn)) and not isinstance(right, (ast.List, ast.Tuple)):
                raise ConditionError(f"{self.text!r}: what follows 'in' must be a list: [128, 256]")
            steps.append((self._term(left, right), compare, self._term(right, left)))

        def holds(params: Mapping[str, Any]) -> bool:
            for left, compare, right in steps:
                a, b = left(params), right(params)
                try:
                    if not compare(a, b):
                        return False
                except TypeError:
                    raise ConditionError(
                        f"{self.text!r} compares {a!r} with {b!r}, which have no order"
                    ) from None
            return True

        return holds

    def _is_parameter(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._names

    def _term(self, node: ast.expr, other: ast.expr) -> Callable[[Mapping[str, Any]], Any]:
        if isinstance(node, ast.Name) and node.id in self._names:
            name = node.id
            return lambda params: params[name]
        value = self._literal(node)
        if self._check and isinstance(other, ast.Name) and other.id in self._names:
            for one in value if isinstance(value, list) else [value]:
                wrong = self._check(other.id, one)
                if wrong:
                    raise ConditionError(f"{self.text!r}: {wrong}")
        return lambda params: value

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(
            node.value, (int, float, str, bool, type(None))
        ):
            return node.value
        if isinstance(node, ast.Name):
            return _WORDS.get(node.id.lower(), node.id)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._literal(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._literal(node.operand)
            if isinstance(value, (int, float)):
                return -value
        raise ConditionError(
            f"{self.text!r}: {ast.unparse(node)!r} is neither a parameter nor a plain value"
        )
