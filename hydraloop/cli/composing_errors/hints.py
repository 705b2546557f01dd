"""Remedies: keys that resemble a wrong one, what a key accepts, an override with a plus."""

from __future__ import annotations

import dataclasses
import shlex

from omegaconf import DictConfig, ListConfig

from hydraloop.cli.compose import Composer
from hydraloop.cli.composing_errors.case import keys_of, select
from hydraloop.errors import any_of, suggestion
from hydraloop.schemas.root import Config

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    ListConfig: "a list",
}


def key_hint(key: str, cfg: DictConfig, composer: Composer) -> str:
    """Suggest keys with the same end (`optimizer.lr` for `lr` or `model.lr`), or else close ones that exist."""
    same_end = [other for other in keys_of(cfg) if other.endswith(f".{key.rpartition('.')[2]}")]
    if 0 < len(same_end) <= 3:
        return f"Did you mean {any_of(same_end)}?"
    parent, _, name = key.rpartition(".")
    while parent and not isinstance(select(cfg, parent), DictConfig):  # up to a mapping that exists
        parent, _, name = parent.rpartition(".")
    if not parent and name not in cfg and name in [entry.name for entry in dataclasses.fields(Config)]:
        return f"Leave ~{name} out if you typed it."
    if not parent:
        known = {*map(str, cfg), *composer.groups()} - {"hydra", "hydraloop"}
        return suggestion(name, known)
    return suggestion(f"{parent}.{name}", [f"{parent}.{other!s}" for other in select(cfg, parent)])


def type_hint(key: str, cfg: DictConfig) -> str | None:
    """Return what the key accepts, with its present value as an example."""
    value = select(cfg, key)
    if isinstance(value, DictConfig):
        return f"Change what is in it: {', '.join(f'{key}.{name}' for name in list(value)[:3])}, …"
    example = str(value).replace(", ", ",")
    kind = _KINDS.get(type(value), type(value).__name__)
    if value is None:
        return None
    return f"It takes {kind}: {shlex.quote(f'{key}={example}')}"


def with_plus(text: str, line: str) -> str:
    """Return the remedy that adds a plus to an override, after a text."""
    return f"{text}{shlex.quote(f'+{line}')}"


def first_line(text: str) -> str:
    """Return the first line of an error's text."""
    return text.strip().splitlines()[0] if text.strip() else "it cannot be composed"
