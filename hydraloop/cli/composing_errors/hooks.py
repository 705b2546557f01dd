"""What is wrong with an override of a hook: the hook is not selected, or is in the other group."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from omegaconf import OmegaConf

from hydraloop.cli.composing_errors.case import Case
from hydraloop.cli.composing_errors.hints import with_plus
from hydraloop.errors import UserError, close_names, suggestion
from hydraloop.hooks.shared.selected_hooks import HOOK_GROUPS
from hydraloop.schemas import stored


def not_selected(case: Case, found: re.Match[str]) -> UserError | None:
    """An override of a hook that is not in the config."""
    group, _, rest = case.key.partition(".")
    name, _, option = rest.partition(".")
    if group not in HOOK_GROUPS or not name or case.line.startswith("~") or not case.cfg:
        return None
    if OmegaConf.select(case.cfg, f"{group}.{name}") is not None:
        return None
    key, line = f"{group}.{name}", case.line.lstrip("+")
    if not option and case.value is None:
        remedy = f"Leave {line} out."
        return UserError("this hook is not selected", key=key, remedy=remedy)
    other_group = "hooks" if group == "default_hooks" else "default_hooks"
    if OmegaConf.select(case.cfg, f"{other_group}.{name}") is not None:
        works = f"{other_group}.{name}.{option}".rstrip(".")
        remedy = f"Use {works}=…"
        return UserError(f"{name} is in the group {other_group}", key=key, remedy=remedy)
    options = case.composer.options(group)
    for owner in (group, other_group):
        if name in case.composer.options(owner):
            lines = [line.replace(group, owner, 1)] if option else []
            return UserError("this hook is not selected", key=key, remedy=selecting(f"{owner}.{name}", lines, case))
    if option in ("", "_target_"):
        return UserError("this hook does not exist yet", key=key, remedy=with_plus("To add it, write a +: ", line))
    remedy = suggestion(name, options) + f" To add a custom hook: +{key}._target_=package.Class"
    return UserError(f"there is no hook {name}", key=key, remedy=remedy)


def selecting(hook: str, lines: Sequence[str], case: Case) -> str:
    """Return the remedy that selects `hooks.ema`, too, and adds overrides of it."""
    group, _, name = hook.partition(".")
    selected = [str(other) for other, node in case.cfg[group].items() if node is not None]
    select = f"{group}=[{','.join([*selected, name])}]"
    return " ".join([f"Use '{select}'", *lines])


def not_a_list(case: Case, found: re.Match[str]) -> UserError | None:
    if case.key not in HOOK_GROUPS or not (case.line.startswith("~") or isinstance(case.value, dict)):
        return None
    remedy = f"To select none, use {case.key}=[]. To select some, use {case.key}=[a,b]."
    return UserError(f"{case.line} is not a list of hooks", key=case.key, remedy=remedy)


def of_another_hook(case: Case, hint: str) -> str | None:
    """`hooks.ema.patience=3`: an option of a hook that is not selected, and of no other."""
    group, _, rest = case.key.partition(".")
    name, _, option = rest.partition(".")
    if group != "hooks" or not option or "write a +" in hint or close_names(option, case.cfg.hooks[name]):
        return None
    for owner, schema in stored(group):
        if option in [entry.name for entry in dataclasses.fields(schema)]:
            return selecting(f"{group}.{owner}", [f"{group}.{owner}.{option}={case.line.partition('=')[2]}"], case)
    return None
