"""The launcher `pool` and the sweeper `hydraloop` for any Hydra program: `hydra/launcher=pool hydra/sweeper=hydraloop`.

In hydraloop's own programs, the two together name its controller. Hydra imports this file at every start, so it imports
nothing of hydraloop.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import List, Optional  # noqa: UP035  # OmegaConf reads these annotations at run time

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PoolConf:
    """Options of the launcher."""

    _target_: str = "hydra_plugins.hydraloop.plugin.PoolLauncher"
    max_workers: Optional[int] = None  # noqa: UP045
    """Jobs that run at a time. Null: as many as the GPUs allow; without GPUs, 1."""
    gpus: Optional[List[int]] = None  # noqa: UP006, UP045
    """Numbers of the GPUs that jobs may use. Null: all that are visible."""
    gpus_per_job: float = 1.0
    """A whole number, or a fraction: 0.5 lets two jobs share a GPU."""


@dataclass
class GridConf(BasicSweeperConf):
    """Options of the sweeper: those of Hydra's own."""

    _target_: str = "hydra_plugins.hydraloop.plugin.GridSweeper"


ConfigStore.instance().store(group="hydra/launcher", name="pool", node=PoolConf, provider="hydraloop")
ConfigStore.instance().store(group="hydra/sweeper", name="hydraloop", node=GridConf, provider="hydraloop")


class PoolLauncher(Launcher):
    """Runs each job of a batch in a fork of this process, several at a time. The options are those of `PoolConf`."""

    def __init__(self, **options: object) -> None:
        self._options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `launch`."""
        self._program = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs, and wait for all."""
        batch = _hydra_launcher().Batch(*self._program, self._options)
        returned: Sequence[JobReturn] = batch.launch(job_overrides, initial_job_idx)
        return returned


class GridSweeper(BasicSweeper):
    """Hydra's own sweeper, but it composes each job in milliseconds when it checks them."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose the jobs of a batch before one of them starts."""
        compose = _hydra_launcher().composer(self.config)
        for lines in batch:
            compose(lines)


def _hydra_launcher() -> ModuleType:
    """Import it, but keep hydraloop's options out of the config groups of another program."""
    store = ConfigStore.instance()
    before = store.repo
    if "hydraloop" not in sys.modules:
        store.repo = {}
    try:
        from hydraloop.sweeps import hydra_launcher
    finally:
        store.repo = before
    return hydra_launcher
