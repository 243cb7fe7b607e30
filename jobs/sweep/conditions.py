"""Comparisons over a run's parameters: `seq_len > 4096 and implementation == naive`.

Used by `exclude`, by a table's `where` and by `--filter`. The text is parsed into a small tree and
checked against the parameters; nothing is ever evaluated as code. Known are the parameters' names,
numbers, quoted or bare words, true, false, null, lists, `== != < <= > >= in`, `not in`, `and`,
`or`, `not` and parentheses.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jobs.errors import nearest

MAX_LENGTH = 2000
MAX_DEPTH = 50
Check = Callable[[str, Any], str | None]
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
_LISTS = (ast.List, ast.Tuple)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ConditionError(ValueError):
    """The text is not a comparison, or names what does not exist."""


class UnknownParameter(ConditionError):
    """What stands where a parameter should stand is none."""


class Condition:
    """A parsed comparison.

    Args:
        text: the comparison.
        names: the parameters that may be named.
        check: (name, literal) -> why the parameter can never equal the literal, or None.

    Raises:
        ConditionError: naming what was given and what is valid.
    """

    def __init__(self, text: str, names: list[str], check: Check | None = None):
        self.text = text
        self.named: set[str] = set()  # the parameters that it is about
        self.words: set[str] = set()  # bare words that it takes for values
        self._names = set(names)
        self._check = check
        if len(text) > MAX_LENGTH:
            raise ConditionError(f"a comparison of {len(text)} characters; at most {MAX_LENGTH}")
        try:
            with warnings.catch_warnings():  # Python's about `1if x`: it is refused below
                warnings.simplefilter("ignore")
                tree = ast.parse(text.strip(), mode="eval").body
            if _is_deeper(tree, MAX_DEPTH):
                raise ConditionError(f"a comparison nested more than {MAX_DEPTH} deep")
            self._evaluate = self._logic(tree)
        except ConditionError:
            raise
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ConditionError(
                f"{text!r} is not a comparison; expected for example "
                '"seq_len > 4096 and dtype == bf16"'
            ) from None

    @classmethod
    def equal(cls, values: Mapping[str, Any]) -> Condition:
        """That each parameter has this value, or one of these. Nothing is checked."""
        condition = cls.__new__(cls)
        condition.named, condition.words = set(values), set()
        condition.text = ", ".join(f"{name}: {value}" for name, value in values.items())
        wanted = {k: v if isinstance(v, list) else [v] for k, v in values.items()}
        condition._evaluate = lambda params: all(params[k] in v for k, v in wanted.items())
        return condition

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Whether the comparison holds for these parameters.

        Raises:
            ConditionError: a value has no order with what it is compared to.
        """
        return bool(self._evaluate(params))

    def _logic(self, node: ast.expr) -> Evaluate:
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

    def _compare(self, node: ast.Compare) -> Evaluate:
        terms = [node.left, *node.comparators]
        if not any(self._is_parameter(term) for term in terms) or (
            isinstance(node.left, ast.Name) and not self._is_parameter(node.left)
        ):
            words = [term.id for term in terms if isinstance(term, ast.Name)]
            given = words[0] if words else ast.unparse(node.left)
            raise UnknownParameter(
                f"{self.text!r}: {given!r} is not a parameter{nearest(given, list(self._names))}"
            )
        steps = []
        for left, op, right in zip(terms, node.ops, terms[1:], strict=False):
            compare = _OPERATORS.get(type(op))
            if compare is None:
                raise ConditionError(f"{self.text!r}: only == != < <= > >= in and not in are known")
            wants_list = isinstance(op, (ast.In, ast.NotIn))
            if isinstance(right, _LISTS) != wants_list or isinstance(left, _LISTS):
                raise ConditionError(
                    f"{self.text!r}: a list, as [128, 256], stands after 'in' or 'not in' only"
                )
            for term, other in ((left, right), (right, left)):
                self._check_literals(term, other, op)
            steps.append((self._term(left), compare, self._term(right)))

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

    def _check_literals(self, term: ast.expr, other: ast.expr, op: ast.cmpop) -> None:
        """A value that the parameter can never have is a typing error, not a comparison."""
        if self._check is None or not isinstance(other, ast.Name) or other.id not in self._names:
            return
        if self._is_parameter(term):
            return
        value = self._literal(term)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(op, _ORDERS) and not isinstance(one, str):
                continue  # a bound need not be a value
            wrong = self._check(other.id, one)
            if wrong:
                raise ConditionError(f"{self.text!r}: {wrong}")

    def _term(self, node: ast.expr) -> Evaluate:
        if isinstance(node, ast.Name) and node.id in self._names:
            name = node.id
            self.named.add(name)
            return lambda params: params[name]
        value = self._literal(node)
        return lambda params: value

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(
            node.value, (int, float, str, bool, type(None))
        ):
            return node.value
        if isinstance(node, ast.Name):
            self.words.add(node.id)
            return _WORDS.get(node.id.lower(), node.id)
        if isinstance(node, _LISTS):
            return [self._literal(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._literal(node.operand)
            if isinstance(value, (int, float)):
                return -value
        raise ConditionError(
            f"{self.text!r}: {ast.unparse(node)!r} is neither a parameter nor a plain value"
        )


def _is_deeper(tree: ast.AST, depth: int) -> bool:
    """Asked level by level: how deep Python may recurse differs from caller to caller."""
    level = [tree]
    for _ in range(depth):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)
