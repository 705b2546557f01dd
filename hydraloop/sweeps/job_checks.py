"""Check the values of each axis of a sweep, each in the first job that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omegaconf import DictConfig

from hydraloop.errors import UserError, leave_out
from hydraloop.files.secrets import mask_overrides
from hydraloop.launch.checks import check_options
from hydraloop.sweeps.axes import Lines

MOST = 100
"""Values of an axis that are checked, the first ones, which takes about 35 ms each."""


def check(jobs: Iterable[Lines], compose: Callable[[Lines], DictConfig]) -> list[DictConfig]:
    """Compose and check jobs, and return their configs.

    Args:
        jobs: their overrides.
        compose: returns the config of a job, checked as that of a single run.

    Raises:
        UserError: a mistake in a job.
    """
    configs = []
    for job in jobs:
        try:
            cfg = compose(job)
            check_options(cfg)
        except UserError as error:
            problem = f"{error.problem}, in the job {' '.join(mask_overrides(job))}"
            raise UserError(problem, key=error.key, remedy=error.remedy) from error
        _check_in_sweep(cfg)
        configs.append(cfg)
    return configs


def _check_in_sweep(cfg: DictConfig) -> None:
    """Refuse options that only a single run may have."""
    if cfg.distributed.nnodes > 1:
        key = "distributed.nnodes"
        raise UserError("each job of a sweep trains on one node", key=key, remedy=leave_out(key))
    if cfg.resume is not None:
        remedy = "Leave resume out. To start from weights, use load_from=<checkpoint>."
        raise UserError("the jobs of a sweep would continue in one directory", key="resume", remedy=remedy)
