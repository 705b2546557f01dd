"""Keys that are missing, unknown or without a value, and interpolations that do not resolve."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hydraloop.errors import UserError, meant
from hydraloop.schemas.root import Config

_OF_HYDRA = re.compile(r"\$\{hydra[:.]")


def check_keys(cfg: DictConfig) -> None:
    """Refuse a config that lacks a key of hydraloop, or has one that no schema knows."""
    for entry in dataclasses.fields(Config):
        if entry.name not in cfg:  # OmegaConf counts a missing value (???) as not there
            remedy = f"Leave ~{entry.name} out if you typed it, or add it: +{entry.name}=…"
            raise UserError("the config lacks this key, which every run needs", key=entry.name, remedy=remedy)
    for key, node, known in _sections(cfg):
        for name in node:
            if str(name) not in known:
                near = meant(f"{key}.{name!s}", [f"{key}.{one}" for one in known])
                remedy = f"Did you mean {near[0]}?" if near else f"--help {key} lists the options."
                raise UserError("there is no such key", key=f"{key}.{name!s}", remedy=remedy)
            if OmegaConf.is_missing(node, name):
                raise UserError("has no value", key=f"{key}.{name!s}", remedy=f"Give it one: {key}.{name!s}=…")


def _sections(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, list[str]]]:
    """Yield (key, mapping, names of its options) of what hydraloop itself reads, not of what a `_target_` takes.

    Hydra does not check these: a + on the command line adds a key to any mapping.
    """
    for name, raw in cfg.items_ex(resolve=False):
        if name == "hydra" or not isinstance(raw, DictConfig):
            continue
        if OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, cast("str", name)):
            continue
        node, key = cfg[name], f"{prefix}{name!s}"
        if node is None or "_target_" in node:
            continue
        schema = OmegaConf.get_type(node)
        if schema is not None and dataclasses.is_dataclass(schema):
            yield key, node, [entry.name for entry in dataclasses.fields(schema)]
        yield from _sections(node, f"{key}.")


def check_interpolations(node: DictConfig, prefix: str = "") -> None:
    """Refuse interpolations that do not resolve.

    Args:
        prefix: of the keys of the node: `hydra.`.
    """
    for name, raw in node.items_ex(resolve=False):
        key = f"{prefix}{name!s}"
        # ${hydra:runtime.output_dir} and the like have a value once the job runs.
        if key == "hydra" or OmegaConf.is_missing(node, name) or (isinstance(raw, str) and _OF_HYDRA.search(raw)):
            continue
        try:
            value = node[name]
        except InterpolationResolutionError as error:
            raise UserError(
                f"{raw!s} does not resolve: {str(error).splitlines()[0]}",
                key=key,
                remedy=f"Name a key that exists (or set the variable), or write a value: {key}=…",
            ) from error
        if isinstance(value, DictConfig) and not _resolves(value):
            check_interpolations(value, f"{key}.")


def _resolves(node: DictConfig) -> bool:
    """Return whether every interpolation in a node resolves, faster than `check_interpolations` finds the first one."""
    try:
        OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException:
        return False
    return True
