"""The texts of `--help`, from the schemas, the project's config folder and the composed config."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config.arguments import no_json
from hydraloop.config.checks import explained
from hydraloop.config.compose import Composer
from hydraloop.config.messages import known_keys
from hydraloop.config.project_classes import OF_ALL_HOOKS, own_class, select
from hydraloop.errors import UserError, any_of, meant
from hydraloop.files import environment
from hydraloop.files.secrets import masked
from hydraloop.files.terminal import show
from hydraloop.schemas.docs import Argument, arguments_of_schema, field_docs, summary, typed
from hydraloop.schemas.engine import DistributedConf, EngineConf
from hydraloop.schemas.hooks import HookConf
from hydraloop.schemas.root import Config, InitConf
from hydraloop.schemas.selected_hooks import HOOK_GROUPS, HOOKS_BY_USE
from hydraloop.schemas.sweep import SweepConf

_OTHER_GROUPS = {
    "experiment": "Whole runs",
    "model": "The model, task.model",
    "search": "Spaces of searches, for -m",
}
_FLAGS = """\
Flags
  --dry-run        print the config and the order of hooks; train nothing
  -m               a sweep: one job for each combination of key=a,b,c
  --cfg job        print the composed config
  --pdb            open the debugger after an error
  --help NAME      a group, option or key: hooks, hooks.ema, optimizer.lr
"""
_EXAMPLES = """\
Examples
  {command} hooks=ema,profiler optimizer.lr=3e-3
  {command} -m optimizer.lr=1e-3,1e-2 seed=0,1,2
"""
_SELECTION = re.compile(r"`?\w+=\S+?`?(?:: |, (?=the default))")
"""Begins the text about an option: `data=digits`. The help shows it without."""
_NOT_A_TEXT = re.compile(r"#\s*(@package |[\w/.-]+\.ya?ml$)")
"""Comments that are left out: Hydra's package, and the path of the file."""
_NOT_OPTIONS = ("_target_", "_partial_", "defaults")


def show_help(args: argparse.Namespace, composer: Composer, commands: str) -> None:
    """Print what `--help` prints.

    Args:
        args: the overrides are the names to explain, and those with which the config is composed.
        commands: the names of the commands for runs and sweeps.

    Raises:
        UserError: there is no such name, or --json.
    """
    if args.json:
        raise no_json()
    names = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    overrides = [word for word in args.overrides if word not in names]
    pages = [page(name, overrides, composer).rstrip() for name in names] or [overview(composer)]
    show("\n\n".join([*pages, commands]))


def overview(composer: Composer) -> str:
    """Return a page about everything, which fits on one screen."""
    command = " ".join(environment.command())
    lines = [f"usage: {command} [group=option …] [key=value …] [flags]", "", "Groups (--help hooks lists the options)"]
    docs = field_docs(Config) | _OTHER_GROUPS
    for group in composer.groups():
        options = ", ".join(chain(*_by_use(group, composer).values()))
        text = ": ".join(filter(None, [docs.get(group, "").partition("; a group")[0], options]))
        lines.append(f"  {group:<14} {textwrap.shorten(text, 62, placeholder=' …')}")
    sections = {"engine": EngineConf, "distributed": DistributedConf, "sweep": SweepConf, "init": InitConf}
    lines += ["", "Sections of keys (--help engine lists them)"]
    lines += [f"  {name:<14} {summary(schema)}" for name, schema in sections.items()]
    return "\n".join([*lines, "", _FLAGS, _EXAMPLES.format(command=command).rstrip()])


def page(name: str, overrides: Sequence[str], composer: Composer) -> str:
    """Return the text about a group, an option (`hooks.ema`), a section (`engine`) or a key (`optimizer.lr`).

    Args:
        overrides: with which the config is composed that has the keys.

    Raises:
        UserError: there is no such name, or the config cannot be composed.
    """
    if name in composer.groups():
        lines = [f"Options of {name} (--help {name}.<option> explains one)"]
        for title, options in _by_use(name, composer).items():
            lines += [f" {title}"] if title and options else []
            lines += [_row(one, _of_option(name, one, composer, short=True), 20) for one in options]
        return "\n".join(lines)
    group, option, key = [*name.split(".", 2), "", ""][:3]
    is_option = option in composer.options(group)
    content, package = _content(group, option, composer) if is_option else (OmegaConf.create(), "")
    if is_option and not key:
        title = _filled(f"{group}={option}: {_of_option(group, option, composer)}")
        if package == "_global_":  # an experiment
            return f"{title}\n\n{OmegaConf.to_yaml(_plain(content))}"
        return "\n".join([title, "", *_section(package, content)])
    cfg = explained(composer.compose, overrides, composer)
    lines = _of_key(cfg, name, name) or _of_key(content, key, name)
    if not lines:
        options = [f"{one}.{other}" for one in composer.groups() for other in composer.options(one)]
        near = meant(name, known_keys(cfg, composer)) or meant(name, options)
        remedy = f"Did you mean {any_of(near)}?" if near else "--help names the groups."
        raise UserError("there is no group, option or key of this name", key=name, remedy=remedy)
    return "\n".join(lines)


