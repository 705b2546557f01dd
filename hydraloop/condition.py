"""Conditions of `runs`: `accuracy > 0.9 and "ema" in hooks`, which Python evaluates once they are checked."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydraloop.errors import UserError, suggestion

_CONSTANTS = {"true": True, "false": False, "null": None}
_ALLOWED = {
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Constant, ast.List, ast.Tuple, ast.Load),
}
"""Nothing that calls a function or reads an attribute, and no powers, which may take forever."""
_OF_NUMBERS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Mult: ("*", operator.mul),
    ast.Mod: ("%", operator.mod),
}
"""Operators that could make a text or list of any length: `'x' * 10000000000`, `'%10000000000d' % 1`."""


def _of_numbers(name: str, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def computed(left: Any, right: Any) -> Any:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TypeError(f"{name} needs numbers")
        return compute(left, right)

    return computed


_FUNCTIONS = {name: _of_numbers(name, compute) for name, compute in _OF_NUMBERS.values()}


class Condition(ast.NodeTransformer):
    """A condition on values with names.

    Args:
        text: comparisons, `and`, `or`, `not`, `in` and arithmetic over keys, numbers, quoted strings and lists. `*` and
            `%` take only numbers.
        keys: the names that it may have. None: any.
        key: the option that has the condition.
        example: a condition as it is typed, for the remedy.

    Raises:
        UserError: it has anything else.
    """

    def __init__(self, text: str, keys: Sequence[str] | None, *, key: str, example: str) -> None:
        self._text = text.strip()
        self._keys = keys
        self._key, self._example = key, example
        self.names: dict[str, int] = {}
        """The keys in the condition, and where each begins."""
        try:
            tree: Any = self.visit(ast.parse(self._text, mode="eval"))
            self._code = compile(ast.fix_missing_locations(tree), key, "eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            # Python says 0 for the end of the text.
            column = (error.offset or len(self._text) + 1) - 1 if isinstance(error, SyntaxError) else None
            raise self._refused(f"{self._text} is not a condition", column) from error

    def holds(self, values: Mapping[str, Any], job: Sequence[str]) -> bool:
        """Return whether a job meets the condition.

        Args:
            values: by key.
            job: its overrides, for the message.

        Raises:
            UserError: the job does not set a key, or a comparison is not possible.
        """
        try:
            # The code was compiled from a syntax tree with allowed nodes only.
            return bool(eval(self._code, {"__builtins__": {}, **_CONSTANTS, **_FUNCTIONS}, values))  # noqa: S307
        except (TypeError, ValueError, ArithmeticError, MemoryError, NameError) as error:
            reason = f"it sets no {error.name}" if isinstance(error, NameError) else str(error)
            problem = f"{self._text} cannot be evaluated: {reason}, in the job {' '.join(job)}"
            raise UserError(
                problem, key=self._key, remedy="Compare what each job sets: numbers, or equality."
            ) from error

    def visit(self, node: ast.AST) -> ast.AST:
        """Return a part of the condition with each key as a name, after checking it."""
        if isinstance(node, ast.Name | ast.Attribute):
            return ast.Name(self._known(ast.unparse(node), self._column(node)), ast.Load())
        kinds = {type(part) for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr)}
        if isinstance(node, ast.expr) and not kinds | {type(node)} <= _ALLOWED:
            raise self._refused(f"{ast.unparse(node)} cannot be part of a condition", self._column(node))
        node = self.generic_visit(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OF_NUMBERS:
            name, _ = _OF_NUMBERS[type(node.op)]  # no key has such a name
            return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])
        return ast.List(node.elts, node.ctx) if isinstance(node, ast.Tuple) else node  # as the values of lists are

    def pointed(self, problem: str, column: int | None) -> str:
        """Return a problem with the condition below it, and a caret under the place of the problem, if it is known."""
        if column is None or "\n" in self._text:
            return problem
        return f"{problem}\n    {self._text}\n    {' ' * column}^"

    def _column(self, node: ast.expr) -> int:
        return len(self._text.encode()[: node.col_offset].decode(errors="ignore"))

    def _known(self, key: str, column: int) -> str:
        if key in _CONSTANTS:
            return key
        self.names.setdefault(key, column)
        if self._keys is None or key in self._keys:
            return key
        quoted = self._text.replace(key, f"'{key}'")
        remedy = suggestion(key, self._keys) + f' Quote text, for the shell too: "{self._key}=\\"{quoted}\\""'
        problem = f"{key} is unknown here"
        raise UserError(self.pointed(problem, column), key=self._key, remedy=remedy)

    def _refused(self, problem: str, column: int | None) -> UserError:
        return UserError(self.pointed(problem, column), key=self._key, remedy=f"Compare keys: {self._example}")
