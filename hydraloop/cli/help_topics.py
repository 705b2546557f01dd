"""The texts of `--help <name>`: one group, option, section or key, with types, defaults and reasons."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.cli.class_sources import Definition, arguments_of, definitions, first_paragraph
from hydraloop.cli.command import explained
from hydraloop.cli.compose import Composer
from hydraloop.cli.config_file_limits import leaves
from hydraloop.errors import UserError, any_of, close_names
from hydraloop.hooks.shared.selected_hooks import HOOK_GROUPS
from hydraloop.safety.secrets import masked
from hydraloop.schemas.docs import Argument, arguments_of_schema, typed
from hydraloop.schemas.hooks import HookConf
from hydraloop.schemas.root import Config

_SELECTION = re.compile(r"`?\w+=\S+?`?(?:: |, (?=the default))")
"""Begins the text about an option: `data=digits`. The help shows it without."""
_NOT_A_TEXT = re.compile(r"#\s*(@package |[\w/.-]+\.ya?ml$)")
"""Comments that are left out: Hydra's package, and the path of the file."""

_NOT_OPTIONS = ("_target_", "_partial_", "defaults")
_OF_ALL_HOOKS = [option.name for option in arguments_of_schema(HookConf)]


@dataclass(frozen=True)
class Row:
    """An option. Its value and its default are as typed on a command line."""

    value: str
    type: str
    default: str
    text: str

    @property
    def described(self) -> str:
        default = f"{self.default} by default" if self.value != self.default else ""
        kind = ", ".join(filter(None, [self.type, default]))
        return ". ".join(filter(None, [kind, self.text]))


