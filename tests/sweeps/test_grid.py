"""Jobs composed in milliseconds equal those that Hydra composes: in values, order, types, flags and errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.config.compose import Composer
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.axes import jobs_of
from hydraloop.sweeps.compose_jobs import GridComposer
from hydraloop.sweeps.overrides_to_axes import select
from tests.config.composed import composer

VALUES = (
    "optimizer.lr=1e-3,3e-3,0.1",
    "seed=0,1,2",
    "engine.max_epochs=1,null",
    "+optimizer.extra=a,b",
    "++optimizer.eps=1e-8,1e-7",
    "experiment_name=x,'a b'",
    "data.loader.batch_size=range(8,40,8)",
    "optimizer.weight_decay=${optimizer.lr},0.1",
    "engine.accumulate=1,2",
    "default_hooks.checkpoint.interval=5,7",
    "~default_hooks.logger",
    "default_hooks.checkpoint=null",
    "+hooks.mine={_target_:a.B,priority:3},{_target_:c.D}",
    "init.exclude=[a,b],[c]",
    "++engine.max_iters=10",
    "optimizer.lr=2e-3",
    "+my.new={a:1}",
    "engine.max_epochs=choice(1,2)",
)
GROUPS = (
    "hooks=[],[ema],[ema,profiler]",
    "experiment=null,diabetes,spirals",
    "optimizer=adamw,sgd",
    "precision=fp32,bf16",
    "scheduler=cosine,[]",
    "debug=null,fast",
    "data=digits,spirals",
    "hooks=[ema]",
    "~scheduler",
    "model=small_cnn,mlp",
    "+optimizer@optimizer.hidden=sgd,adamw",
)
HYDRA = (
    "hydra.verbose=true",
    "hydra.sweep.subdir=${hydra.job.override_dirname}",
    "+hydra.job.env_set.A=b",
)


@pytest.mark.parametrize(
    ("seed", "count"), [(10, 8), *(pytest.param(seed, 200, marks=pytest.mark.nightly) for seed in range(10))]
)
def test_random_grids_equal_those_of_hydra(seed: int, count: int) -> None:
    chance, failed = random.Random(seed), 0
    with composer() as opened:
        for _ in range(count):
            picked = chance.sample(VALUES, chance.randint(1, 5)) + chance.sample(GROUPS, chance.randint(0, 2))
            chance.shuffle(picked)
            for lines, ours, theirs in composed(
                opened, [*picked, *chance.sample(HYDRA, chance.randint(0, 2))], 1, chance
            ):
                found = outcome(ours)
                assert found == outcome(theirs), lines
                failed += isinstance(found, str)
    assert failed < count / 2  # most grids are valid


def composed(
    opened: Composer, grid: Sequence[str], most: int, chance: random.Random
) -> Iterator[tuple[tuple[str, ...], Callable[[], DictConfig], Callable[[], DictConfig]]]:
    """Yield the overrides of some jobs, how we compose each, and how Hydra does."""
    try:
        master = opened.compose_sweep(grid)
        axes = select(arguments.parse(grid), [], OmegaConf.structured(SweepConf))
    except Exception:  # Hydra stops here, and so do we, and at a key that is swept twice
        return
    loader, jobs = GlobalHydra.instance().config_loader(), GridComposer(opened, master)
    assert isinstance(axes, list)
    listed = list(jobs_of(axes))
    for lines in chance.sample(listed, min(most, len(listed))):
        yield lines, partial(jobs.compose, lines), partial(loader.load_sweep_config, master, list(lines))


def outcome(compose: Callable[[], DictConfig]) -> Any:
    """Return all that can be seen of a config, or the error."""
    try:
        cfg = compose()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return OmegaConf.to_container(cfg, resolve=False), OmegaConf.to_yaml(cfg), dict(nodes(cfg, ""))


def nodes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the flags and types of every node, in their order."""
    data = node._metadata
    yield path, (dict(data.flags or {}), str(data.ref_type), str(getattr(data, "object_type", None)))
    if OmegaConf.is_dict(node) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
        for key in list(node._content):
            yield from nodes(node._get_node(key), f"{path}.{key}")


def test_the_date_and_the_id_are_those_of_the_sweep() -> None:
    """Also if the sweep has resolved them after the choice of groups was composed."""
    with composer() as opened:
        master = opened.compose_sweep(["seed=1,2"])
        jobs = GridComposer(opened, master)
        jobs.compose(["seed=3"])
        directory = master.hydra.sweep.dir
        first, second = jobs.compose(["seed=1"], number=0), jobs.compose(["seed=2"], number=1)
        assert first.hydra.sweep.dir == second.hydra.sweep.dir == directory
    assert (second.hydra.job.num, second.hydra.job.id, second.seed) == (1, "1", 2)
    assert first.seed == 1
