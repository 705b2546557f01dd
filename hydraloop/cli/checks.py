"""Mistakes in overrides that Hydra accepts, or that it reports as a Python error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf

from hydraloop.cli.arguments import is_sweep
from hydraloop.cli.compose import Composer
from hydraloop.errors import UserError, suggestion
from hydraloop.schemas.root import Config
from hydraloop.validate import HOOK_GROUPS

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


def _kind(group: str) -> str:
    return "default hook" if group == "default_hooks" else "hook of the group hooks"


def _removed(override: Override) -> str | None:
    """`default_hooks.logger` for `~default_hooks.logger` and `default_hooks.logger=null`."""
    group, _, name = override.key_or_group.partition(".")
    if group not in HOOK_GROUPS or not name or "." in name:
        return None
    return override.key_or_group if override.is_delete() or override._value is None else None
