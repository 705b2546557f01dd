"""Mistakes that Hydra finds while it composes a config, as one message with the key, the problem and the fix."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.config.arguments import LIST_GROUPS, parse
from hydraloop.config.compose import Composer
from hydraloop.config.hydra_keys import unused
from hydraloop.config.project_classes import arguments_of, own_class, select
from hydraloop.errors import UserError, any_of, emptying, meant, suggestion
from hydraloop.schemas.root import Config
from hydraloop.schemas.selected_hooks import HOOK_GROUPS

_WITHOUT_MESSAGE = (UnicodeDecodeError, AssertionError, AttributeError, KeyError)
COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, *_WITHOUT_MESSAGE)
"""What Hydra raises for a mistake."""
_WRONG_KIND = "could not be converted|not a valid|is not Optional|is not a (ListConfig|subclass)|Cannot (merge|assign)"
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", ListConfig: "a list"}
_OPTIONS = [entry.name for entry in dataclasses.fields(Config)]
_FIXED = ("_target_", "_partial_", "precision.name")
"""Keys that an option of a group sets: they are not suggested."""


class _Case(NamedTuple):
    """An error of Hydra or OmegaConf. Without an override that it names, `line` is empty."""

    text: str
    cause: str
    key: str
    line: str
    value: Any
    file: str
    """The config file that it names, without `.yaml`."""
    cfg: DictConfig
    """The config without the override; empty if it cannot be composed either."""
    composer: Composer

    @property
    def place(self) -> str:
        return f" ({self.file}.yaml)" if self.file else ""

    @property
    def problem(self) -> str:
        """The sentence of Hydra or OmegaConf."""
        sentence = re.sub(r"^In '.*\n", "", self.cause).strip().splitlines()[0]
        return f"{sentence.partition('. value: ')[0]}{self.place}"


def explain(error: Exception, overrides: Sequence[Override], composer: Composer) -> UserError:
    """Return the user's mistake for an error that composing `overrides` has raised. Other errors are raised again."""
    if isinstance(error, MissingConfigException):
        return _no_such_option(str(error.missing_cfg_file or "").removesuffix(".yaml"), composer)
    if isinstance(error, _WITHOUT_MESSAGE):
        return _without_message(error)
    text = str(error) or str(error.__cause__ or type(error).__name__)
    cause = str(error.__cause__ or text)
    wrong = _named(text, overrides)
    cfg = _without(wrong, overrides, composer)
    check_defaults(cfg, composer)
    cfg = cfg or hydra.compose("hydraloop/project")  # no file of the project can be composed
    named, file = re.search(r"full_key: (\S+)|^Multiple values for (\S+)\. ", cause), re.match(r"In '([^']+)': ", text)
    key = named[1] or named[2] if named else ""
    line, value = "", None
    if wrong is not None:
        line, value = wrong.input_line or "", wrong.value()
        key = key if isinstance(value, dict | list) and key else wrong.key_or_group
    case = _Case(text, cause, key, line, value, file[1] if file and not line else "", cfg, composer)
    if re.match("Ambiguous value|Sweep parameters", text):
        return _several_values(case)
    if re.match("Could not .*defaults list", text):
        return _generic(case)
    if re.match("Could not (override|delete)", text) or re.search("Key '.*' (not in '|is not in struct)", cause):
        return _own_key(case) or _not_selected(case) or _no_such_key(case)
    if re.search(_WRONG_KIND, cause):
        return _selected_in_a_file(case) or (_wrong_value(case) if key else _generic(case))
    return _generic(case)


def check_defaults(cfg: DictConfig, composer: Composer) -> None:
    """Refuse a config without hydraloop's options: its defaults list does not name them. An empty one passes."""
    if cfg and "detach" not in cfg:
        raise UserError(
            f"the defaults list of {composer.name}.yaml does not have hydraloop's options",
            key="defaults",
            remedy="Write at the top of the file: defaults: [hydraloop/project, _self_]",
        )


def check_added(cfg: DictConfig, overrides: Sequence[Override], composer: Composer) -> None:
    """Refuse `+x=1`. Hydra adds it to the options, and the run could not be resumed: its config does not fit them."""
    for override in overrides:
        name, line = override.key_or_group.partition(".")[0], override.input_line or ""
        if name in cfg and name not in (*_OPTIONS, "hydra"):
            own = re.sub(r"^\+*", r"\g<0>my.", line)
            remedy = f"{_near(name, cfg, composer)}A key of your own is added under my: {shlex.quote(own)}"
            raise UserError("there is no such key", key=name, remedy=remedy)


