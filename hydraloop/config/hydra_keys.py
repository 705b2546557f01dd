"""What may be set in `hydra:`, and what only a command line may set, because a config file can come from anywhere.

Hydra composes, hydraloop runs. Nothing in `hydra:` is called, and hydraloop reads only `_READ` of it, so the checks are
for the message. Two are more: Hydra imports the packages of a search path while it composes, and environment variables
are those that were typed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.config.arguments import leaves
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.schemas.root import HYDRA_SETTINGS

_READ = ("mode", "run.dir", "sweep.dir", "sweep.subdir", "job.name", "sweeper.params", "searchpath", "verbose")
"""Of `hydra.`."""
_VARIABLES = "hydra.job.env_set"
_SET_BY_HYDRA = (
    *("hydra.runtime.", "hydra.overrides.", "hydra.job.config_name", "hydra.job.override_dirname"),
    *("hydra.job.id", "hydra.job.num"),
)
"""Hydra replaces what a config file sets here; for `overrides`, see `check_overrides`."""

_SEARCH_PATH = "hydra.searchpath"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")

_SUBMITIT = """
    name timeout_min slurm_time slurm_signal_delay_s slurm_partition slurm_account slurm_qos slurm_constraint
    mem_gb slurm_mem slurm_mem_per_gpu slurm_mem_per_cpu cpus_per_task slurm_cpus_per_gpu
    gpus_per_node slurm_gpus_per_node slurm_gpus_per_task slurm_gres
    nodes tasks_per_node slurm_ntasks_per_node slurm_nodelist slurm_exclude slurm_exclusive slurm_array_parallelism
"""
_OF_EXECUTORS = {
    "submitit": (_SUBMITIT.split(), re.compile(r"[\w.,:=+@*&|()\[\]/-]+")),
    "ray": (["num_cpus", "num_gpus", "memory"], re.compile(r"[\d.e+-]+")),
}
"""By executor: parameters that a config file may give it, and the form of their values: without line breaks, which
submitit would write into the job's shell script, and without interpolations. Other parameters can run commands."""


def unused(key: str) -> UserError:
    """Return the error for an option of Hydra that hydraloop does not use."""
    read = ", ".join(f"hydra.{option}" for option in _READ)
    remedy = f"Leave it out. Used are: {read}; typed, also {_VARIABLES}.NAME."
    return UserError("hydraloop does not use this option of Hydra", key=key, remedy=remedy)


def of_hydra(lines: Sequence[str]) -> list[Override]:
    """Return the overrides that change `hydra:` or select an option for it."""
    parsed = arguments.parse([line for line in lines if line.lstrip("+~").startswith("hydra")])
    return [override for override in parsed if re.split(r"[./]", override.key_or_group)[0] == "hydra"]


def check_typed(overrides: Sequence[Override], primary: DictConfig) -> None:
    """Refuse what was typed for Hydra and is not used, and packages in the search path, before Hydra composes.

    Args:
        overrides: those that `of_hydra` returns.
        primary: the primary config, as written. Only there Hydra reads `hydra.searchpath`.
    """
    for override in overrides:
        for key, value in leaves(override.value(), override.key_or_group):
            is_variable = key.startswith(f"{_VARIABLES}.")
            if override.is_delete() or not (_is_read(key) or is_variable):
                raise unused(key)
            if is_variable and "${" in str(value):
                raise UserError("an interpolation is refused here", key=key, remedy="Write the value itself.")
    hydra = written(primary, "hydra") if "hydra" in primary else {}
    if not isinstance(hydra, dict):
        raise unused("hydra")
    if "${" in _ENVIRONMENT.sub("", str(hydra.get("searchpath"))):  # it may have another value when Hydra reads it
        remedy = "Write the folder itself, or use ${oc.env:NAME}."
        raise UserError("an interpolation is refused here", key=_SEARCH_PATH, remedy=remedy)
    found = [OmegaConf.select(primary, _SEARCH_PATH)]
    found += [override.value() for override in overrides if override.key_or_group == _SEARCH_PATH]
    found = [entries for entries in found if entries is not None]
    if not all(isinstance(entries, list | ListConfig) for entries in found):
        remedy = "It takes a list: hydra.searchpath=[path/to/conf]"
        raise UserError("this is not a list of folders", key=_SEARCH_PATH, remedy=remedy)
    for entry in (str(entry) for entries in found for entry in entries):
        if "://" in entry and not entry.startswith("file://"):
            remedy = "Name the folder with the config files."
            raise UserError(f"{entry} is not a folder, and hydraloop uses no other", key=_SEARCH_PATH, remedy=remedy)


