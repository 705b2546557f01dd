"""Check the values of each axis of a sweep, each in the first job that has it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments, checks
from hydraloop.config.checks import Draft
from hydraloop.config.compose import Composer
from hydraloop.config.hydra_keys import check_executors
from hydraloop.config.value_checks import check_sweep_options
from hydraloop.errors import UserError, leave_out, suggestion
from hydraloop.files.changes import differences
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import mask_overrides, masked
from hydraloop.launch.torchrun import check_options
from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.axes import Axis, Lines, Space, first_jobs
from hydraloop.sweeps.compose_jobs import GridComposer
from hydraloop.sweeps.overrides_to_axes import select
from hydraloop.sweeps.search import search_of, with_conditions
from hydraloop.sweeps.sweep_directory import Jobs

MOST = 100
"""Values of an axis that are checked, the first ones, which takes about 35 ms each."""


def check_jobs(jobs: Iterable[Lines], compose: Callable[[Lines], DictConfig]) -> list[DictConfig]:
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


@dataclass(frozen=True, kw_only=True)
class SweepDraft(Draft):
    """A sweep that has passed all checks, before it has a directory. Not all combinations of values are checked."""

    jobs: Jobs
    """Not masked."""
    master: DictConfig
    """What Hydra composes for the sweep itself, without what is swept: for the nodes `sweep` and `hydra`."""
    grid: GridComposer
    ranks: int
    """The most processes that a job needs."""
    device: str
    """`engine.device`; `cpu` only if it is that of all jobs."""
    is_sweep = True

    @property
    def options(self) -> DictConfig:
        """The options `sweep.*`."""
        return self.master.sweep  # type: ignore[no-any-return]

    @property
    def subdir(self) -> str:
        """`hydra.sweep.subdir`, not resolved."""
        raw: Any = OmegaConf.to_container(self.master.hydra.sweep, resolve=False)
        return str(raw["subdir"])

    def configs(self, jobs: Jobs) -> dict[str, dict[str, Any]]:
        """Return what `sweep.resume` compares: the config of the first job, under "", and the differences from it.

        The differences are those of the first job with each other option of a config group:
        `{"hooks=[ema]": {"hooks.ema": {…}}}`. Values are masked and not resolved. So a change is not noticed in an
        option that the first job with it overrides, or that only a combination selects:
        `defaults: [schedule: ${model}_${data}]`.

        Args:
            jobs: of this draft; or joined with those of an earlier sweep, which are the first ones.
        """
        first, *others = jobs.listed if jobs.search is None else _with_each_choice(jobs.search.space)
        chosen = dict.fromkeys(self.grid.choices(first), first)
        configs = {"": self._compared(first)}
        for lines in others:
            for choice in self.grid.choices(lines):
                if choice not in chosen:
                    chosen[choice] = lines
                    changes = differences(configs[""], self._compared(lines))
                    configs[" ".join(mask_overrides([choice]))] = {change.key: change.new for change in changes}
        return configs

    def _compared(self, lines: Sequence[str]) -> dict[str, Any]:
        """Return what determines the results and the directory of a job, masked and not resolved."""
        cfg: Any = OmegaConf.to_container(self.grid.compose(lines), resolve=False, enum_to_str=True)
        nodes = {key: value for key, value in cfg.items() if key not in ("hydra", "sweep", "detach")}
        hydra = cfg["hydra"]
        nodes["hydra"] = {"job": {"env_set": hydra["job"]["env_set"]}, "sweep": {"subdir": hydra["sweep"]["subdir"]}}
        compared: dict[str, Any] = json.loads(json.dumps(plain(masked(nodes)), default=str))
        return compared


def check(args: argparse.Namespace, composer: Composer) -> SweepDraft:
    """Plan a sweep, and check each value of each axis in the first job that has it.

    Args:
        args: Hydra's flags and the overrides.

    Raises:
        UserError: a mistake in the overrides or in the config files.
    """
    lines = arguments.with_hook_options_swept(args.overrides)
    typed = arguments.typed_keys(lines)
    master = checks.compose_sweep(lines, composer)
    check_sweep_options(master)
    check_executors(master, typed)
    grid = GridComposer(composer, master)
    selected = _selected(master, grid)
    compose = partial(checks.compose_job, composer=composer, trains=args.cfg is None, compose=grid.compose)
    if isinstance(selected, Space):
        configs = check_jobs(dict.fromkeys(map(selected.lines, selected.corners())), compose)
        search = search_of(selected, master.sweep, configs)
        search_sampler.check(search, master.sweep.enqueue)
        jobs, keys = Jobs.of_search(search), selected.keys
    else:
        configs = check_jobs(first_jobs(selected, MOST), compose)
        jobs, keys = Jobs.of_axes(selected), [key for axis in selected for key in axis.keys]
    _check_average(keys, master)
    return SweepDraft(
        overrides=lines,
        cfg=configs[0],
        typed=typed,
        jobs=jobs,
        master=master,
        grid=grid,
        ranks=max(int(cfg.distributed.nproc_per_node) for cfg in configs),
        device=next((cfg.engine.device for cfg in configs if cfg.engine.device != "cpu"), "cpu"),
    )


def _selected(master: DictConfig, grid: GridComposer) -> list[Axis] | Space:
    """Return the axes of the command line and of `hydra.sweeper.params`, or the space that they describe."""
    words: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)  # `x=${seed}` is for the jobs
    params = OmegaConf.select(master, "hydra.sweeper.params") or {}
    in_files = arguments.parse([f"{key}={value}" for key, value in params.items()])
    found = select(arguments.parse(words), in_files, master.sweep)
    return with_conditions(found, grid) if isinstance(found, Space) else found


def _with_each_choice(space: Space) -> list[tuple[str, ...]]:
    """Return the overrides that all jobs of a search have, and these with each choice of each dimension."""
    choices = [f"{one.element}={value}" for one in space.dimensions for value in one.choices]
    return [space.constants, *((*space.constants, line) for line in choices)]


def _check_average(keys: Sequence[str], master: DictConfig) -> None:
    """Refuse a `sweep.average` that is no key. It may be one that this sweep does not set.

    Args:
        keys: that the jobs set.
    """
    name = str(master.sweep.average)
    if name not in keys and OmegaConf.select(master, name, throw_on_resolution_failure=False) is None:
        raise UserError("there is no such key", key="sweep.average", remedy=suggestion(name, keys))
