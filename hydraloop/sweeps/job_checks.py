"""Check each value of each axis of a sweep, in the first job that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from omegaconf import DictConfig

from hydraloop.cli import command as command_line
from hydraloop.cli.compose import Composer
from hydraloop.errors import Remedy, UserError
from hydraloop.processes.checks import check_options
from hydraloop.sweeps.axes import Axes, Axis
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.search.trials import Trials

ALL_CHECKED = 100
"""Values of an axis that are all validated, which takes about 35 ms each. Of a longer axis, the first and the last are,
the smallest and the largest; of the others, only key and type are checked."""


@dataclass
class Checked:
    """What the jobs have in common that were checked."""

    configs: list[DictConfig] = field(default_factory=list)
    """All configs that were composed for a search; the config of the first job of a grid."""
    ranks: int = 1
    """The most processes that a job needs."""
    device: str = "cpu"
    """`engine.device`; `cpu` only if it is that of all jobs."""


def check(axes: Axes | Trials, compose: Callable[[Sequence[str]], DictConfig]) -> Checked:
    """Compose and check the first job with each value.

    Args:
        axes: of the sweep.
        compose: returns the config of a job, checked as that of a single run.

    Raises:
        UserError: a mistake in a job.
    """
    found = Checked()
    for job in _first_jobs(axes):
        with _in_job(job, axes):
            cfg = compose(job)
            check_options(cfg)
        _check_in_sweep(cfg)
        if isinstance(axes, Trials) or not found.configs:
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


def check_types(axes: Axes, grid: GridComposer, composer: Composer) -> None:
    """Check that the values of long axes have a key, and its type."""
    for axis, jobs in zip(axes.axes, axes.first_jobs(), strict=True):
        others: tuple[str, ...] | None = None
        left = set(jobs).difference(_validated(axis, sorted(jobs)))
        for value in sorted(left, key=lambda value: (grid.choices(axis.values[value]), value)):
            job, choices = axes.lines(jobs[value]), grid.choices(axis.values[value])
            lines = [line for line in axis.values[value] if line not in choices]
            # One config takes all values, so a key that is new to it may be there already.
            again = [f"++{line.lstrip('+')}" if line.startswith("+") else line for line in lines]
            with _in_job(job, axes):
                if others != (others := tuple(line for line in job if line not in lines)):
                    cfg = command_line.explained(grid.compose, others, composer)
                command_line.explained(partial(grid.apply, cfg=cfg), again, composer)


def _first_jobs(axes: Axes | Trials) -> list[Sequence[str]]:
    """Return the jobs that are validated, each the first one with a value of an axis, or an end of a dimension."""
    if isinstance(axes, Trials):
        return list(dict.fromkeys(axes.space.lines(corner) for corner in axes.space.corners()))
    found = {0}
    for axis, jobs in zip(axes.axes, axes.first_jobs(), strict=True):
        found.update(jobs[value] for value in _validated(axis, sorted(jobs)))
    return [axes.lines(number) for number in sorted(found)]


def _validated(axis: Axis, values: list[int]) -> list[int]:
    """Return which values of an axis are validated."""
    if len(values) <= ALL_CHECKED:
        return values

    def number(value: int) -> float:
        with suppress(ValueError):
            return float(axis.values[value][0].partition("=")[2])
        return 0.0

    ends = [min(values, key=number), max(values, key=number)]
    return [*values[: ALL_CHECKED // 2], *values[-ALL_CHECKED // 2 :], *ends]


@contextmanager
def _in_job(job: Sequence[str], axes: Axes | Trials) -> Iterator[None]:
    """Name the job in an error."""
    try:
        yield
    except UserError as error:
        problem, remedy = f"{error.problem}, in the job {' '.join(job)}", error.remedy
        dimensions = axes.space.searched if isinstance(axes, Trials) else ()
        for one in dimensions:
            if one.key == error.key and "to Integer" in problem:  # as OmegaConf says it
                whole = str(replace(one, is_int=True))
                remedy = Remedy(f"For whole numbers: '{whole}'", add=[whole])
        raise UserError(problem, key=error.key, remedy=remedy) from error
