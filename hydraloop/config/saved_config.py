"""The config of a run that has been started: read from its directory, and composed again with what is typed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hydraloop.config import arguments
from hydraloop.config.checks import compose_job
from hydraloop.config.compose import Composer
from hydraloop.errors import UserError
from hydraloop.files.config_yaml import loaded, remember_config
from hydraloop.files.run_directory import CONFIG, RECORDS, config_file
from hydraloop.schemas.root import Config
from hydraloop.schemas.selected_hooks import HOOK_GROUPS

NAME = "_saved_run"
"""The primary config: the saved one, merged into the options without choices, so that types are checked."""
_OF_HYDRA = ("defaults", "hydra")
"""Keys with which a file would select other files, or set Hydra's options. No run writes them."""


def composed(
    run_dir: Path,
    lines: Sequence[str],
    composer: Composer,
    meta: Callable[[], Mapping[str, Any]],
    changes: Mapping[str, Any],
) -> DictConfig:
    """Return the config of a run, or of its newest resumption, with the node `hydra`, composed and checked.

    Options that a newer version has added have their defaults.

    Args:
        lines: overrides, as on the command line.
        composer: of the config NAME.
        meta: returns that of the checkpoint; called only for an interpolation that does not resolve here (a resolver of
            the user's train.py, an environment variable). It has the value that it had in the run.
        changes: of the saved config, by key. Overrides replace them.

    Raises:
        UserError: the config cannot be read or does not fit this version, or an override does not fit the config.
    """
    file = config_file(run_dir)
    if file is None:
        raise UserError(f"{run_dir} has no {RECORDS}/{CONFIG}", key="run", remedy="Name another run.")
    saved = loaded(file, file)
    for key in _OF_HYDRA:
        if key in saved:
            remedy = "Restore the file, or remove the key."
            raise UserError(f"no run writes this key into {file}", key=key, remedy=remedy)
    try:
        OmegaConf.merge(Config, saved)
    except OmegaConfBaseException as error:
        raise UserError(
            f"the config of {run_dir} does not fit this version of hydraloop: {str(error).splitlines()[0]}",
            key=error.full_key or None,
            remedy=f"Change {file}, or use the version that trained the run.",
        ) from error
    for key, value in changes.items():
        OmegaConf.update(saved, key, value, force_add=True)
    overrides = arguments.parse(lines)
    for override in overrides:
        _check_selection(override, saved, composer)
    _check_hooks(overrides, saved, composer)
    node = {"defaults": ["/hydraloop", "_self_"], **OmegaConf.to_container(saved)}  # type: ignore[dict-item]
    ConfigStore.instance().store(NAME, node)
    run = cache(lambda: loaded(meta().get("config", ""), f"the config in a checkpoint of {run_dir}"))

    def compose(lines: Sequence[str]) -> DictConfig:
        cfg = composer.compose(lines)
        _fill(cfg, run)
        remember_config(cfg)
        return cfg

    return compose_job(lines, composer, compose=compose)


def _check_selection(override: Override, saved: DictConfig, composer: Composer) -> None:
    """Refuse several values, and options of groups, except for hooks that are added."""
    key, line = override.key_or_group, override.input_line
    if override.is_sweep_override():
        raise UserError(f"{line} has several values, and a run has one", key=key, remedy="Give it one value.")
    if isinstance(override.value(), dict) or not composer.is_group(key):
        return
    names = _names(override)
    there = [name for name in names if OmegaConf.select(saved, f"{key}.{name}") is not None]
    if key in HOOK_GROUPS and override.is_add() and not there:
        return
    problem = "an option of a group cannot be selected: the config of a run is composed"
    remedy = f"Change its keys, {key}.…=…, or start a new run with load_from=<checkpoint>."
    if key in HOOK_GROUPS and there:
        problem, remedy = f"{there[0]} is in the run already", f"Change its options: {key}.{there[0]}.…=…"
    elif key in HOOK_GROUPS:
        add = f"To add hooks: {shlex.quote(f'+{key}=[' + ','.join(names) + ']')}. " if names else ""
        remedy = f"{add}To remove one: {key}.<name>=null"
    raise UserError(problem, key=key, remedy=remedy)


def _check_hooks(overrides: Sequence[Override], saved: DictConfig, composer: Composer) -> None:
    """Refuse an option of a hook that is neither in the run nor added."""
    added = {f"{one.key_or_group}.{name}" for one in overrides if one.is_add() for name in _names(one)}
    for override in overrides:
        group, *rest = override.key_or_group.split(".")
        if group not in HOOK_GROUPS or len(rest) < 2 or override.is_add() or override.is_force_add():
            continue
        hook = f"{group}.{rest[0]}"
        is_there = hook in added or OmegaConf.select(saved, hook) is not None
        if not is_there and rest[0] in composer.options(group):
            remedy = f"Add it: {shlex.join([f'+{group}=[{rest[0]}]', override.input_line or ''])}"
            raise UserError("this hook is not selected", key=hook, remedy=remedy)


def _names(override: Override) -> list[str]:
    """Return the options that an override selects, if its key is a group."""
    value: Any = override.value()
    return [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]


def _fill(node: DictConfig | ListConfig, run: Callable[[], Any], prefix: str = "") -> None:
    """Replace each interpolation that does not resolve by its value in `run`, if it has one."""
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
        key = f"{prefix}{name!s}"
        if OmegaConf.is_missing(node, name) or key == "hydra":
            continue  # given as an object, in Python
        try:
            value = node[name]
        except InterpolationResolutionError:
            value = OmegaConf.select(run(), key)
            if value is not None:
                node[name] = value
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_interpolation(node, name):
            _fill(value, run, f"{key}.")
