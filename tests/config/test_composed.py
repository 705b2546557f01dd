"""The configs of command lines, compared with golden files that a person has read; see composed.py."""

from __future__ import annotations

from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.sweeps.axes import lines_of
from tests.config.composed import GOLDEN, SINGLE, all_composed, composer, golden_files, job


@cache
def composed() -> list[tuple[str, list[str], DictConfig]]:
    return list(all_composed())


def read(name: str, key: str) -> Any:
    return OmegaConf.select({name: cfg for name, _, cfg in composed()}[name], key)


def test_the_configs_of_the_command_lines_are_the_golden_ones() -> None:
    assert golden_files(composed()) == {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()}


def test_the_configs_contain_what_was_typed() -> None:
    """So that golden files written after a mistake do not pass."""
    assert list(read("default", "hooks")) == []
    assert list(read("default", "default_hooks")) == [
        "runtime_info",
        "timer",
        "sampler_seed",
        "grad_clip",
        "logger",
        "param_scheduler",
        "checkpoint",
        "progress",
    ]
    assert list(read("hooks", "hooks")) == ["ema", "profiler"]
    assert list(read("hooks", "default_hooks")) == list(read("default", "default_hooks"))
    assert read("priorities", "hooks.ema.priority") == "HIGH"
    assert read("priorities", "hooks.profiler.priority") == 45
    assert read("changed_default_hooks", "default_hooks.checkpoint.interval") == 5
    assert "logger" not in read("changed_default_hooks", "default_hooks")
    assert read("no_checkpoint", "default_hooks").checkpoint is None
    assert read("own_hook", "hooks.mine") == {"_target_": "my_project.hooks.MyHook", "priority": 30}
    assert list(read("own_hook_as_an_option", "hooks")) == ["weight_norm", "ema"]
    assert read("diabetes", "task.model._target_") == "hydraloop.models.MLP"
    assert read("diabetes", "experiment_name") == "diabetes"
    assert read("spirals", "data.train._target_") == "my_project.data.Spirals"
    assert read("spirals", "data.loader.batch_size") == 64
    assert read("char_lm", "task._target_") == "hydraloop.tasks.LanguageModeling"
    assert read("char_lm", "task.model.context") == 64
    assert [read("char_lm", f"data.{split}.block_size") for split in ("train", "val", "test")] == [64] * 3
    assert list(read("char_lm", "scheduler")) == ["linear", "cosine"]
    assert read("char_lm", "default_hooks.grad_clip.max_norm") == 1.0
    assert (read("fast", "engine.max_epochs"), read("fast", "engine.limit_train_batches")) == (1, 3)
    assert read("fp16", "precision").name == "fp16"
    assert read("fp16", "precision.init_scale") == 1024
    assert list(read("fast", "scheduler")) == ["linear", "cosine"]


def test_each_job_of_a_sweep_has_its_own_values() -> None:
    lrs_and_hooks = [
        (read(f"sweep_hook_sets.{number}", "optimizer.lr"), list(read(f"sweep_hook_sets.{number}", "hooks")))
        for number in range(4)
    ]
    assert lrs_and_hooks == [(1e-3, []), (1e-3, ["ema"]), (1e-2, []), (1e-2, ["ema"])]
    several = [read(f"sweep_several_optimizers.{number}", "optimizer") for number in range(2)]
    assert [(one.hidden.lr, one.hidden.match, one.rest.lr) for one in several] == [
        (lr, "@matrix|!classifier", 1e-3) for lr in (0.01, 0.02)
    ]
    assert [read(f"sweep_priority.{number}", "hooks.ema.priority") for number in range(2)] == ["HIGH", "LOW"]
    assert [list(read(f"sweep_hooks.{number}", "hooks")) for number in range(2)] == [["ema"], ["profiler"]]


def test_two_ways_to_type_the_same() -> None:
    same: list[tuple[list[str], list[str]]] = [
        (["hooks=ema,profiler"], ["hooks=[ema,profiler]"]),
        (["hooks=ema,profiler"], ["hooks=[ema, profiler]"]),
        (["+hooks=ema,profiler"], ["hooks=ema,profiler"]),
        (["hooks=ema"], ["hooks=[ema]"]),
        (["~default_hooks.logger", "default_hooks.checkpoint.interval=5"], SINGLE["changed_default_hooks"]),
        (["default_hooks=timer,logger"], ["default_hooks=[timer,logger]"]),
        (["+hooks.mine={_target_:my_project.hooks.MyHook,priority:30}"], SINGLE["own_hook"]),
        (["+hooks.mine.priority=30", "+hooks.mine._target_=my_project.hooks.MyHook"], SINGLE["own_hook"]),
    ]
    with composer() as opened:
        for one, other in same:
            first, second = (job(arguments.with_hook_lists(typed)[0], opened) for typed in (one, other))
            assert first == second, one


def test_a_glob_sweeps_over_all_options_of_a_group() -> None:
    with composer() as opened:
        (override,) = arguments.parse(["experiment=glob(*)"])
        names = [job([line], opened).experiment_name for line in lines_of(override)]
    assert names == ["char_lm", "diabetes", "digits", "spirals"]
