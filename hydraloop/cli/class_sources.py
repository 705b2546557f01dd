"""Reads signatures and docstrings from syntax trees, so that the help runs no code of a project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.schemas.docs import Argument, typed

Definition = ast.ClassDef | ast.FunctionDef


def definitions(root: Path, module: str, name: str, seen: frozenset[str] = frozenset()) -> Iterator[Definition]:
    """Yield the source of the class or function that a module calls `name`, then of its bases up to `Hook`.

    Args:
        root: the folder that contains the module. Sources outside it are left out.
        seen: what has been followed already, so that imports in a circle end.

    Raises:
        UserError: a file is not Python.
    """
    path = root / module.replace(".", "/")
    path, package = (
        (path / "__init__.py", module) if path.is_dir() else (path.with_suffix(".py"), module.rpartition(".")[0])
    )
    if f"{module}.{name}" in seen or not path.is_file():
        return
    seen |= {f"{module}.{name}"}
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"it is not Python: {error}", key=str(path), remedy="Correct the file.") from error
    for node in nodes:
        if isinstance(node, Definition) and node.name == name:
            yield node
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                if ast.unparse(base) != "Hook":
                    yield from definitions(root, module, ast.unparse(base), seen)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            for imported in node.names:
                if name == (imported.asname or imported.name):
                    yield from definitions(root, origin, imported.name, seen)


def first_paragraph(node: Definition) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def arguments_of(found: Sequence[Definition]) -> list[Argument]:
    """Return the arguments of a function, or of the constructor of a class or of its first base that has one.

    Args:
        found: the `definitions` of its name.
    """
    for node in found:
        texts = _texts(node)
        for one in [node, *node.body]:
            if isinstance(one, ast.FunctionDef) and one.name in ("__init__", found[0].name):
                return _of_function(one, _texts(one) | texts)
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            return [_argument(ast.unparse(one.target), one.annotation, one.value, texts) for one in fields]
    return []


def _of_function(node: ast.FunctionDef, texts: dict[str, str]) -> list[Argument]:
    plain = node.args.posonlyargs + node.args.args
    defaults = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    pairs = zip(plain + node.args.kwonlyargs, defaults, strict=True)
    return [_argument(one.arg, one.annotation, value, texts) for one, value in pairs if one.arg != "self"]


def _argument(name: str, annotation: ast.expr | None, value: ast.expr | None, texts: dict[str, str]) -> Argument:
    default = "…"
    if value is not None:
        default = typed(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)
    kind = "" if annotation is None else ast.unparse(annotation).strip("'")  # 'int', a name that is resolved later
    return Argument(name, kind, default, texts.get(name, ""))


def _texts(node: Definition) -> dict[str, str]:
    """Return what the section `Args:` of a docstring says about each argument."""
    _, _, section = (ast.get_docstring(node) or "").partition("Args:\n")
    found = re.findall(r"^ {4}(\w+)[^:\n]*: (.*(?:\n {8}.*)*)", section.split("\n\n")[0], re.M)
    return {name: " ".join(text.split()) for name, text in found}
