"""Check the values of each axis of a sweep, each in the first job that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig

from hydraloop.errors import Remedy, UserError
from hydraloop.processes.checks import check_options
from hydraloop.sweeps.axes import Axes
from hydraloop.sweeps.search.space import Dimension

_MOST = 100
"""Values of an axis that are checked, the first ones, which takes about 35 ms each."""


@dataclass
class Checked:
    """What the jobs have in common that were checked."""

    configs: list[DictConfig] = field(default_factory=list)
    """All configs that were composed for a search; the config of the first job of a grid."""
    ranks: int = 1
    """The most processes that a job needs."""
    device: str = "cpu"
    """`engine.device`; `cpu` only if it is that of all jobs."""


def check(
    jobs: Iterable[Sequence[str]],
    compose: Callable[[Sequence[str]], DictConfig],
    searched: Sequence[Dimension] = (),
) -> Checked:
    """Compose and check jobs.

    Args:
        jobs: their overrides.
        compose: returns the config of a job, checked as that of a single run.
        searched: the dimensions of a search.

    Raises:
        UserError: a mistake in a job.
    """
    found = Checked()
    for job in jobs:
        with _in_job(job, searched):
            cfg = compose(job)
            check_options(cfg)
        _check_in_sweep(cfg)
        if searched or not found.configs:
            found.configs.append(cfg)
        found.ranks = max(found.ranks, int(cfg.distributed.nproc_per_node))
        if found.device == "cpu":
            found.device = cfg.engine.device
    return found


def _check_in_sweep(cfg: DictConfig) -> None:
    """Refuse options that only a single run may have."""
    if cfg.distributed.nnodes > 1:
        raise UserError(
            "each job of a sweep trains on one node",
            key="distributed.nnodes",
            remedy=Remedy("Leave it out.", leave_out=["distributed.nnodes"]),
        )
    if cfg.resume is not None:
        raise UserError(
            "the jobs of a sweep would continue in one directory",
            key="resume",
            remedy=Remedy("Leave resume out. To start from weights, use load_from=<checkpoint>.", leave_out=["resume"]),
        )


def first_jobs(axes: Axes) -> list[Sequence[str]]:
    """Return the jobs of a grid that are checked, each the first one with a value of an axis."""
    found = {0}
    for jobs in axes.first_jobs():
        found.update(jobs[value] for value in sorted(jobs)[:_MOST])
    return [axes.lines(number) for number in sorted(found)]


@contextmanager
def _in_job(job: Sequence[str], searched: Sequence[Dimension]) -> Iterator[None]:
    """Name the job in an error."""
    try:
        yield
    except UserError as error:
        problem, remedy = f"{error.problem}, in the job {' '.join(job)}", error.remedy
        for one in searched:
            if one.key == error.key and "to Integer" in problem:  # as OmegaConf says it
                whole = str(replace(one, is_int=True))
                remedy = Remedy(f"For whole numbers: '{whole}'", add=[whole])
        raise UserError(problem, key=error.key, remedy=remedy) from error
