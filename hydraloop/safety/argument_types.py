"""Check the arguments of a project's own classes and functions against their annotations, with pydantic.

Hydra calls `call` in place of the class, because the objects in the arguments are built only then.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import shlex
import types
import typing
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, open_dict

from hydraloop.errors import UserError, suggestion

CALL = f"{__name__}.call"
_LAZY = (Iterable, Iterator, Generator)
"""pydantic would replace these arguments by an iterator that can be read once."""


def add_check(node: DictConfig, key: str) -> None:
    """Change a node with `_target_` so that its arguments are checked when it is instantiated."""
    with open_dict(node):  # a node of our options, whose class the project has replaced, has no `_args_`
        node._args_ = [node._target_, key, node.get("_partial_", False), *(node.get("_args_") or ())]
        node._target_, node._partial_ = CALL, False


def call(path: str, key: str, is_partial: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call a class or function with its arguments, converted to the annotated types; or return its partial.

    Args:
        path: of the class, which has passed the allowlist.
        key: of its node, for errors.
        is_partial: whether to return a `functools.partial`.

    Raises:
        UserError: an argument does not have the annotated type.
    """
    target = _found(path)
    parameters = _parameters(target)
    for name, value in kwargs.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
            kwargs[name] = _converted(value, parameter, _annotation(parameter, target), f"{key}.{name}")
    return functools.partial(target, *args, **kwargs) if is_partial else target(*args, **kwargs)


def _found(path: str) -> Any:
    module, _, rest = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ModuleNotFoundError:  # a classmethod: its class is in the module
        return getattr(_found(module), rest)


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):  # some builtins have none
        return {}


def _annotation(parameter: inspect.Parameter, target: Any) -> Any:
    """Return the type of a parameter; `Any` if it has none, or names something that exists only for type checkers."""
    found = parameter.annotation
    if found is inspect.Parameter.empty:
        return Any
    function = inspect.unwrap(inspect.getattr_static(target, "__init__") if isinstance(target, type) else target)
    holder = types.SimpleNamespace(__annotations__={"": found})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)[""]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


def _converted(value: Any, parameter: inspect.Parameter, annotation: Any, key: str) -> Any:
    if annotation is Any or type(value) is annotation or _is_lazy(annotation):
        return value
    if type(value) is type(parameter.default) and value == parameter.default:
        return value  # `size: int = None`
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # a third of a second
    from pydantic.errors import PydanticUserError

    try:
        # In a tuple, because a dataclass alone takes no configuration.
        adapter = TypeAdapter(tuple[annotation], config=ConfigDict(extra="forbid", coerce_numbers_to_str=True))
    except (PydanticUserError, TypeError):
        return value  # pydantic does not know the type
    try:
        (made,) = adapter.validate_python((value,))
        if "true" in (text := _json(value)) or "false" in text:  # otherwise, true is 1
            adapter.validate_json(f"[{text}]", strict=True)
    except ValidationError as error:
        raise _mistake(error.errors(include_url=False), value, parameter, annotation, key) from None
    return made


def _is_lazy(annotation: Any) -> bool:
    return typing.get_origin(annotation) in _LAZY or any(map(_is_lazy, typing.get_args(annotation)))


def _json(value: Any) -> str:
    """Return a value as JSON; an empty text if it contains objects."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ""


def _mistake(errors: list[Any], value: Any, parameter: inspect.Parameter, annotation: Any, key: str) -> UserError:
    first, inner = errors[0], value
    for part in first["loc"][1:]:  # it may also name members of unions, which the value does not have
        if isinstance(inner, Mapping) and part in inner:
            inner, key = inner[part], f"{key}.{part}"
        elif isinstance(inner, list | tuple) and isinstance(part, int):
            inner, key = inner[part], f"{key}[{part}]"
    if first["type"] == "unexpected_keyword_argument":
        near = suggestion(str(first["loc"][-1]), _fields(annotation))
        return UserError("there is no such option", key=key, remedy=near)
    if first["type"] == "missing":
        lacking = f"{key}.{first['loc'][-1]}"
        return UserError("has no value", key=lacking, remedy=f"Give it one: ++{lacking}=…")
    expected = inspect.formatannotation(annotation)
    reason = first["msg"][0].lower() + first["msg"][1:] if len(errors) == 1 else f"it must be one of {expected}"
    example = _json(parameter.default).strip('"').replace(", ", ",")
    if "[" in key:
        remedy = f"Write the whole list: '++{key.partition('[')[0]}=[…]'"
    elif inner is not value:
        remedy = f"Write another value: ++{key}=…"
    elif parameter.default is not None and re.fullmatch(r"[\w.+-]+|\[[\w.+,-]*\]", example):
        remedy = f"It takes {expected}: {shlex.quote(f'++{key}={example}')}"
    else:
        remedy = f"It takes {expected}."
    return UserError(f"{inner!r} does not fit: {reason}", key=key, remedy=remedy)


def _fields(annotation: Any) -> list[str]:
    """Return the fields of the dataclasses in a type."""
    own = [entry.name for entry in dataclasses.fields(annotation)] if dataclasses.is_dataclass(annotation) else []
    return [*own, *(name for part in typing.get_args(annotation) for name in _fields(part))]