def _by_use(group: str, composer: Composer) -> dict[str, Sequence[str]]:
    """Return {title: options} of a group, in the order in which the help lists them."""
    options = composer.options(group)
    if group != "hooks":
        return {"": options}
    return {"This project": [one for one in options if one not in chain(*HOOKS_BY_USE.values())], **HOOKS_BY_USE}


def _content(group: str, option: str, composer: Composer) -> tuple[DictConfig, str]:
    """Return an option of a group, and its package."""
    return explained(lambda _: composer.option(group, option), (), composer)


def _of_option(group: str, option: str, composer: Composer, *, short: bool = False) -> str:
    """Return the first comment of an option's file, or the docstring of its dataclass or of the project's class.

    Args:
        short: whether the first sentence is enough.
    """
    file = composer.file(f"{group}/{option}")
    text = "" if file is None else _first_comment(file)
    if not text:
        with suppress(UserError):  # a broken file
            content, _ = _content(group, option, composer)
            schema, own = OmegaConf.get_type(content), own_class(content.get("_target_"))
            text = (inspect.getdoc(schema) if is_dataclass(schema) else own and own.summary) or ""
    text = _SELECTION.sub("", text, count=1) or "from the config folder"
    return re.split(r"\n|\. ", text)[0].rstrip(".") if short else text


def _first_comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), (line for line in lines if not _NOT_A_TEXT.match(line)))
    return " ".join(line.lstrip("# ") for line in comment)


def _of_key(cfg: DictConfig, key: str, name: str) -> list[str]:
    """Return the text about the section or the key `name`, or nothing if the config has no such key."""
    parent, _, last = key.rpartition(".")
    node, value = select(cfg, parent) if parent else cfg, select(cfg, key)
    if isinstance(value, DictConfig) and (is_dataclass(OmegaConf.get_type(value)) or "_target_" in value):
        return list(_section(name, value))
    rows = _rows(name.rpartition(".")[0], node) if isinstance(node, DictConfig) else {}
    return [f"{name}={rows[last][0]}", _filled(rows[last][1], "  ")] if last in rows else []


def _section(key: str, node: DictConfig, before: Sequence[object] = ()) -> Iterator[str]:
    """Yield the text about a section, then about the sections in it.

    Args:
        before: what earlier sections make. Their options are not repeated.
    """
    target = node.get("_target_")
    yield f"{key}.<option>" + (f", options of {target}" if target else "")
    if target and not is_dataclass(OmegaConf.get_type(node)):
        own = own_class(target)
        yield _filled(f"See: python -m pydoc {target}" if own is None else own.summary, "  ")
    for name, (value, text) in _rows(key, node).items():
        yield _row(f"{name}={value}", text, 28)
    shown = [*before, _made(node)]
    for name_of_child, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and _made(child) not in (*shown, dict):
            yield from _section(f"{key}.{name_of_child!s}", child, shown)
            shown.append(_made(child))


def _rows(key: str, node: DictConfig) -> dict[str, tuple[str, str]]:
    """Return {option: (value, text)} of a section: of its dataclass, or the arguments of the project's class."""
    schema, values = OmegaConf.get_type(node) if key else Config, _plain(node)
    found, own = [], own_class(values.get("_target_"))
    if is_dataclass(schema):
        found = arguments_of_schema(schema)
    elif key.rpartition(".")[0] in HOOK_GROUPS:
        found = arguments_of_schema(HookConf)
    known = {*_NOT_OPTIONS, *(one.name for one in found)}
    others = dict.fromkeys([*((own and own.arguments) or ()), *values])
    found += [Argument(name, "", typed(values.get(name, "…")), "") for name in others if name not in known]
    rows = {}
    for one in sorted(found, key=lambda one: one.name in OF_ALL_HOOKS):
        value = values.get(one.name, "???")
        shown = one.default if isinstance(value, dict) or value == "???" else typed(value)
        default = "" if shown == one.default else f"{one.default} by default"
        kind = ", ".join(filter(None, [_type(one.type), default]))
        rows[one.name] = shown, ". ".join(filter(None, [kind, one.text]))
    return rows


def _type(written: str) -> str:
    """Return an annotation in the words of a config: `int or null`."""
    text = re.sub(r"Optional\[(.*)\]", r"\1 or null", written)
    text = re.sub(r"Union\[(.*)\]", lambda found: found[1].replace(", ", " or "), text)
    return "" if text == "Any" else re.sub(r"\bNone(Type)?\b", "null", text.replace(" | ", " or "))


def _made(node: DictConfig) -> object:
    """Return what `_target_` names, or the dataclass of a section, or `dict`."""
    return node.get("_target_") or OmegaConf.get_type(node)


def _plain(node: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = masked(OmegaConf.to_container(node, resolve=False))
    return plain


def _row(name: str, text: str, column: int) -> str:
    """Return a name and its text in the next column, in several lines if it is long."""
    head = f"  {name:<{column}} "
    return _filled(text, head, " " * (column + 3)) or head.rstrip()


def _filled(text: str, first: str = "", rest: str | None = None) -> str:
    width = min(110, shutil.get_terminal_size((110, 24)).columns)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=first if rest is None else rest)
