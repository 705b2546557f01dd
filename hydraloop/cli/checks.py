"""Mistakes that Hydra lets pass, or explains in its own words only: with groups, keys, interpolations, hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from hydraloop.cli.arguments import HOOK_GROUPS, is_sweep
from hydraloop.cli.compose import Composer, hydra_config
from hydraloop.engine.hook import ON_ERROR, Priority
from hydraloop.errors import UserError, suggestion
from hydraloop.schemas.root import Config

_REQUIRED = [entry.name for entry in dataclasses.fields(Config) if entry.default == MISSING]
"""Groups that no run goes without."""


def check_overrides(overrides: Sequence[Override]) -> None:
    """Refuse overrides of hooks that the same line removes, in whatever order the two stand.

    Raises:
        UserError: names the hook.
    """
    removed = {name for override in overrides if (name := _removed(override))}
    for override in overrides:
        group, _, rest = override.key_or_group.partition(".")
        name, _, option = rest.partition(".")
        if group in HOOK_GROUPS and option and f"{group}.{name}" in removed:
            raise UserError(
                f"{override.input_line} changes a hook that the same line removes",
                key=f"{group}.{name}",
                remedy="Leave one of the two out.",
            )


def check_groups(overrides: Sequence[Override], composer: Composer) -> None:
    """Refuse what is no option of a config group: Hydra's own words for it are a Python error.

    Raises:
        UserError: names the group.
    """
    for override in overrides:
        group = override.key_or_group
        if is_sweep(override) or isinstance(override.value(), dict) or not composer.is_group(group):
            continue
        value = override.value()
        if not group:
            raise UserError(f"{override.input_line!r} has no key", remedy="Write key=value, or ~key to delete.")
        if override.is_delete():
            if value is not None and not isinstance(value, str):
                raise UserError(f"{override.input_line!r} deletes no option", key=group, remedy=f"Write ~{group}")
        elif value is None or value == "":
            raise UserError(
                f"{'null' if value is None else 'nothing'} is no option",
                key=group,
                remedy=_options(group, composer)
                if group in _REQUIRED
                else f"To have none, take the group out: ~{group}. {_options(group, composer)}",
            )
        elif not isinstance(value, str) and not (isinstance(value, list) and all(_is_name(item) for item in value)):
            raise UserError(f"{value!r} is no option", key=group, remedy=_options(group, composer))


def check_complete(cfg: DictConfig) -> None:
    """Refuse a config in which a key of hydraloop is gone, a group has no option, or an interpolation leads nowhere.

    Raises:
        UserError: names the key.
    """
    for entry in dataclasses.fields(Config):
        if entry.name not in cfg:  # OmegaConf counts a missing value (???) as not there
            raise UserError(
                "no run goes without it",
                key=entry.name,
                remedy=f"Leave ~{entry.name} out if you wrote that, or give it a value: {entry.name}=…",
            )
    for key, node, known in _sections(cfg):
        for name in node:
            if str(name) not in known:
                raise UserError("there is no such option", key=f"{key}.{name!s}", remedy=suggestion(str(name), known))
    with hydra_config(cfg):
        _check_interpolations(cfg, "")


def _sections(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, list[str]]]:
    """(key, mapping, its options) of what hydraloop reads itself (not what a `_target_` takes); a + gets past types."""
    for name in cfg:
        if name == "hydra" or OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, str(name)):
            continue
        node, key = cfg[name], f"{prefix}{name!s}"
        if not isinstance(node, DictConfig) or "_target_" in node:
            continue
        schema = OmegaConf.get_type(node)
        if schema is not None and dataclasses.is_dataclass(schema):
            yield key, node, [entry.name for entry in dataclasses.fields(schema)]
        yield from _sections(node, f"{key}.")


def _check_interpolations(node: DictConfig, prefix: str) -> None:
    for name, raw in node.items_ex(resolve=False):
        key = f"{prefix}{name!s}"
        # What Hydra says of a job (${hydra:runtime.output_dir}) is known once it runs.
        if key == "hydra" or OmegaConf.is_missing(node, name) or (isinstance(raw, str) and "${hydra:" in raw):
            continue
        try:
            value = node[name]
        except InterpolationResolutionError as error:
            raise UserError(
                f"{raw!s} does not resolve: {str(error).splitlines()[0]}",
                key=key,
                remedy="Name a key that is there (or set the variable), or write a value.",
            ) from error
        if isinstance(value, DictConfig):
            _check_interpolations(value, f"{key}.")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _options(group: str, composer: Composer) -> str:
    return f"Options: {', '.join(composer.options(group))}."


def not_selected(override: Override, cfg: DictConfig, options: Callable[[str], list[str]]) -> UserError | None:
    """The error of an override under a hook that is not in the config; None where it is something else."""
    group, _, rest = override.key_or_group.partition(".")
    name, _, option = rest.partition(".")
    if group not in HOOK_GROUPS or not name or override.is_delete():
        return None
    if OmegaConf.select(cfg, f"{group}.{name}") is not None:
        return None
    key, line = f"{group}.{name}", (override.input_line or "").lstrip("+")
    if not option and override.value() is None:
        return UserError(f"the hook {name} is not selected", key=key, remedy=f"Leave {line} out.")
    selected = [str(other) for other, node in cfg[group].items() if node is not None]
    other_group = "hooks" if group == "default_hooks" else "default_hooks"
    if OmegaConf.select(cfg, f"{other_group}.{name}") is not None:
        works = f"{other_group}.{name}.{option}".rstrip(".")
        return UserError(f"{name} is a {_kind(other_group)}", key=key, remedy=f"Write {works}=…")
    if name in options(group):
        works = f"'{group}=[{','.join([*selected, name])}]' {line if option else ''}".rstrip()
        return UserError(f"the hook {name} is not selected", key=key, remedy=f"This works: {works}")
    if option in ("", "_target_"):
        return UserError("it is not there yet", key=key, remedy=f"To add it, write a +: +{line}")
    return UserError(
        f"there is no hook {name} here",
        key=key,
        remedy=f"{suggestion(name, options(group))} For one of your own, +{key}._target_=package.Class adds it.",
    )


def check_hooks(cfg: DictConfig, options: Callable[[str], list[str]]) -> None:
    """Refuse half hooks, and priorities and `on_error`s that mean nothing.

    Raises:
        UserError: names the key.
    """
    for name in cfg.hooks:
        if cfg.hooks[name] is not None and cfg.default_hooks.get(name) is not None:
            raise UserError(
                f"there is a default hook {name!r} already", key=f"hooks.{name}", remedy="Give it another name."
            )
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is None:
                continue
            key = f"{group}.{name}"
            if Path(str(name)).name != str(name) or "\\" in str(name):
                raise UserError("files are named after hooks", key=key, remedy="Use a name without slashes.")
            if not isinstance(node, DictConfig) or "_target_" not in node:
                raise _half_hook(str(name), node, key, group, options)
            priority, on_error = node.get("priority"), node.get("on_error")
            if priority is not None:
                Priority.of(priority, key=f"{key}.priority")
            if on_error is not None and on_error not in ON_ERROR:
                raise UserError(f"{on_error!r} is unknown", key=f"{key}.on_error", remedy=f"Use {', '.join(ON_ERROR)}.")


def _half_hook(name: str, node: object, key: str, group: str, options: Callable[[str], list[str]]) -> UserError:
    """A value under a hook group that is no hook: selected without a package line, or put together by `+`."""
    if name in options(group):
        remedy = f"Select it: {group}=[…,{name}]; its options are then changed without a +."
    elif isinstance(node, DictConfig):
        remedy = f"Add +{key}._target_=package.Class, or in its file the line: # @package {group}.<name>"
    else:
        remedy = f"The file it comes from needs the line: # @package {group}.<name>"
    shown = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    return UserError(f"{shown!r} is no hook: it has no _target_", key=key, remedy=remedy)


def _kind(group: str) -> str:
    return "default hook" if group == "default_hooks" else "hook of the group hooks"


def _removed(override: Override) -> str | None:
    """`default_hooks.logger` for `~default_hooks.logger` and `default_hooks.logger=null`."""
    group, _, name = override.key_or_group.partition(".")
    if group not in HOOK_GROUPS or not name or "." in name:
        return None
    return override.key_or_group if override.is_delete() or override._value is None else None
