"""Turn Hydra's and OmegaConf's errors into one message with the key, the problem and the fix.

`_OF_SWEEPS`, `_OF_OVERRIDES` and `_OF_FILES` list what the texts of these errors mean.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.cli.arguments import LIST_GROUPS, is_sweep
from hydraloop.cli.compose import Composer
from hydraloop.cli.config_file_limits import leaves
from hydraloop.cli.own_keys import as_listed, line_for_defaults, selected_in_body
from hydraloop.errors import RENAMED, Remedy, UserError, any_of, close_names, emptying, suggestion
from hydraloop.safety.secret_names import looks_secret
from hydraloop.schemas import stored
from hydraloop.schemas.root import Config
from hydraloop.validate import HOOK_GROUPS

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)

_VARIABLES = {"hooks.wandb": "WANDB_API_KEY", "hooks.mlflow": "MLFLOW_TRACKING_TOKEN"}
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    ListConfig: "a list",
}


class _Case(NamedTuple):
    """An error of Hydra or OmegaConf, and the override that it names; without one, `key` and `line` are empty."""

    text: str
    cause: str
    key: str
    line: str
    value: Any
    cfg: DictConfig
    """The config without the override, for suggestions; empty if it cannot be composed either."""
    composer: Composer

    @property
    def parent(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def without_plus(self) -> str:
        return self.line.lstrip("+")


def explain(error: Exception, overrides: Sequence[Override], composer: Composer) -> UserError:
    """Return the user's mistake for an error that composing `overrides` has raised."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error, composer)
    text = str(error) or str(error.__cause__ or type(error).__name__)
    override = _named(text, overrides)
    cfg, cause = _without(override, overrides, composer), str(error.__cause__ or text)
    check_defaults(cfg, composer)
    if override is None:  # without a config of the project, the keys of the default one are suggested
        known = cfg or hydra.compose("hydraloop/project")
        case, meanings = _Case(text, cause, "", "", None, known, composer), _OF_FILES
    else:
        case = _Case(text, cause, override.key_or_group, override.input_line or "", override.value(), cfg, composer)
        meanings = (*_OF_SWEEPS, *(_OF_FILES if is_sweep(override) else _OF_OVERRIDES))
    for pattern, meaning in meanings:
        found = re.search(pattern, f"{text}\n{cause}", re.DOTALL)
        if found is None:
            continue
        if isinstance(meaning, tuple):
            key, problem, remedy, *add = (text.format(case=case, found=found) for text in meaning)
            return UserError(problem, key=key, remedy=Remedy(remedy, add=add) if add else remedy)
        mistake = meaning(case, found)
        if mistake is not None:
            return mistake
    raise AssertionError("the last pattern matches any text")


def check_defaults(cfg: DictConfig, composer: Composer) -> None:
    """Refuse a config without hydraloop's options: its defaults list does not name them. An empty one passes."""
    if cfg and "detach" not in cfg:
        raise UserError(
            f"the defaults list of {composer.name}.yaml does not have hydraloop's options",
            key="defaults",
            remedy="Write at the top of the file: defaults: [hydraloop/project, _self_]",
        )


def unknown_flag(flag: str, args: argparse.Namespace, composer: Composer) -> UserError:
    """Return the user's mistake for a flag that does not exist, such as `--lr` in `--lr 0.1`."""
    name, _, value = flag.lstrip("-").replace("-", "_").partition("=")
    words = [*args.unknown[1:2], *args.overrides]  # argparse has the value in one of them
    value = value or next((word for word in words if word[:1] not in "+~-" and "=" not in word), "…")
    by_end = {key.rpartition(".")[2]: key for key in reversed(_keys(_without(None, [], composer)))}
    by_end |= {key: key for key in by_end.values()} | {group: group for group in composer.groups()}
    by_end |= {other[2:].replace("-", "_"): other for other in args.flags}
    close = get_close_matches(name, by_end, n=1, cutoff=0.7)
    remedy = "Options are written without dashes: seed=0. --help lists the flags."
    if close:
        found = by_end[close[0]]
        remedy = Remedy(f"Write {found}", (flag, found))
    if close and found not in args.flags:
        line = f"{found}={value}"
        add = [line] if value != "…" else []
        remedy = Remedy(f"Write it without dashes: {line}", add=add, leave_out=[flag, value] if add else [])
    return UserError("there is no such flag", key=flag.partition("=")[0], remedy=remedy)


