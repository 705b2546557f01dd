"""Turn Hydra's and OmegaConf's errors into one message with the key, the problem and the fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.cli.arguments import LIST_GROUPS, is_sweep
from hydraloop.cli.compose import Composer
from hydraloop.errors import RENAMED, UserError, any_of, close_names, suggestion
from hydraloop.validate import HOOK_GROUPS

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    ListConfig: "a list",
}


def explain(error: Exception, overrides: Sequence[Override], composer: Composer) -> UserError:
    """Return the user's mistake for an error that composing `overrides` has raised."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error, composer)
    text = str(error) or str(error.__cause__ or type(error).__name__)
    culprit = _culprit(text, overrides)
    if text.startswith("Ambiguous value") and culprit is not None:
        return _several_values(culprit, composer)
    if "requires --multirun" in text and culprit is not None:
        return UserError(f"{culprit.input_line} is a sweep", key=culprit.key_or_group, remedy="Add -m to run it.")
    if culprit is not None and not is_sweep(culprit):
        cfg = _without(culprit, overrides, composer)
        selection = None if cfg is None else _not_selected(culprit, cfg, composer)
        return selection or _bad_override(error, text, culprit, cfg, composer)
    twice = re.match(r"Multiple values for (\S+?)\.", text)
    if twice is not None:
        remedy = f"Leave the + out: {twice[1]}=… changes the selection."
        return UserError("the option is selected twice", key=twice[1], remedy=remedy)
    merged = re.match(r"In '([^']+)': .*Key '[^']+' (?:not in|is not in struct).*full_key: (\S+)", text, re.DOTALL)
    if merged is not None:
        return _new_in_a_file(merged[1], merged[2], _without(None, [], composer))
    second = re.match(r"In '([^']+)/([^']+)': .*Merge error: \w+ is not a subclass of", text, re.DOTALL)
    if second is not None:
        group, name = second.groups()
        several = " For several optimizers: see docs/how-to/optimizers.md." if group == "optimizer" else ""
        return UserError(f"{name} is not the only option", key=group, remedy=f"Select one: {group}={name}.{several}")
    cause = f": {_first_line(str(error.__cause__))}" if error.__cause__ is not None else ""
    problem = " ".join(line.strip() for line in text.splitlines() if line.strip()) + cause
    return UserError(problem, remedy="Check the config files, or set HYDRA_FULL_ERROR=1 to see the traceback.")


def _several_values(override: Override, composer: Composer) -> UserError:
    key, _, value = (override.input_line or "").partition("=")
    if key in set(composer.groups()) - set(LIST_GROUPS) or any(mark in value for mark in "[]{}'\""):
        other = "a single run takes one of them."
    else:
        other = f"for a list write '{key}=[{value}]'; for a string \"{key}='{value}'\""
    return UserError(
        f"{value} has several values, but this is not a sweep", key=key, remedy=f"For a sweep add -m; {other}"
    )


