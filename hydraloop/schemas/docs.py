"""Read the docstrings under the fields of dataclasses, for `--help` and tables."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, Dict, List, NamedTuple


class Argument(NamedTuple):
    """An option of a dataclass, or an argument of a class or function."""

    name: str
    type: str
    """As Python writes it. Empty: any."""
    default: str
    """As it is typed on a command line. `…`: it is required, or a section of options."""
    text: str


def arguments_of_schema(schema: Any) -> List[Argument]:
    """Return the options of a dataclass, without those that only Hydra reads (`_target_`)."""
    docs, found = field_docs(schema), []
    for entry in dataclasses.fields(schema):
        if not entry.name.startswith("_"):
            kind = entry.type.__name__ if isinstance(entry.type, type) else str(entry.type).replace("typing.", "")
            default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
            is_section = dataclasses.is_dataclass(default) or (default and isinstance(default, dict))
            is_missing = default is dataclasses.MISSING or default == "???"
            shown = "…" if is_section or is_missing else typed(default)
            found.append(Argument(entry.name, kind, shown, docs.get(entry.name, "")))
    return found


def typed(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {typed(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(typed, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


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
