"""Compose the jobs of a sweep as Hydra does, in milliseconds: once for each choice of groups, then set the values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import hydra._internal.config_loader_impl as loading  # Hydra's own way to apply overrides, without composing again
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydraloop.config.arguments import parse
from hydraloop.config.compose import Composer
from hydraloop.config.project_classes import with_own_arguments
from hydraloop.safety import hydra_versions


class GridComposer:
    """Composes the jobs of a sweep. The composer has to be open, also in a forked process.

    Args:
        master: what Hydra composes for the sweep itself.
    """

    def __init__(self, composer: Composer, master: DictConfig) -> None:
        self.composer = composer
        self._master = master
        self._bases: dict[tuple[str, ...], bytes] = {}
        self._parse: Callable[[str], Override] = cache(lambda line: parse([line])[0])
        self._groups = frozenset(master.hydra.runtime.choices)
        self._by_hydra = bool(OmegaConf.select(master, "hydra.searchpath"))  # whose groups the composer does not know

    def compose(self, lines: Sequence[str], *, number: int | None = None) -> DictConfig:
        """Return the config of a job, with the node `hydra`: the same as `ConfigLoader.load_sweep_config`.

        Args:
            number: of the job, for `hydra.job.num` and `hydra.job.id`.

        Raises:
            Exception: what Hydra raises.
        """
        try:
            cfg = self._applied(lines)
        except HydraException as error:
            cfg = self._applied(with_own_arguments(error, lines))
        self.composer.drop_unselected(cfg, lines)
        OmegaConf.copy_cache(from_config=self._master, to_config=cfg)  # `${now:}` as in the directory of the sweep
        overrides = [self._parse(line) for line in lines]
        cfg.sweep.objectives = self._master.sweep.objectives  # the job checks that its validations report them
        cfg.hydra.overrides.hydra = self._master.hydra.overrides.hydra
        cfg.hydra.overrides.task = [override.input_line for override in overrides]
        if hydra_versions.IS_1_3:  # an interpolation since 1.4
            names: Any = loading
            cfg.hydra.job.override_dirname = names.get_overrides_dirname(
                overrides=overrides, exclude_keys=[], kv_sep="=", item_sep=","
            )
        if number is not None:
            set_number(cfg, number)
        return cfg

    def choices(self, lines: Sequence[str]) -> tuple[str, ...]:
        """Return the overrides that select options of config groups."""
        return tuple(line for line in lines if self._selects(self._parse(line)))

    def _applied(self, lines: Sequence[str]) -> DictConfig:
        """Return the config with these overrides."""
        groups, values = self._split(lines)
        # Pickle is five times as fast as a deep copy. The bytes stay in this process.
        cfg: DictConfig = pickle.loads(self._base(groups))  # noqa: S301
        loading.ConfigLoaderImpl._apply_overrides_to_config(list(map(self._parse, values)), cfg)
        return cfg

    def _split(self, lines: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
        """Return the overrides with which Hydra composes, and those that are applied to the result."""
        groups = tuple(lines) if self._by_hydra else self.choices(lines)
        return groups, [line for line in lines if line not in groups]

    def _selects(self, override: Override) -> bool:
        group = override.key_or_group
        is_group = group in self._groups or self.composer.is_group(group) or (self._by_hydra and override.is_add())
        return is_group and not isinstance(override.value(), dict)

    def _base(self, groups: tuple[str, ...]) -> bytes:
        """Return the pickled config with these choices of groups, composed by Hydra the first time."""
        if groups not in self._bases:
            loader = GlobalHydra.instance().config_loader()
            self._bases[groups] = pickle.dumps(loader.load_sweep_config(self._master, list(groups)))
        return self._bases[groups]


def set_number(cfg: DictConfig, number: int) -> None:
    """Write into the node `hydra` that a config is that of a job of a sweep."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.mode = RunMode.MULTIRUN
        cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
