"""What is wrong in a config file."""

from __future__ import annotations

import re

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.composing_errors.case import Case, select
from hydraloop.cli.composing_errors.hints import type_hint
from hydraloop.cli.own_keys import as_listed, line_for_defaults, selected_in_body
from hydraloop.errors import UserError, close_names, emptying


def new_in_a_file(case: Case, found: re.Match[str]) -> UserError:
    """A config file is merged into the selected option, and names an entry that this does not have."""
    file, key = found["file"], found["key"]
    parent, _, name = key.rpartition(".")
    node = select(case.cfg, parent) if parent else case.cfg
    close = close_names(name, map(str, node), most=1) if isinstance(node, DictConfig) else []
    if name in close:  # without the overrides, the file fits
        close, remedy = [], f"Remove it from {file}.yaml, or select an option that has it."
    elif file.startswith("optimizer/"):  # +optimizer@optimizer.hidden=muon beside optimizer=adamw
        remedy = "For several by name, remove the one without a name: ~optimizer"
    elif parent and isinstance(node, DictConfig) and "_target_" not in node and OmegaConf.get_type(node) is not dict:
        remedy = f"A key of your own belongs to the top of {file}.yaml: {name}: …, used as ${{{name}}}."
    elif line := emptying(parent or key):
        line = as_listed(line, file, case.composer)
        remedy = f"To replace the option, write in the defaults of {file}.yaml: {line}"
    elif not parent:
        remedy = f"A key of your own is added on the command line: +{name}=…"
    else:
        entry = parent.rpartition(".")[2]
        remedy = f"To replace {entry}, write in {file}.yaml {entry}: null and the new one under another name."
    if close:
        remedy = f"Did you mean {close[0]}? {remedy}"
    merged = "selected option, which has" if parent else "options, which have"
    return UserError(f"{file}.yaml is merged into the {merged} no {name}", key=key, remedy=remedy)


def selected_in_a_file(case: Case, found: re.Match[str]) -> UserError | None:
    """`optimizer: sgd` or `hooks: [ema]`, beside the defaults list of a file and not in it."""
    file = found["file"]
    for group, option in selected_in_body(file, case.composer):
        line = line_for_defaults(group, option, file, case.composer)
        remedy = f"Remove it there, and write in the defaults of {file}.yaml: {line}"
        problem = f"an option is selected in the defaults list; {file}.yaml selects {option} outside of the list"
        return UserError(problem, key=group, remedy=remedy)
    return None


def wrong_in_a_file(case: Case, found: re.Match[str]) -> UserError:
    hint = type_hint(found["key"], case.cfg)
    problem = f"{found['problem']} ({found['file']}.yaml)"
    return UserError(problem, key=found["key"], remedy=None if hint is None else f"{hint}")
