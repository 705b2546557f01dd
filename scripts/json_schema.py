"""The JSON Schema of a config without options of a project, for editors and `--help --json`.

`scripts/hook_docs.py` writes it into `hydraloop/schemas/config.json`; `hydraloop schema` adds a project's own options.
Types, defaults and texts come from the dataclasses in `hydraloop/schemas`, ranges and choices from the checks in
`hydraloop/validate/values.py`, in the constructors of hooks and in the functions of schedules. Does not import torch.

Nothing is required. Each value may also be `${…}` or `???`. A section that `_target_` may change to another class takes
any key beside `_target_`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import hydraloop  # stores the options
from hydraloop.engine.hook import ON_ERROR, Priority
from hydraloop.errors import any_of
from hydraloop.hooks import CLASSES
from hydraloop.schemas import stored
from hydraloop.schemas.data import AT_LEAST as OF_LOADERS
from hydraloop.schemas.data import LoaderConf
from hydraloop.schemas.docs import field_docs
from hydraloop.schemas.hook import HookConf
from hydraloop.schemas.root import Config
from hydraloop.validate import values

ROOT = Path(hydraloop.__file__).parent
LATER = r"\$\{|^\?\?\?$"
"""An interpolation, or a value that is still missing."""
NUMBER = r"|^[-+]?\.?(inf|nan|[0-9][0-9_.]*([eE][-+]?[0-9]+)?)$"
"""A number that is written as a text. OmegaConf reads it."""
SWITCH = "|^(true|false|yes|no|on|off)$"
TYPES: dict[Any, tuple[list[str], str]] = {
    bool: (["boolean"], SWITCH),
    int: (["integer"], NUMBER),
    float: (["number"], NUMBER),
    str: (["string", "number"], "|"),
    type(None): (["null"], ""),
}
"""By type: the types of JSON, and the pattern of texts that mean the same. `|` matches any text."""


def text() -> str:
    """Return the contents of `config.json`."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def document() -> dict[str, Any]:
    """Return the schema of a whole config."""
    limits = {key: {"minimum": least} for key, (least, _) in values.AT_LEAST.items()}
    limits |= {f"data.loader.{name}": {"minimum": least} for name, (least, _) in OF_LOADERS.items()}
    limits |= {key: {"exclusiveMinimum": 0} for key in values.ABOVE_0}
    limits |= {key: {"enum": list(choices)} for key, choices in values.CHOICES.items()}
    properties = _fields(Config, "", limits)
    schedules = {name: section(_scheduler(schema), null=True) for name, schema in stored("scheduler")}
    one = section(_union(_scheduler(schema) for _, schema in stored("scheduler")), null=True)
    optimizer = section(_union(_fields(schema, "optimizer", limits) for _, schema in stored("optimizer")))
    several = {**optimizer, "then": {**optimizer["then"], "additionalProperties": optimizer}}
    task = _union(_fields(schema, "task", limits) for _, schema in stored("task"))
    task["model"] |= section(_union(_fields(schema, "task.model", limits) for _, schema in stored("model")))
    data = _union(_fields(schema, "data", limits) for _, schema in stored("data"))
    for split in ("train", "val", "test"):
        data[f"{split}_loader"] |= section(_fields(LoaderConf, "data.loader", limits))
    sections = {
        "task": section(task),
        "data": section(data),
        "optimizer": several,
        "scheduler": {**_object(schedules), "additionalProperties": one},
        "precision": section(_union(_fields(schema, "precision", limits) for _, schema in stored("precision"))),
        "default_hooks": _hooks("default_hooks"),
        "hooks": _hooks("hooks"),
    }
    for name, found in sections.items():
        properties[name] |= found
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A config of hydraloop", "type": "object"}
    return {**head, "properties": {**properties, "hydra": {}}, "additionalProperties": False}


def section(properties: Mapping[str, Any], *, null: bool = False) -> dict[str, Any]:
    """Return the schema of a mapping with these keys, and with any key if it has `_target_`."""
    closed = {"properties": dict.fromkeys(properties, True), "additionalProperties": False}
    found = {**_object(properties), "if": {"not": {"required": ["_target_"]}}, "then": closed}
    return {**found, "type": [*found["type"], "null"]} if null else found


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "string"], **_text(LATER, ["object"]), "properties": dict(properties)}


def _text(pattern: str, types: list[str]) -> dict[str, str]:
    """Return what a text may be if it is not one of the types, and what an editor says about another text."""
    words = {"integer": "whole number", "object": "mapping", "array": "list"}
    expected = any_of([words.get(name, name) for name in types])
    return {"pattern": pattern, "patternErrorMessage": f"Expected: {expected}"}


def _hooks(group: str) -> dict[str, Any]:
    hooks = {name: section(_fields(schema, "", _hook_limits(schema)), null=True) for name, schema in stored(group)}
    other = {**_object(_fields(HookConf, "", _hook_limits(HookConf))), "type": ["object", "string", "null"]}
    return {**_object(hooks), "additionalProperties": other}


def _scheduler(schema: Any) -> dict[str, Any]:
    name = str(schema._target_).rpartition(".")[2]
    return _fields(schema, "", _schedule_limits(name))


