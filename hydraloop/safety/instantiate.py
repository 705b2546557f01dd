"""Instantiate a config node. Before anything is called, targets pass the allowlist and arguments the signatures."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hydraloop.errors import UserError, emptying, suggestion
from hydraloop.safety import hydra_versions
from hydraloop.safety.allowlist import ALLOWLIST

_SPECIAL = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


def instantiate(node: Any, key: str) -> Any:
    """Return the object that a config node describes. Nested `_target_`s pass the allowlist too.

    Args:
        node: a mapping with `_target_`.
        key: its full key in the config, for errors.

    Raises:
        UserError: a target is refused or unknown, or does not take the arguments.
    """
    require_target(node, key)
    allowed = []
    for where, target_node in _targets(node, key):
        name = target_node._target_
        if not isinstance(name, str):
            raise UserError(f"_target_ is {_shown(name)}, not the path of a class", key=f"{where}._target_")
        target = locate(name, where)
        _check_arguments(target, target_node, where)
        allowed += [name, f"{target.__module__}.{target.__qualname__}"]
    try:
        return hydra_versions.instantiate(node, allowed)
    except Exception as error:
        where, cause = hydra_versions.failed_at(error) or key, _cause(error)
        mistake = _mistake_in(cause, node, where if where.startswith(key) else f"{key}.{where}", key)
        if mistake is None:
            raise
        raise mistake from (None if isinstance(cause, UserError | ModuleNotFoundError) else error)


def instantiate_callable(node: Any, key: str) -> Any:
    """Return the object that a config node describes, or a partial if the node names a function.

    `_partial_` in the node decides otherwise. Arguments and errors: as `instantiate`.
    """
    return instantiate(as_callable(node, key), key)


def as_callable(node: Any, key: str) -> Any:
    """Return a config node with `_partial_: true` if it names a function and does not say otherwise."""
    require_target(node, key)
    if "_partial_" not in node and isinstance(node._target_, str) and not inspect.isclass(locate(node._target_, key)):
        node = copy.deepcopy(node)  # keeps the parent, for interpolations
        with open_dict(node):
            node._partial_ = True
    return node


def require_target(node: Any, key: str) -> None:
    """Check that a config node describes an object."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError(
            f"there is nothing to build: expected a mapping with _target_, got {_shown(node)}",
            key=key,
            remedy="Select an option of the group, or name a class with _target_.",
        )


def locate(name: str, key: str) -> Any:
    """Return the object that a `_target_` names, as `Allowlist.locate`. A missing package is the user's mistake."""
    try:
        return ALLOWLIST.locate(name, key)
    except ModuleNotFoundError as error:
        raise _not_installed(error, f"{key}._target_") from None


