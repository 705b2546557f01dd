"""The config of a run that has been started: read from its directory, changed by overrides. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hydraloop.cli import arguments
from hydraloop.errors import UserError, suggestion
from hydraloop.run_files.attempts import RECORDS
from hydraloop.run_files.config_yaml import loaded, remember_config, resolved_but_secrets
from hydraloop.run_files.run_directory import CONFIG, config_file
from hydraloop.schemas.root import Config


def config_of(run_dir: Path, overrides: Sequence[str], meta: Callable[[], Mapping[str, Any]]) -> DictConfig:
    """Return the config of a run, or of its newest resumption, resolved.

    Options that a newer version has added have their defaults.

    Args:
        overrides: `key=value`, for keys of the config; `+key=value` adds one.
        meta: returns that of the checkpoint; called only for an interpolation that does not resolve here (a resolver of
            the user's train.py, an environment variable). It has the value that it had in the run.

    Raises:
        UserError: the config cannot be read or does not fit this version, or an override does not fit the config.
    """
    file = config_file(run_dir)
    if file is None:
        raise UserError(f"{run_dir} has no {RECORDS}/{CONFIG}", key="run", remedy="Name another run.")
    try:
        cfg = _typed(loaded(file, file))
    except OmegaConfBaseException as error:
        raise UserError(
            f"the config of {run_dir} does not fit this version of hydraloop: {str(error).splitlines()[0]}",
            key=error.full_key or None,
            remedy=f"Change {file}, or use the version that trained the run.",
        ) from error
    OmegaConf.set_struct(cfg, True)
    for override in arguments.parse(overrides):
        _apply(override, cfg)
    _fill(cfg, cache(lambda: loaded(meta().get("config", ""), f"the config in a checkpoint of {run_dir}")))
    remember_config(cfg)
    return _typed(resolved_but_secrets(cfg))  # under torchrun, the ranks resolve them


def _typed(config: Any) -> DictConfig:
    schema = OmegaConf.structured(Config)
    OmegaConf.set_struct(schema, False)  # a run may have keys of the user's own
    cfg = OmegaConf.merge(schema, config)
    assert isinstance(cfg, DictConfig)
    return cfg


def _apply(override: Override, cfg: DictConfig) -> None:
    """Change the config as on a command line, where groups are already composed."""
    key, line = override.key_or_group, override.input_line
    if override.is_delete() or override.is_sweep_override() or override.package is not None:
        remedy = f"Write {key}=null." if override.is_delete() and "." in key else "Write key=value."
        raise UserError(f"{line} cannot change the config of a run", remedy=remedy)
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not override.is_add() and not (isinstance(node, DictConfig | ListConfig) and name in _names(node)):
        arguments_of_commands = () if parent else ("split", "checkpoint")
        remedy = f"To add it: +{line}"
        if isinstance(node, DictConfig):
            near = suggestion(name, [*_names(node), *arguments_of_commands])
            remedy = near + f" {remedy}" if OmegaConf.get_type(node) is dict else near
        raise UserError("there is no such option", key=key, remedy=remedy)
    value = override.value()
    if isinstance(OmegaConf.select(cfg, key), DictConfig) and isinstance(value, str | list):
        raise UserError(
            "an option of a group cannot be selected: the config of a run is composed",
            key=key,
            remedy=f"Change its keys, {key}.…=…",
        )
    try:
        OmegaConf.update(cfg, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0], key=key, remedy="Give it another value.") from error


def _names(node: DictConfig | ListConfig) -> list[str]:
    return [str(name) for name in (node if isinstance(node, DictConfig) else range(len(node)))]


def _fill(node: DictConfig | ListConfig, run: Callable[[], Any], prefix: str = "") -> None:
    """Replace each interpolation that does not resolve by its value in `run`, if it has one."""
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
        key = f"{prefix}{name!s}"
        if OmegaConf.is_missing(node, name):
            continue  # given as an object, in Python
        try:
            value = node[name]
        except InterpolationResolutionError:
            value = OmegaConf.select(run(), key)
            if value is not None:
                node[name] = value
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_interpolation(node, name):
            _fill(value, run, f"{key}.")