def _named(text: str, overrides: Sequence[Override]) -> Override | None:
    """Return the override that an error message names by its line, or else by its key."""
    for override in sorted(overrides, key=lambda override: -len(override.input_line or "")):
        if override.input_line and (override.input_line in text or f"'{override.input_line.lstrip('~')}'" in text):
            return override
        if override.is_add() and f"'override {override.key_or_group}: " in text:
            return override
    named = re.search(r"'([^']+)'", text)
    return next((override for override in overrides if named and override.key_or_group == named[1]), None)


def _without(wrong: Override | None, overrides: Sequence[Override], composer: Composer) -> DictConfig:
    rest = [override.input_line or "" for override in overrides if override is not wrong and not is_sweep(override)]
    for lines in ([] if wrong is None else rest, []):
        try:
            return composer.compose(lines)
        except COMPOSING_ERRORS:
            continue
    return OmegaConf.create()


def _several_values(case: _Case, found: re.Match[str]) -> UserError:
    key, _, value = case.line.partition("=")
    listed, sweep = f"{key}=[{value}]", "For a sweep add -m"
    problem = f"{value} has several values, but this is not a sweep"
    if key in set(case.composer.groups()) - set(LIST_GROUPS) or any(mark in value for mark in "[]{}'\""):
        remedy = Remedy(f"{sweep}; a single run takes one of them.", add=["-m"])
    elif key in LIST_GROUPS or isinstance(_select(case.cfg, key), ListConfig):
        remedy = Remedy(f"For a list write '{listed}'; for a sweep add -m", add=[listed])
    else:
        remedy = Remedy(f"{sweep}; for a list write '{listed}'; for a string \"{key}='{value}'\"", add=["-m"])
    return UserError(problem, key=key, remedy=remedy)


