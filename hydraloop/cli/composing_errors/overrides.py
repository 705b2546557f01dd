"""What is wrong with an override: its key, its value, or its sign."""

from __future__ import annotations

import copy
import re
import shlex

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.cli.arguments import LIST_GROUPS
from hydraloop.cli.composing_errors.case import Case, keys_of, select
from hydraloop.cli.composing_errors.hints import first_line, key_hint, type_hint, with_plus
from hydraloop.cli.composing_errors.hooks import of_another_hook
from hydraloop.cli.own_keys import as_listed
from hydraloop.errors import UserError
from hydraloop.safety.secret_names import looks_secret

_VARIABLES = {"hooks.wandb": "WANDB_API_KEY", "hooks.mlflow": "MLFLOW_TRACKING_TOKEN"}


def several_values(case: Case, found: re.Match[str]) -> UserError:
    key, _, value = case.line.partition("=")
    listed, sweep = f"{key}=[{value}]", "For a sweep add -m"
    problem = f"{value} has several values, but this is not a sweep"
    if key in set(case.composer.groups()) - set(LIST_GROUPS) or any(mark in value for mark in "[]{}'\""):
        remedy = f"{sweep}; a single run takes one of them."
    elif key in LIST_GROUPS or isinstance(select(case.cfg, key), ListConfig):
        remedy = f"For a list write '{listed}'; for a sweep add -m"
    else:
        remedy = f"{sweep}; for a list write '{listed}'; for a string \"{key}='{value}'\""
    return UserError(problem, key=key, remedy=remedy)


def cannot_be_deleted(case: Case, found: re.Match[str]) -> UserError:
    node = select(case.cfg, case.key)
    entries = list(node) if isinstance(node, DictConfig) and "_target_" not in node else []
    none = f"{case.key}.{entries[0]!s}=null" if entries else f"{case.key}=null"
    remedy = f"Use {none} for none, or give it a value."
    return UserError("it cannot be deleted", key=case.key, remedy=remedy)


def not_there(case: Case, found: re.Match[str]) -> UserError:
    hint, left_out = key_hint(case.key, case.cfg, case.composer), f"Leave {case.line} out."
    if case.key in keys_of(case.cfg):  # Hydra finds no key whose value is null
        return UserError("it is null already", key=case.key, remedy=left_out)
    return UserError("it does not exist", key=case.key, remedy=hint if hint.startswith("Did") else left_out)


def not_in_the_defaults(case: Case, found: re.Match[str]) -> UserError | None:
    key, _, value = case.line.partition("=")
    key = key.lstrip("+~")  # optimizer@optimizer.hidden
    if "@" not in key and key not in case.composer.groups():
        return None
    remedy = with_plus("To add it, write a +: ", case.line)
    if value:
        place = "after" if key == "experiment" else "before"  # an experiment overrides the values of the file
        file, line = case.composer.name, f"- {key}: {value}"
        line = as_listed(line, file, case.composer)
        remedy += f"\n  For all runs, add to the defaults of {file}.yaml, {place} _self_: {line}"
    return UserError("it is not in the defaults list", key=key, remedy=remedy)


def unknown_key(case: Case, found: re.Match[str]) -> UserError:
    """`task.loss={reduction: sum}` is merged into the selected option, and so names `task.loss.reduction`."""
    if case.parent in keys_of(case.cfg) and select(case.cfg, case.parent) is None:
        remedy = with_plus("To add it, write a +: ", case.line)
        return UserError("it does not exist yet", key=case.key, remedy=remedy)
    if case.parent in _VARIABLES and looks_secret(case.key):
        name = _VARIABLES[case.parent]
        export = f"Read it into the environment, which no file records: read -rs {name} && export {name}"
        return UserError("this tracker takes no secret as an option", key=case.key, remedy=export)
    new = re.search(r"full_key: (\S+)", case.cause) if isinstance(case.value, dict) else None
    key = new[1] if new else case.key
    remedy, plus = key_hint(key, case.cfg, case.composer), f"+{case.line}"
    node = select(case.cfg, key.rpartition(".")[0]) if "." in key else None
    if isinstance(node, DictConfig):
        schema, target = OmegaConf.get_type(node), node.get("_target_")
        if schema is dict or getattr(schema, "_target_", None) != target:  # else the schema has every argument
            remedy += f" To add what is new, write a +: {shlex.quote(plus)}"
        if isinstance(case.value, dict) and case.value.get("_target_") not in (None, target):
            # A group that every run needs takes no null.
            clear = f"{case.key}=null" if case.parent else f"~{case.key}"
            remedy = (
                f"The mapping is merged into that of {target}. Remove the old values first: {clear} {shlex.quote(plus)}"
            )
    return UserError("there is no such key", key=key, remedy=of_another_hook(case, remedy) or remedy)


def exists_already(case: Case, found: re.Match[str]) -> UserError:
    line, changed = case.line.lstrip("+"), copy.deepcopy(case.cfg)
    try:
        OmegaConf.update(changed, case.key, case.value)
    except OmegaConfBaseException as error:
        return wrong_value(case._replace(cause=str(error), line=line), found)
    remedy = f"Leave the + out: {shlex.quote(line)}"
    return UserError("it exists already", key=case.key, remedy=remedy)


def wrong_value(case: Case, found: re.Match[str]) -> UserError:
    named = re.search(r"full_key: (\S+)", case.cause)
    key = named[1] if named else case.key
    remedy = type_hint(key, case.cfg)
    if remedy is None and "is not a ListConfig" in case.cause and key == case.key:  # a list without a default
        listed = f"{key}=[{case.line.partition('=')[2]}]"
        remedy = f"It takes a list: {shlex.quote(listed)}"
    return UserError(first_line(case.cause), key=key, remedy=remedy)
