"""Arguments of a project's classes, from their source: the help and a composition run no code of a project."""

from __future__ import annotations

import ast
import os.path
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.config.arguments import parse
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.schemas.selected_hooks import HOOK_GROUPS

OF_ALL_HOOKS = ("priority", "on_error")
"""The options of `HookConf`, which every hook has."""


class OwnClass(NamedTuple):
    """A class of the project, or a function."""

    summary: str = ""
    """The first line of its docstring."""
    arguments: list[str] | None = None
    """Names of the arguments of its constructor. None: they are not known, and so every name is one."""
    order: Mapping[str, Any] = {}
    """What decides the place of a hook whose only base is `Hook`: `priority`, `runs_after` and its methods, as
    `mount_points`."""


def own_class(target: object) -> OwnClass | None:
    """Return what the project's source says about the class that a `_target_` names. None: it has no such file."""
    module, _, name = str(target).rpartition(".")
    parts = module.split(".")
    if not module.replace(".", "a").isidentifier() or parts[0] == "hydraloop":
        return None
    files = [Path(folder, *parts[:-1], f"{parts[-1]}.py") for folder in ALLOWLIST.folders]
    files += [Path(folder, *parts, "__init__.py") for folder in ALLOWLIST.folders]
    files += [Path(getattr(sys.modules["__main__"], "__file__", None) or "")] if module == "__main__" else []
    file = next((one for one in files if os.path.isfile(one) and ALLOWLIST.is_project_file(str(one))), None)
    if file is None:
        return None
    with suppress(OSError, SyntaxError, ValueError):  # importing the file raises them
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return OwnClass((ast.get_docstring(node) or "").partition("\n")[0], _arguments(node), _order(node))
    return OwnClass()


def _order(node: ast.ClassDef | ast.FunctionDef) -> dict[str, Any]:
    if isinstance(node, ast.FunctionDef) or _bases(node) != ["Hook"]:
        return {}
    order: dict[str, Any] = {"mount_points": [one.name for one in node.body if isinstance(one, ast.FunctionDef)]}
    for one in node.body:
        name = ast.unparse(one.targets[0]) if isinstance(one, ast.Assign) else ""
        if isinstance(one, ast.Assign) and name in ("priority", "runs_after"):
            value = one.value
            order[name] = value.attr if isinstance(value, ast.Attribute) else ast.literal_eval(value)  # Priority.LOW
    return order


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def _arguments(node: ast.ClassDef | ast.FunctionDef) -> list[str] | None:
    functions = [one for one in [node, *node.body] if isinstance(one, ast.FunctionDef)]
    constructor = next((one for one in functions if one.name in (node.name, "__init__")), None)
    if constructor is not None:
        given = constructor.args
        names = [one.arg for one in [*given.args, *given.kwonlyargs] if one.arg != "self"]
        return None if given.kwarg else names
    assert isinstance(node, ast.ClassDef)
    is_dataclass = "dataclass" in [ast.unparse(one).rpartition(".")[2].partition("(")[0] for one in node.decorator_list]
    if _bases(node) not in ([], ["Hook"]):
        return None
    return [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign) and is_dataclass]


def arguments_of(target: object, section: str) -> list[str] | None:
    """Return the options that a section takes although the config lacks them. None: any.

    Args:
        target: its `_target_`.
        section: its key, `hooks.mine`.
    """
    own = own_class(target) or OwnClass(arguments=[])
    is_hook = target is not None and section.rpartition(".")[0] in HOOK_GROUPS
    return None if own.arguments is None else [*own.arguments, *(OF_ALL_HOOKS if is_hook else ())]


def with_own_arguments(error: Exception, lines: Sequence[str]) -> list[str]:
    """Return the overrides, with `++` before each one that gives an own class an argument that the config lacks.

    Args:
        error: that the overrides have raised. Its cause has the config.
    """
    node = getattr(error.__cause__, "parent_node", None)
    if node is None:
        return list(lines)
    cfg: DictConfig = node._get_root()  # the config as composed until the error; no public name gives it
    parsed = parse(lines)
    typed = {one.key_or_group: one.value() for one in parsed}
    result = []
    for one in parsed:
        line, key = str(one.input_line), one.key_or_group
        section, _, name = key.rpartition(".")
        present = select(cfg, section)
        is_new = not isinstance(present, DictConfig) or name not in present
        if is_new and one.type is OverrideType.CHANGE and not one.is_sweep_override() and section and name[:1] != "_":
            target = typed.get(f"{section}._target_", select(cfg, f"{section}._target_"))
            taken = arguments_of(target, section)
            line = f"++{line}" if taken is None or name in taken else line
        result.append(line)
    return result


def select(cfg: DictConfig, key: str) -> Any:
    """Return the value at a key; None if the key does not exist, also if the path leads through a list."""
    with suppress(OmegaConfBaseException):
        return OmegaConf.select(cfg, key) if key else cfg
    return None