def _targets(node: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """Yield every node with `_target_` in `node`, itself included, with its key."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield key, node
        for name in node:
            if OmegaConf.is_missing(node, name):
                remedy = f"Give it one: {key}.{name!s}=…"
                raise UserError("has no value", key=f"{key}.{name!s}", remedy=remedy)
            yield from _targets(node[name], f"{key}.{name!s}")
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _targets(item, f"{key}[{index}]")


def _check_arguments(target: Any, node: DictConfig, key: str) -> None:
    """Refuse arguments that a class or function does not take. With a decorator, those that the decorator takes count.

    transformers' `BertConfig` declares only its fields, and also takes others, such as `num_labels`, in `**kwargs`.
    """
    try:
        signature = inspect.signature(target, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return
    given = {str(name): None for name in node if name not in _SPECIAL}
    bind = signature.bind_partial if node.get("_partial_", False) else signature.bind
    try:
        bind(*[None] * len(node.get("_args_") or ()), **given)
    except TypeError as error:
        name, known = getattr(target, "__qualname__", str(target)), list(signature.parameters)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        unknown = [] if takes_any else [argument for argument in given if argument not in known]
        if unknown:
            raise _unknown_argument(name, unknown[0], known, node, key) from None
        raise UserError(f"{name}: {error}", key=key, remedy=f"Its signature is {name}{signature}.") from error


def _unknown_argument(name: str, argument: str, known: list[str], node: DictConfig, key: str) -> UserError:
    schema = OmegaConf.get_type(node)
    replaced = getattr(schema, "_target_", node._target_)
    if replaced != node._target_ and argument in getattr(schema, "__dataclass_fields__", ()):
        clear = f"{key}=null" if "." in key else f"~{key}"  # a group that every run needs takes no null
        added = " ".join(f"+{key}.{entry}={node[entry]}" for entry in ("_target_", "_partial_") if entry in node)
        remedy = f"On the command line, remove the old values, and write each argument with a +: {clear} {added}"
        if line := emptying(key):
            remedy = f"In a config file, write in its defaults list: {line}\n  {remedy}"
        problem = f"{name} takes no argument {argument!r}, which is left from {replaced}"
        return UserError(problem, key=f"{key}.{argument}", remedy=remedy)
    remedy = suggestion(argument, known)
    if schema is dict and "[" not in key:  # only such a node can lose an entry
        remedy += f" To remove one that a config file has set: ~{key}.{argument}"
        if key.startswith("data."):
            remedy += "\n  An experiment with other data begins with defaults: [/hydraloop/no_data, _self_]"
    return UserError(f"{name} takes no argument {argument!r}", key=f"{key}.{argument}", remedy=remedy)


def _cause(error: BaseException) -> BaseException:
    """Return the error of the constructor for an error of Hydra."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _mistake_in(cause: BaseException, node: DictConfig, where: str, key: str) -> UserError | None:
    """Return the user's mistake that made a constructor fail; None if it may be a bug.

    A file or a package that does not exist is a mistake, and so is a value that the class refuses (`refused`). Another
    error may be a bug.

    Args:
        where: the key of the node whose constructor failed.
        key: the key of `node`, which contains it.
    """
    if isinstance(cause, UserError):
        inner_key = cause.key or ""
        full = inner_key if inner_key.startswith(where) else f"{where}.{inner_key}".rstrip(".")
        return UserError(cause.problem, key=full, remedy=cause.remedy)
    if isinstance(cause, FileNotFoundError) and cause.filename is not None:
        return UserError(f"there is no file {cause.filename}", key=where, remedy="Create it, or name another one.")
    if isinstance(cause, ModuleNotFoundError):
        return _not_installed(cause, where)
    inner = OmegaConf.select(node, where.removeprefix(key).lstrip(".")) if where != key else node
    return refused(inner, cause, where) if isinstance(inner, DictConfig) and "_target_" in inner else None


def refused(node: DictConfig, cause: BaseException, key: str) -> UserError | None:
    """Return the error of a class that refuses its options; None if it may be a bug.

    A `ValueError` is about the options. So are some other errors of the classes of torch and hydraloop. The remedy is
    the options that `cause` names.
    """
    options = {str(name): value for name, value in node.items() if name not in _SPECIAL}
    words = set(re.findall(r"[\w.+-]+", str(cause)))
    named = [name for name, value in options.items() if words & {name, str(value)}]
    target = str(node._target_)
    ours = target.startswith(("torch.", "torchmetrics.", "hydraloop."))
    of_options = (ValueError, TypeError, IndexError, RuntimeError) if ours else ValueError
    if not isinstance(cause, of_options) or isinstance(cause, OmegaConfBaseException):
        return None
    change = ", ".join(f"{key}.{name}" for name in named or options)
    return UserError(
        f"{target.rpartition('.')[2]} refuses its options: {cause}{'' if ours else _place(cause)}",
        key=key,
        remedy=f"Change {change or f'{key}._target_, or add an option: +{key}.NAME=…'}.",
    )


def _not_installed(error: ModuleNotFoundError, key: str) -> UserError:
    problem = f"{str(error).rstrip('.')}{_place(error)}"
    return UserError(problem, key=key, remedy="Check the spelling, or install the package.")


def _place(error: BaseException) -> str:
    """Return the last line of the project that led to an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if ALLOWLIST.is_project_file(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r}"
