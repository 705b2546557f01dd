"""Checks a command line: composes and validates the config of the run, or of each job, before anything is written."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import MISSING, DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.config.compose import Composer
from hydraloop.config.hook_checks import check_hooks, slots_of
from hydraloop.config.hydra_keys import check_composed
from hydraloop.config.key_checks import check_interpolations, check_keys
from hydraloop.config.messages import COMPOSING_ERRORS, check_added, check_defaults, explain
from hydraloop.config.value_checks import check_data, check_targets, check_values
from hydraloop.engine.hook_order import check_order, not_applied
from hydraloop.errors import UserError
from hydraloop.schemas.root import Config
from hydraloop.schemas.selected_hooks import HOOK_GROUPS, has_schedules, is_left_out

T = TypeVar("T")

_REQUIRED = [entry.name for entry in dataclasses.fields(Config) if entry.default == MISSING]
"""Config groups that every run needs."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A run that has passed all checks, before it has a directory."""

    overrides: Sequence[str]
    """The overrides for Hydra: in a single run, `hooks=a,b` has become the list `hooks=[a,b]`."""
    cfg: DictConfig
    """The composed and validated config, with the node `hydra`. In a sweep: the config of the first job."""
    typed: Sequence[str]
    """The keys that the command line sets, without the axes of a sweep that a config file sets."""
    is_sweep = False


def is_sweep(typed: arguments.Typed, args: argparse.Namespace, composer: Composer) -> bool:
    """Return whether the command line starts a sweep, by the flag -m or by `hydra.mode`.

    Raises:
        UserError: a group does not have a selected option.
    """
    _check_groups(typed.parsed, composer)
    return args.multirun or _mode_is_multirun(typed, composer)


def check_run(typed: arguments.Typed, composer: Composer, *, trains: bool) -> Draft:
    """Compose and check the config of a single run.

    Args:
        typed: the command line.
        composer: of the project.
        trains: whether the run needs training data (`validate`).

    Raises:
        UserError: a mistake in the overrides, the config files, or the order of hooks.
    """
    if typed.rewritten:
        print(f"read as a list: {' '.join(typed.rewritten)}", file=sys.stderr)
    cfg = explained(composer.compose, typed.lines, composer)
    _check(cfg, typed.lines, composer, trains=trains)
    return Draft(overrides=typed.lines, cfg=cfg, typed=typed.keys)


def compose_job(
    lines: Sequence[str],
    composer: Composer,
    *,
    trains: bool = False,
    compose: Callable[[Sequence[str]], DictConfig] | None = None,
) -> DictConfig:
    """Return the config of one job, with the node `hydra`, composed and checked.

    Args:
        lines: the overrides.
        composer: of the project.
        trains: whether the job needs training data (`validate`).
        compose: a faster way to compose the job of a sweep. None: `composer.compose`.

    Raises:
        UserError: a mistake in the overrides, the config files, or the order of hooks.
    """
    _check_groups(arguments.parse(lines), composer)
    cfg = explained(compose or composer.compose, lines, composer)
    _check(cfg, lines, composer, trains=trains)
    return cfg


def compose_sweep(lines: Sequence[str], composer: Composer) -> DictConfig:
    """Return the config that Hydra composes for the sweep itself, checked: without the values that are swept."""
    cfg = explained(composer.compose_sweep, lines, composer)
    check_defaults(cfg, composer)
    check_hydra_node(cfg)
    return cfg


def _check(cfg: DictConfig, lines: Sequence[str], composer: Composer, *, trains: bool) -> None:
    """Refuse a composed config with a mistake, and explain it by the overrides and the config files."""
    check_defaults(cfg, composer)
    check_added(cfg, arguments.parse(lines), composer)
    check_hydra_node(cfg)
    validate(cfg, trains=trains)


def validate(cfg: DictConfig, *, trains: bool = False) -> None:
    """Refuse a config from which no run can be built.

    Args:
        cfg: as composed, with or without the node `hydra`. It is not changed.
        trains: whether the run trains, with objects from the config alone, so that the config needs training data.
    """
    check_keys(cfg)
    with hydra_config(cfg) if "hydra" in cfg else nullcontext():
        check_interpolations(cfg)
        check_values(cfg)
        check_data(cfg, trains=trains)
        check_targets(cfg, trains=trains)
        check_hooks(cfg)
        if trains and has_schedules(cfg) and is_left_out(cfg, "param_scheduler"):
            raise not_applied()
        groups = {str(name): group for group in HOOK_GROUPS for name in cfg[group]}
        check_order(slots_of(cfg), key_of=lambda name: f"{groups.get(name, 'default_hooks')}.{name}")