def unknown_flag(flag: str, args: argparse.Namespace, composer: Composer) -> UserError:
    """Return the user's mistake for a flag that does not exist, such as `--lr` in `--lr 0.1`."""
    typed, _, value = flag.lstrip("-").partition("=")
    name = typed.replace("-", "_")
    words = [*args.unknown[1:2], *args.overrides]  # argparse has the value in one of them
    value = value or next((word for word in words if word[:1] not in "+~-" and "=" not in word), "")
    remedy = "Options are written without dashes: seed=0. --help lists the flags."
    if "." in typed:  # a key, perhaps a wrong one, of which its own message says more
        remedy = f"Write it without dashes: {typed}={value or '…'}"
    elif near := meant(flag, args.flags) or meant(name, known_keys(_without(None, [], composer), composer)):
        remedy = f"Write {near[0]}" if near[0] in args.flags else _without_dashes(near[0], value, composer)
    return UserError("there is no such flag", key=flag.partition("=")[0], remedy=remedy)


def _without_dashes(key: str, value: str, composer: Composer) -> str:
    """Return the remedy for a flag that is a key."""
    line = f"{key}={value}"
    with suppress(*COMPOSING_ERRORS):
        if value and not parse([line])[0].is_sweep_override():
            composer.compose([line])
        if value:
            return f"Write it without dashes: {line}"
    return f"Its key is {key}, without dashes: --help {key} says what it takes."


def known_keys(cfg: DictConfig, composer: Composer) -> list[str]:
    """Return the keys and groups that a wrong key may mean."""
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    keys = [key for name, node in content.items() if name != "hydra" for key in _keys(node, name)]
    return [*(key for key in keys if not key.endswith(_FIXED)), *composer.groups()]


def _keys(node: object, key: str) -> Iterator[str]:
    yield key
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _keys(inner, f"{key}.{name!s}")


def _named(text: str, overrides: Sequence[Override]) -> Override | None:
    """Return the override that an error message names by its line, or else by its key."""
    for override in sorted(overrides, key=lambda override: -len(override.input_line or "")):
        if override.input_line and (override.input_line in text or f"'{override.input_line.lstrip('~')}'" in text):
            return override
    named = re.search(r"'(?:override )?([^':]+)[':]", text)
    return next((override for override in overrides if named and override.key_or_group == named[1]), None)


def _without(wrong: Override | None, overrides: Sequence[Override], composer: Composer) -> DictConfig:
    """Return the config without the wrong override, or else without any."""
    rest = [
        override.input_line or ""
        for override in overrides
        if override is not wrong and not override.is_sweep_override()
    ]
    for lines in ([] if wrong is None else rest, []):
        try:
            return composer.compose(lines)
        except COMPOSING_ERRORS:
            continue
    return OmegaConf.create()


def _no_such_option(missing: str, composer: Composer) -> UserError:
    """`hooks=emaa`: the group exists, the option does not."""
    group, _, option = missing.rpartition("/")
    if not group or not option:
        remedy = suggestion(missing, [name for name in composer.options("") if name[0] != "_"])
        return UserError(f"the config {missing!r} does not exist", key="--config-name", remedy=remedy)
    return UserError(f"there is no option {option!r}", key=group, remedy=suggestion(option, composer.options(group)))