def _missing_option(error: MissingConfigException, composer: Composer) -> UserError:
    """`hooks=emaa`: the group exists, the option does not."""
    missing = str(error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    if not group or not option:
        return UserError(
            f"the config {missing!r} does not exist",
            key="--config-name",
            remedy=str(error).replace("\n", " ").strip(),
        )
    return UserError(f"there is no option {option!r}", key=group, remedy=suggestion(option, composer.options(group)))


def _culprit(text: str, overrides: Sequence[Override]) -> Override | None:
    """Return the override that an error message names by its line, or else by its key."""
    for override in sorted(overrides, key=lambda override: -len(override.input_line or "")):
        if override.input_line and (override.input_line in text or f"'{override.input_line.lstrip('~')}'" in text):
            return override
    named = re.search(r"'([^']+)'", text)
    return next((override for override in overrides if named and override.key_or_group == named[1]), None)


def _without(culprit: Override | None, overrides: Sequence[Override], composer: Composer) -> DictConfig | None:
    """Return the config without the wrong override, for suggestions; None if it cannot be composed either."""
    rest = [override.input_line or "" for override in overrides if override is not culprit and not is_sweep(override)]
    for lines in (rest, []):
        try:
            return composer.compose(lines)
        except COMPOSING_ERRORS:
            continue
    return None


def _not_selected(override: Override, cfg: DictConfig, composer: Composer) -> UserError | None:
    """Return the error of an override of a hook that is not in the config; None if it is another mistake."""
    group, _, rest = override.key_or_group.partition(".")
    name, _, option = rest.partition(".")
    if group not in HOOK_GROUPS or not name or override.is_delete():
        return None
    if OmegaConf.select(cfg, f"{group}.{name}") is not None:
        return None
    key, line = f"{group}.{name}", (override.input_line or "").lstrip("+")
    if not option and override.value() is None:
        return UserError("this hook is not selected", key=key, remedy=f"Leave {line} out.")
    other_group = "hooks" if group == "default_hooks" else "default_hooks"
    if OmegaConf.select(cfg, f"{other_group}.{name}") is not None:
        works = f"{other_group}.{name}.{option}".rstrip(".")
        return UserError(f"{name} is in the group {other_group}", key=key, remedy=f"Use {works}=…")
    options = composer.options(group)
    if name in options:
        selected = [str(other) for other, node in cfg[group].items() if node is not None]
        works = f"'{group}=[{','.join([*selected, name])}]' {line if option else ''}".rstrip()
        return UserError("this hook is not selected", key=key, remedy=f"Use {works}")
    if option in ("", "_target_"):
        return UserError("this hook does not exist yet", key=key, remedy=f"To add it, write a +: +{line}")
    return UserError(
        f"there is no hook {name}",
        key=key,
        remedy=f"{suggestion(name, options)} To add a custom hook: +{key}._target_=package.Class",
    )


def _bad_override(
    error: Exception, text: str, culprit: Override, cfg: DictConfig | None, composer: Composer
) -> UserError:
    key, parent = culprit.key_or_group, culprit.key_or_group.rpartition(".")[0]
    cause = str(error.__cause__ or text)
    if key in HOOK_GROUPS and (culprit.is_delete() or isinstance(culprit.value(), dict)):
        return UserError(
            f"{culprit.input_line} is not a list of hooks",
            key=key,
            remedy=f"To select none, use {key}=[]. To select some, use {key}=[a,b].",
        )
    if "does not support deletion" in cause:
        found = OmegaConf.select(cfg, key) if cfg is not None else None
        entries = list(found) if isinstance(found, DictConfig) and "_target_" not in found else []
        none = f"{key}.{entries[0]!s}=null" if entries else f"{key}=null"
        return UserError("it cannot be deleted", key=key, remedy=f"Use {none} for none, or give it a value.")
    if text.startswith("Could not delete"):
        return UserError("it does not exist", key=key, remedy=_hint(key, cfg, composer))
    if "No match in the defaults list" in text and (culprit.package is not None or key in composer.groups()):
        remedy, name = f"To add it, write a +: +{culprit.input_line}", f"{key}@{culprit.package or ''}".rstrip("@")
        return UserError("it is not in the defaults list", key=name, remedy=remedy)
    if text.startswith("Could not override") or "No match in the defaults list" in text or "does not exist" in text:
        if cfg is not None and parent and parent in _leaves(cfg) and _select(cfg, parent) is None:
            return UserError("it does not exist yet", key=key, remedy=f"To add it, write a +: +{culprit.input_line}")
        return _unknown_key(culprit, cause, cfg, composer)
    if text.startswith("Could not append"):
        return UserError("it exists already", key=key, remedy="Leave the + out.")
    if "(str) is not an int" in cause:
        return UserError(
            "it is a list", key=parent, remedy=f"Write the whole list: {parent}=[…]; a mapping in it is {{…}}."
        )
    found = re.search(r"full_key: (\S+)", cause)
    key = found[1] if found else key
    return UserError(_first_line(cause), key=key, remedy=_type_hint(key, cfg))


def _unknown_key(culprit: Override, cause: str, cfg: DictConfig | None, composer: Composer) -> UserError:
    """`task.loss={reduction: sum}` is merged into the selected option, and so names `task.loss.reduction`."""
    merged, value = culprit.key_or_group, culprit.value()
    new = re.search(r"full_key: (\S+)", cause) if isinstance(value, dict) else None
    key = new[1] if new else merged
    remedy, plus = _hint(key, cfg, composer), shlex.quote(f"+{culprit.input_line}")
    node = None if cfg is None or "." not in key else _select(cfg, key.rpartition(".")[0])
    if isinstance(node, DictConfig):
        schema, target = OmegaConf.get_type(node), node.get("_target_")
        if schema is dict or getattr(schema, "_target_", None) != target:  # else the schema has every argument
            remedy += f" To add what is new, write a +: {plus}"
        if isinstance(value, dict) and value.get("_target_") not in (None, target):
            clear = f"{merged}=null" if "." in merged else f"~{merged}"  # a group that every run needs takes no null
            remedy = f"The mapping is merged into that of {target}. Remove the old values first: {clear} {plus}"
    return UserError("there is no such key", key=key, remedy=remedy)


def _new_in_a_file(file: str, key: str, cfg: DictConfig | None) -> UserError:
    """A config file is merged into the selected option, and names an entry that this does not have."""
    parent, _, name = key.rpartition(".")
    group = "model" if parent == "task.model" else key.partition(".")[0]
    node = None if cfg is None else _select(cfg, parent) if parent else cfg
    close = close_names(name, map(str, node), most=1) if isinstance(node, DictConfig) else []
    if name in RENAMED:
        close, remedy = [], f"Use {RENAMED[name]}, its new name."
    elif name in close:  # without the overrides, the file fits
        close, remedy = [], f"Remove it from {file}.yaml, or select an option that has it."
    elif file.startswith("optimizer/"):  # +optimizer@optimizer.hidden=muon beside optimizer=adamw
        remedy = "For several by name, remove the one without a name: ~optimizer"
    elif group in ("model", "optimizer", "precision", "data"):
        empty = "base" if group == "data" else "null"
        remedy = f"To replace the option, write in the defaults of {file}.yaml: - override /{group}: {empty}"
    elif not parent:
        remedy = f"A key of your own is added on the command line: +{name}=…"
    else:
        entry = parent.rpartition(".")[2]
        remedy = f"To replace {entry}, write in {file}.yaml {entry}: null and the new one under another name."
    if close:
        remedy = f"Did you mean {close[0]}? {remedy}"
    merged = "selected option, which has" if parent else "options, which have"
    return UserError(f"{file}.yaml is merged into the {merged} no {name}", key=key, remedy=remedy)


def _hint(key: str, cfg: DictConfig | None, composer: Composer) -> str:
    """Suggest keys with the same end (`optimizer.lr` for `lr` or `model.lr`), or else close ones that exist."""
    if cfg is None:
        return suggestion(key, composer.groups())
    same_end = [other for other in _leaves(cfg) if other.endswith(f".{key.rpartition('.')[2]}")]
    if 0 < len(same_end) <= 3:
        return f"Did you mean {any_of(same_end)}?"
    parent, _, name = key.rpartition(".")
    while parent and not isinstance(_select(cfg, parent), DictConfig):  # up to a mapping that exists
        parent, _, name = parent.rpartition(".")
    if not parent:
        known = {*map(str, cfg), *composer.groups()} - {"hydra", "hydraloop"}
        return suggestion(name, known)
    return suggestion(f"{parent}.{name}", [f"{parent}.{other!s}" for other in _select(cfg, parent)])


def _select(cfg: DictConfig, key: str) -> Any:
    """Return the value at a key; None if the key does not exist, also if the path leads through a list."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def _leaves(cfg: DictConfig) -> Iterator[str]:
    """Yield the full keys of all values; `hydra` counts as one."""
    return _keys(OmegaConf.to_container(cfg, resolve=False), "")


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if name != "hydra" and isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name!s}.")
        else:
            yield f"{prefix}{name!s}"


def _type_hint(key: str, cfg: DictConfig | None) -> str | None:
    """Return what the key accepts, with its present value as an example."""
    value = None if cfg is None else _select(cfg, key)
    if isinstance(value, DictConfig):
        return f"Change what is in it: {', '.join(f'{key}.{name}' for name in list(value)[:3])}, …"
    return None if value is None else f"It takes {_KINDS.get(type(value), type(value).__name__)}: {key}={value}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it cannot be composed"