def check_overrides(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse `hydra.overrides` in a config file: Hydra would append what was typed.

    Args:
        cfg: as Hydra has composed it from `overrides`.
    """
    if len(cfg.hydra.overrides.hydra) + len(cfg.hydra.overrides.task) != len(overrides):
        raise unused("hydra.overrides")


def check_composed(cfg: DictConfig) -> None:
    """Refuse what a config file sets in `hydra:` and is not used."""
    hydra: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    unset = {**dict(leaves(dataclasses.asdict(HydraConf()), "hydra")), **dict(leaves(HYDRA_SETTINGS, "hydra"))}
    typed = variables(hydra["overrides"]["hydra"])
    for key, value in leaves(hydra, "hydra"):
        is_set = key not in unset or unset[key] != value
        is_known = _is_read(key) or key.startswith(_SET_BY_HYDRA) or key.removeprefix(f"{_VARIABLES}.") in typed
        if is_set and not is_known:
            raise unused(key)
    if not isinstance(hydra["sweeper"]["params"], dict | None):
        remedy = "Write keys with their values: hydra.sweeper.params={seed: '1,2'}"
        raise UserError("this is not a mapping", key="hydra.sweeper.params", remedy=remedy)
    names = hydra["verbose"] if isinstance(hydra["verbose"], list) else [hydra["verbose"]]
    if not isinstance(hydra["verbose"], bool) and not all(isinstance(name, str) for name in names):
        remedy = "Use true, false or names of loggers: hydra.verbose=[hydraloop]"
        raise UserError(f"{hydra['verbose']!r} does not name loggers", key="hydra.verbose", remedy=remedy)


def variables(lines: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that a command line sets, `hydra.job.env_set`: never those of a config file."""
    typed = [pair for one in of_hydra(lines) for pair in leaves(one.value(), one.key_or_group)]
    prefix = f"{_VARIABLES}."
    return {key.removeprefix(prefix): str(value) for key, value in typed if key.startswith(prefix)}


def check_executors(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse parameters of submitit and Ray that a config file may not set, unless the package is trusted.

    Args:
        cfg: of a sweep.
        typed: keys that the command line sets.
    """
    sweep = written(cfg, "sweep")  # an interpolation, as written, is refused
    for executor, (names, plain) in _OF_EXECUTORS.items():
        section = f"sweep.{executor}"
        for key, value in leaves(sweep.get(executor) if isinstance(sweep, dict) else sweep, section):
            is_harmless = key.removeprefix(f"{section}.") in names and plain.fullmatch(str(value))
            if executor not in ALLOWLIST.packages and key not in typed and not (value is None or is_harmless):
                problem = f"a config file may not set this to {value!r}: only {', '.join(names)}, as plain values"
                remedy = f"Type it on the command line: {key}=…. To trust all parameters, {ALLOWLIST.remedy(executor)}"
                raise UserError(problem, key=key, remedy=remedy)


def written(cfg: DictConfig, name: str) -> Any:
    """Return a node of a config as written: as plain containers, with interpolations. None if it does not exist."""
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    return raw.get(name)


def _is_read(key: str) -> bool:
    return key.removeprefix("hydra.") in _READ or key.startswith("hydra.sweeper.params.")