def _no_such_key(case: _Case) -> UserError:
    known, parent = known_keys(case.cfg, case.composer), case.key.rpartition(".")[0]
    node = select(case.cfg, parent) if parent in known else None
    siblings = [f"{parent}.{name!s}" for name in node] if isinstance(node, DictConfig) else []
    schema = OmegaConf.get_type(node) if isinstance(node, DictConfig) else dict
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    is_open = parent in known and (schema is dict or getattr(schema, "_target_", target) != target)
    if case.line and not isinstance(case.value, dict):  # a mapping is merged, and adds to a section with a +
        taken = [f"{parent}.{name}" for name in arguments_of(target, parent) or ()]
        siblings, known = [*siblings, *taken], [*known, *taken]
        is_open = is_open and own_class(target) is None
    near = meant(case.key, [one for one in siblings if one in known])
    if not (near or (is_open and target)):
        groups = case.composer.groups() if parent else ()  # `experiment` is no key that a section lacks
        near = meant(case.key, [one for one in known if one not in groups], only_equal=bool(siblings))
    line = shlex.quote(f"+{case.line.lstrip('+')}")
    body = case.composer.content(case.file) if case.file else OmegaConf.create()
    if case.file and case.key in known:  # the option that is selected in the config files has it
        remedy = f"The selected option of {parent} does not have it. Remove it from {case.file}.yaml."
        return UserError(f"there is no such key{case.place}", key=case.key, remedy=remedy)
    remedy = f"Did you mean {any_of(near)}?" if near else _lists(parent, case.cfg, case.composer)
    if not near and siblings and parent in case.composer.groups():
        remedy = f"Keys of {parent}: {', '.join(one.rpartition('.')[2] for one in siblings if one in known)}."
    if case.line.startswith("~"):
        remedy = remedy if near and case.key not in near else f"Leave {case.line} out."
    elif isinstance(case.value, dict) and case.value.get("_target_", target) != target:
        clear = f"{parent}=null" if "." in parent else f"~{parent}"
        remedy = f"To replace {target}, remove its values first: {clear} {line}"
    elif select(body, f"{parent}._target_") not in (None, target) and (listed := emptying(parent)):
        remedy = f"To replace the option, write in the defaults list of {case.file}.yaml: {listed}"
    elif case.line and is_open and (target or not near):
        remedy += f" To add a new one: {line}"
    return UserError(f"there is no such key{case.place}", key=case.key, remedy=remedy)


def _own_key(case: _Case) -> UserError | None:
    """A key at the top of a file that is not an option: the user's own, or a group of the user's own."""
    name, group = case.key, case.file.rpartition("/")[0].replace("/", ".")
    if not case.file or "." in name:
        return None
    body: Any = OmegaConf.to_container(case.composer.content(case.file), resolve=False)
    problem = f"there is no such key{case.place}"
    near = _near(name, case.cfg, case.composer)
    remedy = f"{near}A key of your own stands under my: my: {{{name}: …}}, used as ${{my.{name}}}"
    if name not in body:  # the file has no package
        package = "_global_" if {*body} & {*_OPTIONS} else "task.model" if name == "model" else f"my.{group}"
        problem = f"the keys of {case.file}.yaml have no place"
        remedy = f"Begin the file with the line, before any comment: # @package {package}"
    elif name in case.composer.groups() and isinstance(body[name], str):
        entry = "override /model" if name == "model" else f"/{name}"
        remedy = f"An option is selected in the defaults list: - {entry}: {body[name]}"
    return UserError(problem, key=name, remedy=remedy)


def _near(name: str, cfg: DictConfig, composer: Composer) -> str:
    """Return the sentence with the options that a key at the top may mean, or nothing."""
    near = meant(name, [one for one in known_keys(cfg, composer) if one.partition(".")[0] != name])
    return f"Did you mean {any_of(near)}? " if near else ""


def _not_selected(case: _Case) -> UserError | None:
    """An override of a hook that is not in the config."""
    group, name = [*case.key.split("."), ""][:2]
    if group not in HOOK_GROUPS or not name or not case.line or case.line.startswith("~"):
        return None
    if select(case.cfg, f"{group}.{name}") is not None:
        return None
    other = HOOK_GROUPS[HOOK_GROUPS.index(group) - 1]
    line = case.line.lstrip("+")
    moved = line.replace(group, other, 1)
    if select(case.cfg, f"{other}.{name}") is not None:
        return UserError(f"{name} is in the group {other}", key=f"{group}.{name}", remedy=f"Use {moved}")
    for owner, fixed in ((group, line), (other, moved)):
        if name in case.composer.options(owner):
            selected = [str(one) for one, node in case.cfg[owner].items() if node is not None]
            remedy = f"Use '{owner}=[{','.join([*selected, name])}]' {fixed}"
            return UserError("this hook is not selected", key=f"{group}.{name}", remedy=remedy)
    remedy = f"A hook of your own is added with its class: +{group}.{name}._target_=package.Class"
    if near := meant(name, [*case.composer.options(group), *case.composer.options(other)]):
        remedy = f"Did you mean {any_of(near)}? {remedy}"
    return UserError(f"there is no hook {name}", key=f"{group}.{name}", remedy=remedy)


