"""The hooks of a config: what is not a hook, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config.project_classes import OwnClass, own_class
from hydraloop.engine.hook import ON_ERROR, Priority
from hydraloop.engine.hook_order import Slot, in_order, missing
from hydraloop.errors import UserError, close_names, use_one_of
from hydraloop.schemas import stored
from hydraloop.schemas.selected_hooks import HOOK_CLASSES, HOOK_GROUPS, has_schedules, targets

_LONGEST = 100
"""Characters of a hook's name. Names of files have up to 255 bytes."""


def hook_nodes(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield (key, config) of each hook; a hook's name may contain dots."""
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if isinstance(node, DictConfig):
                yield f"{group}.{name}", node


def slots_of(cfg: DictConfig) -> list[Slot]:
    """Return the hooks' places in the order, from the config and the facts about their classes. No hook is imported."""
    slots = []
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is not None:
                slots.append(_slot(group, str(name), str(node.get("_target_")), node.get("priority")))
    selected = targets(cfg)
    for name in missing({str(name) for group in HOOK_GROUPS for name in cfg[group]}, scheduled=has_schedules(cfg)):
        target = dict(stored("default_hooks"))[name]._target_
        if target not in selected:
            slots.append(_slot("default_hooks", name, target, None))
    return in_order(slots)


def _slot(group: str, name: str, target: str, priority: int | str | None) -> Slot:
    facts: Mapping[str, Any] = HOOK_CLASSES.get(target.removeprefix("hydraloop.hooks."), {})
    facts = facts or (own_class(target) or OwnClass()).order
    default = facts.get("priority", Priority.NORMAL)
    return Slot(
        name=name,
        priority=Priority.of(default if priority is None else priority, key=f"{group}.{name}.priority"),
        is_default=group == "default_hooks",
        runs_after=tuple(facts.get("runs_after", ())),
        mount_points=tuple(facts["mount_points"]) if facts else None,
    )


def check_hooks(cfg: DictConfig) -> None:
    """Refuse what is not a hook, a name that is used twice, and priorities and `on_error`s that are unknown."""
    for name, node in cfg.hooks.items():
        if node is not None and cfg.default_hooks.get(name) is not None:
            remedy = "Give it another name."
            raise UserError(f"there is a default hook {name!r} already", key=f"hooks.{name}", remedy=remedy)
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is None:
                continue
            key = f"{group}.{name}"
            if "/" in str(name) or "\\" in str(name) or not str(name).isprintable() or len(str(name)) > _LONGEST:
                remedy = f"Use up to {_LONGEST} letters, digits and signs without slashes."
                raise UserError("files are named after a hook", key=key, remedy=remedy)
            if not isinstance(node, DictConfig) or "_target_" not in node:
                raise _not_a_hook(str(name), cfg[group], group)
            if node.get("priority") is not None:
                Priority.of(node.priority, key=f"{key}.priority")
            on_error = node.get("on_error")
            if on_error is not None and on_error not in ON_ERROR:
                remedy = use_one_of(ON_ERROR)
                raise UserError(f"{on_error!r} is unknown", key=f"{key}.on_error", remedy=remedy)


def _not_a_hook(name: str, hooks: DictConfig, group: str) -> UserError:
    """A value under a hook group without a class: added with a +, or selected from a file without a package line."""
    node, header = hooks[name], f"# @package {group}.<name>"
    if name in dict(stored(group)):
        selected = f"[{','.join(map(str, hooks))}]"
        remedy = f"Select it: {group}={selected}. Its options are then changed without a +.\n"
        remedy += f"  In a config file, write in its defaults: - override /{group}: {selected}"
    elif isinstance(node, DictConfig):
        remedy = f"Add +{group}.{name}._target_=package.Class. A file in conf/{group}/ begins with: {header}"
        if close := close_names(name, dict(stored(group)), most=1, cutoff=0.8):
            remedy = f"Did you mean {close[0]}?"
    else:
        remedy = f"A file in conf/{group}/ begins with the line, before any comment: {header}"
        if name != "_target_":  # typed; not from a file without that line
            remedy = f"To add a custom hook: +{group}.{name}._target_=package.Class. {remedy}"
    shown = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    return UserError(f"{shown!r} is not a hook: it has no _target_", key=f"{group}.{name}", remedy=remedy)
