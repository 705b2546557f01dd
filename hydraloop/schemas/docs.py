"""Read the docstrings under the fields of dataclasses, for `--help` and tables."""

import ast
import inspect
import textwrap
from typing import Any, Dict


def field_docs(schema: Any) -> Dict[str, str]:
    """Return {field: the docstring under it}, inherited fields included, with whitespace folded."""
    found: Dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def summary(schema: Any) -> str:
    """Return the first line of a dataclass's docstring, without its full stop."""
    return (inspect.getdoc(schema) or "").strip().split("\n")[0].rstrip(".")