def _fields(schema: Any, key: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each field of a dataclass.

    Args:
        key: of the section. The limits are by full keys.
    """
    docs, hints = field_docs(schema), typing.get_type_hints(schema)
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(schema), resolve=False)
    found = {}
    for entry in dataclasses.fields(schema):
        own = f"{key}.{entry.name}".lstrip(".")
        described = {"description": docs[entry.name]} if entry.name in docs else {}
        default = defaults[entry.name]
        plain = default != "???" and not entry.name.startswith("_") and not isinstance(default, dict)
        described |= {"default": default} if plain and default == default else {}
        found[entry.name] = described | _of(hints[entry.name], own, limits)
    return found


def _of(hint: Any, key: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value of a type."""
    if dataclasses.is_dataclass(hint):
        return {**_object(_fields(hint, key, limits)), "additionalProperties": False}
    if key.rpartition(".")[2] == "priority":
        texts = {"type": "string", "pattern": f"{LATER}|^[a-z_]+$|^[0-9]+$"}
        numbers = {"type": "integer", "minimum": 0, "maximum": 100}
        return {"anyOf": [{"enum": [*Priority.__members__, None]}, numbers, texts]}
    if hint is Any:
        return {}
    types, pattern, rest = [], LATER, dict(limits.get(key, {}))
    for part in typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,):
        names, texts = TYPES.get(part, ([], ""))
        origin, inner = typing.get_origin(part), typing.get_args(part)
        if origin in (list, tuple):
            names, rest = ["array"], {"items": _of(inner[0], key, limits)}
        elif origin is dict:
            names, rest = ["object"], {"additionalProperties": _of(inner[1], f"{key}.*", limits)}
        types += names
        pattern += texts
    if "enum" in rest:
        choices = rest["enum"] + ([None] if "null" in types else [])
        return {"anyOf": [{"enum": choices}, {"type": "string", "pattern": LATER}]}
    texts = {} if pattern.endswith("|") else _text(pattern, types)
    return {"type": list(dict.fromkeys([*types, "string"])), **texts, **rest}


def _union(several: Any) -> dict[str, Any]:
    """Return the fields of all options of a group. A field that differs between them may have any of its forms."""
    found: dict[str, Any] = {}
    for fields in several:
        for name, one in fields.items():
            forms = found.setdefault(name, [])
            if not any(_form(one) == _form(other) for other in forms):
                forms.append(one)
    return {name: forms[0] if len(forms) == 1 else _any_of(forms) for name, forms in found.items()}


def _form(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name not in ("description", "default")}


def _any_of(forms: list[dict[str, Any]]) -> dict[str, Any]:
    described = {"description": forms[0]["description"]} if "description" in forms[0] else {}
    return described if any(not _form(one) for one in forms) else {**described, "anyOf": [*map(_form, forms)]}


# Ranges and choices, from the sources. -------------------------------------------------------------------------------


def _hook_limits(schema: Any) -> dict[str, Any]:
    """Return what the constructor of a hook checks with the functions of `hydraloop.option_checks`."""
    limits: dict[str, Any] = {"on_error": {"enum": [*ON_ERROR]}}
    module = CLASSES.get(str(schema._target_).rpartition(".")[2], {}).get("module")
    for source in () if module is None else _sources(module):
        limits |= _checked(source, str(module))
    return limits


def _checked(source: ast.AST, module: str) -> dict[str, Any]:
    """Return the limits of the options that a source passes to the functions of `hydraloop.option_checks`."""
    limits: dict[str, Any] = {}
    for node in ast.walk(source):
        check = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and check in ("check_at_least", "check_above", "check_choice"):
            for one in node.keywords:
                forms = (one.arg, f"self.{one.arg}", f"options.get('{one.arg}')")
                if one.arg is not None and ast.unparse(one.value) in forms:
                    limits[one.arg] = _limit(check, node.args[0], module)
    return limits


def _sources(module: str) -> Iterator[ast.Module]:
    path = ROOT.parent / module.replace(".", "/")
    files = path.with_suffix(".py"), *(path.parent.glob("*.py") if path.parent.name not in ("hooks", "shared") else ())
    for file in dict.fromkeys(files):
        yield ast.parse(file.read_text(encoding="utf-8"))


def _limit(check: str, argument: ast.expr, module: str) -> dict[str, Any]:
    if check == "check_choice":
        return {"enum": list(_names(argument, module))}
    return {"minimum" if check == "check_at_least" else "exclusiveMinimum": ast.literal_eval(argument)}


def _names(node: ast.expr, module: str) -> Iterator[str]:
    """Yield the texts in a tuple, or the keys of a dict, that may be the value of a name."""
    if isinstance(node, ast.Tuple):
        for part in node.elts:
            yield from [str(part.value)] if isinstance(part, ast.Constant) else _names(part.value, module)
    elif isinstance(node, ast.Dict):
        yield from (str(ast.literal_eval(key)) for key in node.keys if key is not None)
    elif isinstance(node, ast.Name):
        source = ast.parse((ROOT.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for statement in source.body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if isinstance(statement, ast.ImportFrom) and node.id in [one.name for one in statement.names]:
                yield from _names(node, str(statement.module))
            elif any(isinstance(one, ast.Name) and one.id == node.id for one in targets):
                yield from _names(statement.value, module)


def _schedule_limits(name: str) -> dict[str, Any]:
    """Return what the constructor of a schedule's class checks; empty for a class of torch."""
    source = ast.parse((ROOT / "optim" / "schedule_functions.py").read_text(encoding="utf-8"))
    classes = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name]
    return _checked(classes[0], "hydraloop.optim.schedule_functions") if classes else {}
