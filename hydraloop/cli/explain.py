"""Hydra's and OmegaConf's errors in composing, as one message with the key and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.cli.arguments import is_sweep
from hydraloop.cli.checks import not_selected
from hydraloop.cli.compose import Composer
from hydraloop.errors import UserError, suggestion
from hydraloop.validate import HOOK_GROUPS

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def explain(error: Exception, overrides: Sequence[Override], composer: Composer) -> UserError:
    """The user's mistake behind an error that composing `overrides` raised."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error, composer)
    text = str(error) or str(error.__cause__ or type(error).__name__)
    culprit = _culprit(text, overrides)
    if text.startswith("Ambiguous value") and culprit is not None:
        return _several_values(culprit)
    if "requires --multirun" in text and culprit is not None:
        return UserError(f"{culprit.input_line} is a sweep", key=culprit.key_or_group, remedy="Add -m to run it.")
    if culprit is not None and not is_sweep(culprit):
        return _bad_override(error, text, culprit, overrides, composer)
    twice = re.match(r"Multiple values for (\S+?)\.", text)
    if twice is not None:
        return UserError(
            "it is chosen twice", key=twice.group(1), remedy=f"Leave the + out: {twice.group(1)}=… changes the choice."
        )
    return UserError(_lines(text, error), remedy="See the config files, or HYDRA_FULL_ERROR=1 for the whole story.")


def _several_values(override: Override) -> UserError:
    key, _, value = (override.input_line or "").partition("=")
    if any(mark in value for mark in "[]{}'\""):
        other = "one of them makes a single run."
    else:
        other = f"for a list write '{key}=[{value}]'; for a string \"{key}='{value}'\""
    return UserError(
        f"{value} is several values, and this is a single run", key=key, remedy=f"For a sweep add -m; {other}"
    )


def _missing_option(error: MissingConfigException, composer: Composer) -> UserError:
    """`hooks=emaa`: the group is there, the option is not."""
    missing = str(error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    if not group or not option:
        return UserError(
            f"there is no config {missing!r}", key="--config-name", remedy=str(error).replace("\n", " ").strip()
        )
    return UserError(f"{group} has no option {option!r}", key=group, remedy=suggestion(option, composer.options(group)))


def _culprit(text: str, overrides: Sequence[Override]) -> Override | None:
    """The override that an error message names: by its line, else by its key."""
    for override in sorted(overrides, key=lambda override: -len(override.input_line or "")):
        if override.input_line and (override.input_line in text or f"'{override.input_line.lstrip('~')}'" in text):
            return override
    named = re.search(r"'([^']+)'", text)
    return next((override for override in overrides if named and override.key_or_group == named.group(1)), None)


def _bad_override(
    error: Exception, text: str, culprit: Override, overrides: Sequence[Override], composer: Composer
) -> UserError:
    key = culprit.key_or_group
    cfg = _without(culprit, overrides, composer)
    if cfg is not None:
        unselected = not_selected(culprit, cfg, composer.options)
        if unselected is not None:
            return unselected
    if key in HOOK_GROUPS and (culprit.is_delete() or isinstance(culprit.value(), dict)):
        return UserError(
            f"{culprit.input_line} is no list of hooks",
            key=key,
            remedy=f"For none write {key}=[]; for some {key}=[a,b]",
        )
    if "does not support deletion" in str(error.__cause__ or text):
        return UserError(
            "it cannot be deleted", key=key, remedy=f"To have none write {key}=null; else give it a value."
        )
    if text.startswith("Could not delete"):
        return UserError("there is nothing to delete", key=key, remedy=_hint(key, cfg, composer))
    if text.startswith("Could not override") or "No match in the defaults list" in text or "does not exist" in text:
        parent = key.rpartition(".")[0]
        if cfg is not None and parent and parent in _leaves(cfg) and _select(cfg, parent) is None:
            return UserError("it is not there yet", key=key, remedy=f"To add it, write a +: +{culprit.input_line}")
        return UserError("there is no such key", key=key, remedy=_hint(key, cfg, composer))
    if text.startswith("Could not append"):
        return UserError("it is there already", key=key, remedy="Leave the + out.")
    if "(str) is not an int" in text or "(str) is not an int" in str(error.__cause__):
        parent = key.rpartition(".")[0]
        return UserError("it is a list", key=parent, remedy=f"Write all of it: {parent}=[…]; a mapping in it: {{…}}.")
    cause = error.__cause__
    reason = _first_line(str(cause)) if cause is not None else _first_line(text)
    found = re.search(r"full_key: (\S+)", str(cause))
    return UserError(
        reason, key=found.group(1) if found else key, remedy=_type_hint(found.group(1) if found else key, cfg)
    )


def _without(culprit: Override, overrides: Sequence[Override], composer: Composer) -> DictConfig | None:
    """The config without the offending override, to suggest from; None where that does not compose either."""
    rest = [override.input_line or "" for override in overrides if override is not culprit and not is_sweep(override)]
    for lines in (rest, []):
        try:
            return composer.compose(lines)
        except COMPOSING_ERRORS:
            continue
    return None


def _hint(key: str, cfg: DictConfig | None, composer: Composer) -> str:
    """Keys that end the same (`task.model.width` for `model.width`), else close ones where the path still exists."""
    same_end = [] if cfg is None else [other for other in _leaves(cfg) if other.endswith(f".{key.rpartition('.')[2]}")]
    if "." in key and 0 < len(same_end) <= 3:
        return f"Did you mean {' or '.join(same_end)}?"
    parent, _, name = key.rpartition(".")
    node = cfg if not parent else None if cfg is None else _select(cfg, parent)
    while node is None and parent:  # walk up to what exists
        parent, _, name = parent.rpartition(".")
        node = cfg if not parent else None if cfg is None else _select(cfg, parent)
    if not isinstance(node, DictConfig):
        return suggestion(key, composer.groups())
    known = [str(other) for other in node if not parent or other != name]
    if not parent:
        known = [other for other in {*known, *composer.groups()} if other not in ("hydra", "hydraloop")]
    prefix = f"{parent}." if parent else ""
    return suggestion(f"{prefix}{name}", [f"{prefix}{other}" for other in known])


def _select(cfg: DictConfig, key: str) -> Any:
    """What stands at a key; None where there is nothing, also where the path leads through a list."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def _leaves(cfg: DictConfig) -> Iterator[str]:
    """The full keys of all values; `hydra` counts as one."""
    return _keys(OmegaConf.to_container(cfg, resolve=False), "")


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if name != "hydra" and isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name!s}.")
        else:
            yield f"{prefix}{name!s}"


def _type_hint(key: str, cfg: DictConfig | None) -> str | None:
    """What the key holds now, as an example of what fits."""
    value = None if cfg is None else _select(cfg, key)
    if isinstance(value, DictConfig):
        return f"Change what is in it: {', '.join(f'{key}.{name}' for name in list(value)[:3])}, …"
    return None if value is None else f"It takes {_KINDS.get(type(value), type(value).__name__)}: {key}={value}"


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    ListConfig: "a list",
}


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it does not compose"


def _lines(text: str, error: Exception) -> str:
    cause = f": {_first_line(str(error.__cause__))}" if error.__cause__ is not None else ""
    return " ".join(line.strip() for line in text.splitlines() if line.strip()) + cause