@contextmanager
def hydra_config(cfg: DictConfig) -> Iterator[None]:
    """In the body, let interpolations of `${hydra:…}` resolve. `cfg` has the node `hydra`."""
    before = HydraConfig.instance().cfg  # not None inside a job of Hydra
    HydraConfig.instance().cfg = cast(Any, cfg)  # `set_config` would copy the node, which takes 3 ms
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _check_groups(overrides: Sequence[Override], composer: Composer) -> None:
    """Refuse a value that is not an option of its config group. Hydra would raise a Python error."""
    for override in overrides:
        group = override.key_or_group
        if override.value() == "???":  # OmegaConf's mark of a missing value
            raise UserError("??? is not a value", key=group, remedy=f"Give it one: {group}=…")
        is_axis = override.is_sweep_override() and not override.is_delete()
        if is_axis or not composer.is_group(group) or group.startswith("hydra"):
            continue
        if not group:
            raise UserError(f"{override.input_line!r} has no key", remedy="Write key=value, or ~key to delete.")

        # Allowed: `group=name`, `group=[name,name]`, `group={…}`, which is merged, `~group` and `~group=name`.
        value = override.value()
        value = value.list if isinstance(value, ChoiceSweep) else value
        names = value if isinstance(value, list) else [value]
        has_names = isinstance(value, dict) or all(isinstance(name, str) and name not in ("", "???") for name in names)
        if override.is_delete():
            is_allowed = value is None or (has_names and not isinstance(value, list | dict))
        else:
            is_allowed = has_names
        if is_allowed:
            continue

        remedy = f"Options: {', '.join(composer.options(group))}."
        if group in _REQUIRED:
            remedy = f"{remedy} For the option of your config file, leave {group}= out."
        else:
            none = f"{group}=[]" if group in arguments.LIST_GROUPS else f"~{group}"
            remedy = f"To select none, use {none}. {remedy}"
        shown = "null" if value is None else "an empty value" if value == "" else repr(value)
        raise UserError(f"{shown} is not an option", key=group, remedy=remedy)


def check_hydra_node(cfg: DictConfig) -> None:
    """Refuse options of Hydra that have no effect, directories that do not resolve, and jobs outside of their sweep."""
    check_composed(cfg)
    for key in ("run", "sweep"):  # not the whole node, which takes 10 ms
        check_interpolations(OmegaConf.select(cfg.hydra, key), f"hydra.{key}.")
    written: Any = OmegaConf.to_container(cfg.hydra.sweep, resolve=False)
    folder = os.path.normpath(os.path.join(written["dir"], written["subdir"]))
    if not folder.startswith(os.path.normpath(written["dir"]) + os.sep):
        raise UserError(
            f"{written['subdir']} is outside the sweep's directory, where a job could overwrite another run",
            key="hydra.sweep.subdir",
            remedy="Name a folder in hydra.sweep.dir: ${hydra.job.num}.",
        )


def explained(compose: Callable[[Sequence[str]], T], lines: Sequence[str], composer: Composer) -> T:
    """Call `compose` with the overrides, and explain errors of Hydra.

    Raises:
        UserError: a mistake in the overrides or in the config files.
    """
    try:
        return compose(lines)
    except COMPOSING_ERRORS as error:
        raise explain(error, arguments.parse(lines), composer) from error


def _mode_is_multirun(typed: arguments.Typed, composer: Composer) -> bool:
    """Return whether `hydra.mode` is MULTIRUN, on the command line or in a config file."""
    lines = zip(typed.lines, typed.parsed, strict=True)
    without_axes = [line for line, override in lines if line in typed.rewritten or not override.is_sweep_override()]
    # If the overrides have a mistake, which is reported later, those of Hydra alone may compose.
    for overrides in (without_axes, [line for line in without_axes if line.startswith("hydra")]):
        try:
            mode = composer.compose(overrides).hydra.mode
        except COMPOSING_ERRORS:
            continue
        return mode is not None and mode.name == "MULTIRUN"
    return False