@dataclass(frozen=True)
class Topics:
    """What `--help` can explain in one project."""

    composer: Composer
    project: Path
    """The folder whose Python files a config may name. They are read, not imported."""
    overrides: Sequence[str] = ()
    """As typed next to `--help`. Keys are shown with the values that these give."""

    def page(self, name: str) -> str:
        """Return the text about a group, an option (`hooks.ema`), a section (`engine`) or a key (`optimizer.lr`).

        Raises:
            UserError: there is no such name, or the config cannot be composed.
        """
        if name in self.composer.groups():
            return "\n".join([f"Options of {name} (--help {name}.<option> explains one)", *self.options(name)])
        group, option, key, own, package = self._option(name)
        if package and not key:
            title = _filled(f"{group}={option}: {self.text(group, option)}")
            if package == "_global_":  # an experiment
                return f"{title}\n\n{OmegaConf.to_yaml(_plain(own))}"
            return "\n".join([title, "", *self._section(package, own)])
        cfg = self._composed()
        lines = self._key(cfg, name, name) or self._key(own, key, name)
        if not lines:
            raise self._unknown(name, cfg)
        return "\n".join(lines)

    def _option(self, name: str) -> tuple[str, str, str, DictConfig, str]:
        """Return group, option and key in `hooks.ema.momentum`, the option, and its package: "" if there is none."""
        group, _, rest = name.partition(".")
        option, _, key = rest.partition(".")
        if option not in self.composer.options(group):
            return group, option, key, OmegaConf.create(), ""
        return group, option, key, *explained(lambda _: self.composer.option(group, option), (), self.composer)

    def _composed(self) -> DictConfig:
        composed = explained(self.composer.compose, self.overrides, self.composer)
        return OmegaConf.masked_copy(composed, [str(top) for top in composed if top != "hydra"])

    def _unknown(self, name: str, cfg: DictConfig) -> UserError:
        """Return the error for a name, with close ones: whole names, otherwise names whose last part is close."""
        groups = self.composer.groups()
        known = [*groups, *(f"{group}.{one}" for group in groups for one in self.composer.options(group))]
        keys = [key for top, node in _plain(cfg).items() for key, _ in leaves(node, top)]
        known += keys
        by_last = {one.rpartition(".")[2]: one for one in reversed([*keys, *known])}  # lr: a key, not search=lr
        close = close_names(name, known) or [by_last[one] for one in close_names(name.rpartition(".")[2], by_last)]
        remedy = "--help names the groups."
        if close:
            remedy = f"Did you mean {any_of(close)}?"
        return UserError("there is no group, option or key of this name", key=name, remedy=remedy)

    def options(self, group: str, indent: int = 2) -> Iterator[str]:
        """Yield a row for each option of a group."""
        for option in self.composer.options(group):
            text = re.split(r"\n|\. ", self.text(group, option))[0].rstrip(".")
            yield row(option, text, indent=indent, column=20)

    def text(self, group: str, option: str) -> str:
        """Return the first comment of an option's file, or the docstring of its dataclass."""
        file = self.composer.file(f"{group}/{option}")
        if file is not None:
            text = _first_comment(file) or "from the config folder"
        else:
            schema = OmegaConf.get_type(self.composer.option(group, option)[0])
            text = (inspect.getdoc(schema) if is_dataclass(schema) else None) or "comes with hydraloop"
        return _SELECTION.sub("", text, count=1)

    def _key(self, cfg: DictConfig, key: str, name: str) -> list[str]:
        """Return the text about the section or the key `name`, or nothing if the config has no such key."""
        parent, _, last = key.rpartition(".")
        try:
            node = OmegaConf.select(cfg, parent) if parent else cfg
            value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        except OmegaConfBaseException:  # the path leads through a list
            return []
        if isinstance(value, DictConfig) and (is_dataclass(OmegaConf.get_type(value)) or "_target_" in value):
            return list(self._section(name, value))
        rows = self._rows(name.rpartition(".")[0], node) if isinstance(node, DictConfig) else {}
        if last not in rows:
            return []
        return [f"{name}={rows[last].value}", _filled(rows[last].described, "  ")]

    def _section(self, key: str, node: DictConfig, before: Sequence[object] = ()) -> Iterator[str]:
        """Yield the text about a section, then about the sections in it.

        Args:
            before: what earlier sections make. Their options are not repeated.
        """
        target, source = node.get("_target_"), []
        yield f"{key}.<option>" + (f", options of {target}" if target else "")
        if target and not is_dataclass(OmegaConf.get_type(node)):
            source = self._definitions(target)
            yield _filled(first_paragraph(source[0]) if source else f"See: python -m pydoc {target}", "  ")
        for name, found in self._rows(key, node).items():
            yield row(f"{name}={found.value}", found.described, indent=2, column=28)
        shown = [*before, _made(node)]
        for name_of_child, child in node.items_ex(resolve=False):
            if isinstance(child, DictConfig) and _made(child) not in (*shown, dict):
                yield from self._section(f"{key}.{name_of_child!s}", child, shown)
                shown.append(_made(child))

    def _rows(self, key: str, node: DictConfig) -> dict[str, Row]:
        """Return the options of a section, from its dataclass or from the source of what it makes."""
        schema, values = OmegaConf.get_type(node) if key else Config, _plain(node)
        if is_dataclass(schema):
            found = arguments_of_schema(schema)
        else:
            found = arguments_of(self._definitions(node.get("_target_")))
            found += arguments_of_schema(HookConf) if key.rpartition(".")[0].startswith(HOOK_GROUPS) else []
        known = {*_NOT_OPTIONS, *(one.name for one in found)}
        found += [Argument(name, "", typed(value), "") for name, value in values.items() if name not in known]
        rows = {}
        for one in sorted(found, key=lambda one: one.name in _OF_ALL_HOOKS):
            value = values.get(one.name, "???")
            shown = one.default if isinstance(value, dict) or value == "???" else typed(value)
            rows[one.name] = Row(shown, _type(one.type), one.default, one.text)
        return rows

    def _definitions(self, target: object) -> list[Definition]:
        """Return the sources of what a `_target_` names, if it is in the project or in hydraloop."""
        module, _, name = str(target).rpartition(".")
        root = Path(__file__).parents[2] if module.startswith("hydraloop.") else self.project
        return list(definitions(root, module, name))


def width() -> int:
    """Return the width of the terminal, at most 110; 110 if there is no terminal."""
    return min(110, shutil.get_terminal_size((110, 24)).columns)


def row(name: str, text: str, *, indent: int, column: int) -> str:
    """Return a name and its text in the next column, in several lines if it is long."""
    head = f"{'':{indent}}{name:<{column}} "
    return _filled(text, head, " " * (indent + column + 1)) or head.rstrip()


def _filled(text: str, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(text, width(), initial_indent=first, subsequent_indent=first if rest is None else rest)


def _first_comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), (line for line in lines if not _NOT_A_TEXT.match(line)))
    return " ".join(line.lstrip("# ") for line in comment)


def _made(node: DictConfig) -> object:
    """Return what `_target_` names, or the dataclass of a section, or `dict`."""
    return node.get("_target_") or OmegaConf.get_type(node)


def _plain(node: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = masked(OmegaConf.to_container(node, resolve=False))
    return plain


def _type(written: str) -> str:
    """Return an annotation in the words of a config: `int or null`."""
    text = re.sub(r"Optional\[(.*)\]", r"\1 or null", written)
    text = re.sub(r"Union\[(.*)\]", lambda found: found[1].replace(", ", " or "), text)
    return "" if text == "Any" else re.sub(r"\bNone(Type)?\b", "null", text.replace(" | ", " or "))
