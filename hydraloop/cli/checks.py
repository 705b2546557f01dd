"""Mistakes with hooks that Hydra lets pass, or explains in its own words only."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.arguments import HOOK_GROUPS
from hydraloop.engine.hook import ON_ERROR, Priority
from hydraloop.errors import UserError, suggestion


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


def not_selected(override: Override, cfg: DictConfig, known: dict[str, list[str]]) -> UserError | None:
    """The error of an override under a hook that is not in the config; None where it is something else."""
    group, _, rest = override.key_or_group.partition(".")
    name, _, option = rest.partition(".")
    if group not in HOOK_GROUPS or not option:
        return None
    if OmegaConf.select(cfg, f"{group}.{name}") is not None:
        return None
    key, line = f"{group}.{name}", (override.input_line or "").lstrip("+")
    selected = [str(other) for other, node in cfg[group].items() if node is not None]
    other_group = "hooks" if group == "default_hooks" else "default_hooks"
    if OmegaConf.select(cfg, f"{other_group}.{name}") is not None:
        return UserError(f"{name} is a {_kind(other_group)}", key=key, remedy=f"Write {other_group}.{name}.{option}=…")
    if name in known[group]:
        works = f"'{group}=[{','.join([*selected, name])}]' {line}"
        return UserError(f"the hook {name} is not selected", key=key, remedy=f"This works: {works}")
    if option == "_target_":
        return None
    return UserError(
        f"there is no hook {name} here",
        key=key,
        remedy=f"{suggestion(name, known[group])} For one of your own, +{key}._target_=package.Class adds it.",
    )


def check_hooks(cfg: DictConfig, known: dict[str, list[str]]) -> None:
    """Refuse half hooks, and priorities and `on_error`s that mean nothing.

    Raises:
        UserError: names the key.
    """
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is None:
                continue
            key = f"{group}.{name}"
            if not isinstance(node, DictConfig) or "_target_" not in node:
                raise _half_hook(str(name), node, key, group, known)
            priority, on_error = node.get("priority"), node.get("on_error")
            if priority is not None:
                Priority.of(priority, key=f"{key}.priority")
            if on_error is not None and on_error not in ON_ERROR:
                raise UserError(f"{on_error!r} is unknown", key=f"{key}.on_error", remedy=f"Use {', '.join(ON_ERROR)}.")


def _half_hook(name: str, node: object, key: str, group: str, known: dict[str, list[str]]) -> UserError:
    """A value under a hook group that is no hook: selected without a package line, or put together by `+`."""
    if name in known[group]:
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
