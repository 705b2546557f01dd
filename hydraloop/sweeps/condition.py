"""Conditions of `sweep.where`: `optimizer.lr < 1e-3 or seed == 0`. No code is run: only comparisons are evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydraloop.errors import UserError, suggestion

_CONSTANTS = {"true": True, "false": False, "null": None}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}

_Values = Mapping[str, Any]
_Node = Callable[[_Values], Any]


class Condition:
    """A condition on the overrides of a job.

    Args:
        text: comparisons, `and`, `or`, `not`, `in` and arithmetic over keys, numbers, quoted strings and lists.
        keys: that a job may set.

    Raises:
        UserError: it has anything else.
    """

    def __init__(self, text: str, keys: Sequence[str]) -> None:
        self._text = text
        self._keys = keys
        try:
            self._holds = self._node(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise self._refused(f"{text} is not a condition") from error

    def holds(self, values: _Values, job: Sequence[str]) -> bool:
        """Return whether a job meets the condition.

        Args:
            values: by key.
            job: its overrides, for the message.

        Raises:
            UserError: the job does not set a key, or a comparison is not possible.
        """
        try:
            return bool(self._holds(values))
        except (TypeError, ArithmeticError, LookupError) as error:
            reason = f"it sets no {error.args[0]}" if isinstance(error, KeyError) else str(error)
            problem = f"{self._text} cannot be evaluated: {reason}, in the job {' '.join(job)}"
            raise UserError(
                problem, key="sweep.where", remedy="Compare what each job sets: numbers, or equality."
            ) from error

    def _node(self, node: ast.expr) -> _Node:
        """Return what evaluates a part of the condition."""
        match node:
            case ast.Constant(value):
                return lambda values: value
            case ast.Name() | ast.Attribute():
                return self._key(ast.unparse(node))
            case ast.List(items) | ast.Tuple(items):
                parts = [self._node(item) for item in items]
                return lambda values: [part(values) for part in parts]
            case ast.BoolOp(kind, items):
                parts, test = [self._node(item) for item in items], all if isinstance(kind, ast.And) else any
                return lambda values: test(part(values) for part in parts)
            case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
                return self._applied(kind, operand)
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                return self._applied(kind, left, right)
            case ast.Compare(left, kinds, others) if all(type(kind) in _OPERATORS for kind in kinds):
                pairs = zip(kinds, [left, *others], others, strict=False)
                tests = [self._applied(kind, one, other) for kind, one, other in pairs]
                return lambda values: all(test(values) for test in tests)
        raise self._refused(f"{ast.unparse(node)} cannot be part of a condition")

    def _applied(self, kind: ast.AST, *operands: ast.expr) -> _Node:
        apply, parts = _OPERATORS[type(kind)], [self._node(operand) for operand in operands]
        return lambda values: apply(*(part(values) for part in parts))

    def _key(self, key: str) -> _Node:
        if key in self._keys:
            return lambda values: values[key]
        if key in _CONSTANTS:
            return lambda values: _CONSTANTS[key]
        problem = f"no override sets {key}"
        raise UserError(problem, key="sweep.where", remedy=f"{suggestion(key, self._keys)} Quote texts: '{key}'.")

    def _refused(self, problem: str) -> UserError:
        return UserError(
            problem,
            key="sweep.where",
            remedy="Compare keys that the command sets: sweep.where='\"optimizer.lr < 1e-3 or seed == 0\"'",
        )