def _wrong_value(case: _Case) -> UserError:
    value = select(case.cfg, case.key)
    example = str(value).replace(", ", ",")
    if "is not a ListConfig" in case.cause and case.line and value is None:
        example, value = f"[{case.line.partition('=')[2]}]", ListConfig([])
    remedy = f"--help {case.key} says what it takes."
    if type(value) in _KINDS:
        remedy = f"It takes {_KINDS[type(value)]}: {shlex.quote(f'{case.key}={example}')}"
    return UserError(case.problem, key=case.key, remedy=remedy)


def _several_values(case: _Case) -> UserError:
    key, _, value = case.line.partition("=")
    remedy = "For a sweep add -m"
    takes_list = key in LIST_GROUPS or isinstance(select(case.cfg, key), ListConfig)
    if takes_list and not any(mark in value for mark in "[]{}()'\""):
        remedy = f"For a list write '{key}=[{value}]'; for a sweep add -m"
    return UserError(f"{value} has several values, but this is not a sweep", key=key, remedy=remedy)


def _selected_in_a_file(case: _Case) -> UserError | None:
    """`optimizer: sgd` or `hooks: [ema]` in a file, but not in its defaults list."""
    body: Any = OmegaConf.to_container(case.composer.content(case.file), resolve=False) if case.file else {}
    for group in case.composer.groups():
        value = body.get(group)
        if isinstance(value, str | list):
            option = value if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
            remedy = f"Write in the defaults list of {case.file}.yaml: - override /{group}: {option}"
            return UserError(f"an option is selected outside of a defaults list{case.place}", key=group, remedy=remedy)
    return None


def _generic(case: _Case) -> UserError:
    """Hydra's own sentence."""
    if found := re.search(r'([^\n]+)\n +in "([^"]+)", line (\d+)[^\n]*$', case.text):  # of YAML
        remedy = "YAML takes key: value, each key once, spaces and no tabs. A list in brackets, [a, b], has no dashes."
        return UserError(f"line {found[3]}: {found[1].strip()}", key=found[2], remedy=remedy)
    key, problem = case.key or case.file.partition("/")[0], case.problem
    remedy = _lists(key, case.cfg, case.composer)
    if "default list use +" in case.text:
        remedy = f"To add it, write a +: {shlex.quote(f'+{case.line}')}"
    elif case.line.startswith("~"):
        remedy = f"Write {key}=[]" if key in LIST_GROUPS else f"Leave {case.line} out."
        if "does not support deletion" in problem:
            problem = "an option cannot be removed"
            if not isinstance(select(case.cfg, key), DictConfig):
                remedy += f" One that may be off takes null: {key}=null"
    elif case.line.startswith("+") and re.match("Could not append|Multiple values", case.text):
        remedy = f"Leave the + out: {shlex.quote(case.line.lstrip('+'))}"
    return UserError(problem, key=key or None, remedy=remedy)


def _lists(key: str, cfg: DictConfig, composer: Composer) -> str:
    """Return the sentence that says where the options are listed: in the help of the part of a key that exists."""
    while key and key not in composer.groups() and not isinstance(select(cfg, key), DictConfig):
        key = key.rpartition(".")[0]
    if not key or key.startswith("hydra"):
        return f"Groups: {', '.join(composer.groups())}. --help lists the keys."
    return f"--help {key} lists the options."


def _without_message(error: Exception) -> UserError:
    """Return the mistake for an error of Python. Hydra has no message for it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, KeyError) and place.filename == "<frozen os>":
        return unused("hydra.job.env_copy")
    if isinstance(error, AttributeError) and place.name == "set_readonly":
        return unused("hydra")
    if isinstance(error, AssertionError) and place.name == "get_name":
        remedy = "Write override for this entry too, - override /hooks: […], or write the entry before the overrides."
        return UserError("a list without override is after an override", key="defaults", remedy=remedy)
    if isinstance(error, UnicodeDecodeError):
        sources = GlobalHydra.instance().config_loader().get_sources()
        for path in (path for one in sources if one.scheme() == "file" for path in Path(one.path).rglob("*.yaml")):
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError as wrong:
                line = wrong.object.count(b"\n", 0, wrong.start) + 1
                return UserError(f"line {line} is not UTF-8 text", key=str(path), remedy="Save it as UTF-8.")
    raise error