def _missing_option(error: MissingConfigException, composer: Composer) -> UserError:
    """`hooks=emaa`: the group exists, the option does not."""
    missing = str(error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    if not group or not option:
        remedy = suggestion(missing, [name for name in composer.options("") if name[0] != "_"])
        return UserError(f"the config {missing!r} does not exist", key="--config-name", remedy=remedy)
    return UserError(f"there is no option {option!r}", key=group, remedy=suggestion(option, composer.options(group)))


def _not_selected(case: _Case, found: re.Match[str]) -> UserError | None:
    """An override of a hook that is not in the config."""
    group, _, rest = case.key.partition(".")
    name, _, option = rest.partition(".")
    if group not in HOOK_GROUPS or not name or case.line.startswith("~") or not case.cfg:
        return None
    if OmegaConf.select(case.cfg, f"{group}.{name}") is not None:
        return None
    key, line = f"{group}.{name}", case.line.lstrip("+")
    if not option and case.value is None:
        remedy = Remedy(f"Leave {line} out.", leave_out=[case.line])
        return UserError("this hook is not selected", key=key, remedy=remedy)
    other_group = "hooks" if group == "default_hooks" else "default_hooks"
    if OmegaConf.select(case.cfg, f"{other_group}.{name}") is not None:
        works = f"{other_group}.{name}.{option}".rstrip(".")
        remedy = Remedy(f"Use {works}=…", add=[line.replace(group, other_group, 1)], leave_out=[case.line])
        return UserError(f"{name} is in the group {other_group}", key=key, remedy=remedy)
    options = case.composer.options(group)
    for owner in (group, other_group):
        if name in case.composer.options(owner):
            lines = [line.replace(group, owner, 1)] if option else []
            return UserError("this hook is not selected", key=key, remedy=_selecting(f"{owner}.{name}", lines, case))
    if option in ("", "_target_"):
        return UserError("this hook does not exist yet", key=key, remedy=_with_plus("To add it, write a +: ", line))
    remedy = suggestion(name, options) + f" To add a custom hook: +{key}._target_=package.Class"
    return UserError(f"there is no hook {name}", key=key, remedy=remedy)


def _selecting(hook: str, lines: Sequence[str], case: _Case) -> Remedy:
    """Return the remedy that selects `hooks.ema`, too, and adds overrides of it."""
    group, _, name = hook.partition(".")
    selected = [str(other) for other, node in case.cfg[group].items() if node is not None]
    select = f"{group}=[{','.join([*selected, name])}]"
    return Remedy(" ".join([f"Use '{select}'", *lines]), add=[select, *lines], leave_out=[case.line, hook])


def _with_plus(text: str, line: str) -> Remedy:
    return Remedy(f"{text}{shlex.quote(f'+{line}')}", add=[f"+{line}"])


def _not_a_list(case: _Case, found: re.Match[str]) -> UserError | None:
    if case.key not in HOOK_GROUPS or not (case.line.startswith("~") or isinstance(case.value, dict)):
        return None
    text = f"To select none, use {case.key}=[]. To select some, use {case.key}=[a,b]."
    remedy = Remedy(text, add=[f"{case.key}=[]"], leave_out=[case.line])
    return UserError(f"{case.line} is not a list of hooks", key=case.key, remedy=remedy)


def _cannot_be_deleted(case: _Case, found: re.Match[str]) -> UserError:
    node = _select(case.cfg, case.key)
    entries = list(node) if isinstance(node, DictConfig) and "_target_" not in node else []
    none = f"{case.key}.{entries[0]!s}=null" if entries else f"{case.key}=null"
    remedy = Remedy(f"Use {none} for none, or give it a value.", add=[none], leave_out=[case.line])
    return UserError("it cannot be deleted", key=case.key, remedy=remedy)


def _not_in_the_defaults(case: _Case, found: re.Match[str]) -> UserError | None:
    key, _, value = case.line.partition("=")
    key = key.lstrip("+~")  # optimizer@optimizer.hidden
    if "@" not in key and key not in case.composer.groups():
        return None
    remedy = _with_plus("To add it, write a +: ", case.line)
    if value:
        place = "after" if key == "experiment" else "before"  # an experiment overrides the values of the file
        file, line = case.composer.name, f"- {key}: {value}"
        line = as_listed(line, file, case.composer)
        remedy += f"\n  For all runs, add to the defaults of {file}.yaml, {place} _self_: {line}"
    return UserError("it is not in the defaults list", key=key, remedy=remedy)


def _exists_already(case: _Case, found: re.Match[str]) -> UserError:
    line, changed = case.without_plus, copy.deepcopy(case.cfg)
    try:
        OmegaConf.update(changed, case.key, case.value)
    except OmegaConfBaseException as error:
        return _wrong_value(case._replace(cause=str(error), line=line), found)
    remedy = Remedy(f"Leave the + out: {shlex.quote(line)}", add=[line])
    return UserError("it exists already", key=case.key, remedy=remedy)


def _not_there(case: _Case, found: re.Match[str]) -> UserError:
    hint, left_out = _hint(case.key, case.cfg, case.composer), Remedy(f"Leave {case.line} out.", leave_out=[case.line])
    if hint.word == (case.key, case.key):  # Hydra finds no key whose value is null
        return UserError("it is null already", key=case.key, remedy=left_out)
    return UserError("it does not exist", key=case.key, remedy=hint if hint.word else left_out)


def _unknown_key(case: _Case, found: re.Match[str]) -> UserError:
    """`task.loss={reduction: sum}` is merged into the selected option, and so names `task.loss.reduction`."""
    if case.parent in _keys(case.cfg) and _select(case.cfg, case.parent) is None:
        remedy = _with_plus("To add it, write a +: ", case.line)
        return UserError("it does not exist yet", key=case.key, remedy=remedy)
    if case.parent in _VARIABLES and looks_secret(case.key):
        name = _VARIABLES[case.parent]
        export = f"Read it into the environment, which no file records: read -rs {name} && export {name}"
        return UserError("this tracker takes no secret as an option", key=case.key, remedy=export)
    new = re.search(r"full_key: (\S+)", case.cause) if isinstance(case.value, dict) else None
    key = new[1] if new else case.key
    remedy, plus = _hint(key, case.cfg, case.composer), f"+{case.line}"
    node = _select(case.cfg, key.rpartition(".")[0]) if "." in key else None
    if isinstance(node, DictConfig):
        schema, target = OmegaConf.get_type(node), node.get("_target_")
        if schema is dict or getattr(schema, "_target_", None) != target:  # else the schema has every argument
            added = remedy + f" To add what is new, write a +: {shlex.quote(plus)}"
            remedy = added if remedy.word else Remedy(added, add=[plus])
        if isinstance(case.value, dict) and case.value.get("_target_") not in (None, target):
            # A group that every run needs takes no null.
            clear = f"{case.key}=null" if case.parent else f"~{case.key}"
            text = (
                f"The mapping is merged into that of {target}. Remove the old values first: {clear} {shlex.quote(plus)}"
            )
            remedy = Remedy(text, add=[clear, plus], leave_out=[case.line])
    return UserError("there is no such key", key=key, remedy=_of_another_hook(case, remedy) or remedy)


def _of_another_hook(case: _Case, hint: Remedy) -> Remedy | None:
    """`hooks.ema.patience=3`: an option of a hook that is not selected, and of no other."""
    group, _, rest = case.key.partition(".")
    option = rest.partition(".")[2]
    if hint.word or hint.add or group != "hooks" or not option:
        return None
    for owner, schema in stored(group):
        if option in [entry.name for entry in dataclasses.fields(schema)]:
            return _selecting(f"{group}.{owner}", [f"{group}.{owner}.{option}={case.line.partition('=')[2]}"], case)
    return None


def _wrong_value(case: _Case, found: re.Match[str]) -> UserError:
    named = re.search(r"full_key: (\S+)", case.cause)
    wrong = re.search(r"^Value '([^']*)'", case.cause)
    key = named[1] if named else case.key
    remedy = _type_hint(key, case.cfg, wrong and wrong[1])
    if remedy is None and "is not a ListConfig" in case.cause and key == case.key:  # a list without a default
        listed = f"{key}=[{case.line.partition('=')[2]}]"
        remedy = Remedy(f"It takes a list: {shlex.quote(listed)}", add=[listed])
    return UserError(_first_line(case.cause), key=key, remedy=remedy)


def _new_in_a_file(case: _Case, found: re.Match[str]) -> UserError:
    """A config file is merged into the selected option, and names an entry that this does not have."""
    file, key = found["file"], found["key"]
    parent, _, name = key.rpartition(".")
    node = _select(case.cfg, parent) if parent else case.cfg
    close = close_names(name, map(str, node), most=1) if isinstance(node, DictConfig) else []
    if name in RENAMED:
        close, remedy = [], f"Use {RENAMED[name]}, its new name."
    elif name in close:  # without the overrides, the file fits
        close, remedy = [], f"Remove it from {file}.yaml, or select an option that has it."
    elif file.startswith("optimizer/"):  # +optimizer@optimizer.hidden=muon beside optimizer=adamw
        remedy = Remedy("For several by name, remove the one without a name: ~optimizer", add=["~optimizer"])
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


def _selected_in_a_file(case: _Case, found: re.Match[str]) -> UserError | None:
    """`optimizer: sgd` or `hooks: [ema]`, beside the defaults list of a file and not in it."""
    file = found["file"]
    for group, option in selected_in_body(file, case.composer):
        line = line_for_defaults(group, option, file, case.composer)
        remedy = f"Remove it there, and write in the defaults of {file}.yaml: {line}"
        problem = f"an option is selected in the defaults list; {file}.yaml selects {option} outside of the list"
        return UserError(problem, key=group, remedy=remedy)
    return None


def _wrong_in_a_file(case: _Case, found: re.Match[str]) -> UserError:
    hint = _type_hint(found["key"], case.cfg)
    problem = f"{found['problem']} ({found['file']}.yaml)"
    return UserError(problem, key=found["key"], remedy=None if hint is None else f"{hint}")


def _something_else(case: _Case, found: re.Match[str]) -> UserError:
    cause = "" if case.cause == case.text else f": {_first_line(case.cause)}"
    problem = " ".join(line.strip() for line in case.text.splitlines() if line.strip()) + cause
    return UserError(problem, remedy="Check the config files, or set HYDRA_FULL_ERROR=1 to see the traceback.")


_Meanings = tuple[tuple[str, tuple[str, ...] | Callable[[_Case, re.Match[str]], UserError | None]], ...]
"""(Pattern in the text of the error or its cause, what it means). The first one that matches counts. What it means is
the key, the problem, the remedy, and arguments that it adds; or a function, which returns None if it means something
else."""

_LIST = "Write the whole list: {case.parent}=[…]; a mapping in it is {{…}}."
_SECOND = "{found[name]} is not the only option"
_SEVERAL = "Select one: optimizer={found[name]}. For several optimizers: see docs/how-to/optimizers.md."
_YAML = (
    "Correct this line or the one before it. YAML takes key: value, each key once, spaces and no tabs. A list in "
    "brackets, [a, b], has no dashes."
)
_TWICE = "the option is selected twice"
_OF_SWEEPS: _Meanings = (
    (r"^Ambiguous value", _several_values),
    (r"requires --multirun", ("{case.key}", "{case.line} is a sweep", "Add -m to run it.", "-m")),
)
_OF_OVERRIDES: _Meanings = (
    (
        r"^Multiple values for",
        ("{case.key}", _TWICE, "Leave the + out: {case.key}=… changes the selection.", "{case.without_plus}"),
    ),
    (r"", _not_selected),
    (r"", _not_a_list),
    (r"does not support deletion", _cannot_be_deleted),
    (r"^Could not delete", _not_there),
    (r"No match in the defaults list", _not_in_the_defaults),
    (r"^Could not override|No match in the defaults list|does not exist", _unknown_key),
    (r"^Could not append", _exists_already),
    (r"\(str\) is not an int", ("{case.parent}", "it is a list", _LIST)),
    (r"", _wrong_value),
)
_OF_FILES: _Meanings = (
    (
        r"^Multiple values for (?P<key>\S+?)\..*'override \S+: (?P<name>[^']*)'",
        ("{found[key]}", _TWICE, "Write override in the defaults list: - override /{found[key]}: {found[name]}"),
    ),
    (r"^In '(?P<file>[^']+)': .*Key '[^']+' (not in|is not in struct).*full_key: (?P<key>\S+)", _new_in_a_file),
    (
        r"^In '[^']+': Could not override '(?P<key>[^']+)'",
        ("{found[key]}", "no defaults list has it, and so override finds nothing", "Write - /{found[key]}: …"),
    ),
    (r"^In '(?P<file>[^']+)': .*(Cannot merge|Cannot assign str|Merge error: str )", _selected_in_a_file),
    (
        r"^In 'optimizer/(?P<name>[^']+)': .*Merge error: \w+ is not a subclass",
        ("optimizer", _SECOND, _SEVERAL, "optimizer={found[name]}"),
    ),
    (
        r"^In '(?P<group>[^']+)/(?P<name>[^']+)': .*Merge error: \w+ is not a subclass",
        ("{found[group]}", _SECOND, "Select one: {found[group]}={found[name]}.", "{found[group]}={found[name]}"),
    ),
    (r"^In '(?P<file>[^']+)': ValidationError[^\n]*\n(?P<problem>[^\n]+)\n\s*full_key: (?P<key>\S+)", _wrong_in_a_file),
    (
        r"^(.*\n)?(?P<problem>[^\n]+)\n  in \"(?P<file>[^\"]+)\", line (?P<line>\d+)",
        ("{found[file]}", "line {found[line]}: {found[problem]}", _YAML),
    ),
    (r"", _something_else),
)


def _hint(key: str, cfg: DictConfig, composer: Composer) -> Remedy:
    """Suggest keys with the same end (`optimizer.lr` for `lr` or `model.lr`), or else close ones that exist."""
    same_end = [other for other in _keys(cfg) if other.endswith(f".{key.rpartition('.')[2]}")]
    if 0 < len(same_end) <= 3:
        return Remedy(f"Did you mean {any_of(same_end)}?", (key, same_end[0]))
    parent, _, name = key.rpartition(".")
    while parent and not isinstance(_select(cfg, parent), DictConfig):  # up to a mapping that exists
        parent, _, name = parent.rpartition(".")
    if not parent and name not in cfg and name in [entry.name for entry in dataclasses.fields(Config)]:
        return Remedy(f"Leave ~{name} out if you typed it.", leave_out=[f"~{name}"])
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


def _keys(cfg: DictConfig) -> list[str]:
    """Return the full keys of all values, except Hydra's."""
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    return [key for name, node in raw.items() if name != "hydra" for key, _ in leaves(node, str(name))]


def _type_hint(key: str, cfg: DictConfig, wrong: str | None = None) -> str | None:
    """Return what the key accepts, with its present value as an example.

    Args:
        wrong: the value that was typed.
    """
    value = _select(cfg, key)
    if isinstance(value, DictConfig):
        return f"Change what is in it: {', '.join(f'{key}.{name}' for name in list(value)[:3])}, …"
    example = str(value).replace(", ", ",")
    kind = _KINDS.get(type(value), type(value).__name__)
    if value is None:
        return None
    text = f"It takes {kind}: {shlex.quote(f'{key}={example}')}"
    return Remedy(text, add=[f"{key}={example}"]) if wrong is None else Remedy(text, (wrong, example))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it cannot be composed"
