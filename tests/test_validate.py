"""Mistakes in a composed config, found without torch by the command line and by `build` alike."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

import hydraloop
from hydraloop.errors import UserError
from hydraloop.validate import check_strategy, validate
from tests.config.composed import REPOSITORY

MISTAKES: list[tuple[str, Any, str]] = [
    ("engine.max_epochs", 0, "Use 1 or more."),
    ("engine.max_iters", 0, "null for max_epochs"),
    ("engine.accumulate", 0, "Use 1 or more."),
    ("engine.val_interval", -1, "null for never"),
    ("engine.val_begin", -1, "Use 0"),
    ("engine.threads", 0, "null for all cores"),
    ("engine.peak_tflops", 0.0, "null"),
    ("engine.limit_train_batches", 0, "from 1"),
    ("engine.limit_val_batches", 1.5, "a share up to 1.0"),
    ("engine.limit_test_batches", -0.5, "null for all"),
    ("engine.max_time", "30 minutes", "0:30:00"),
    ("distributed.strategy", "dpp", "auto, ddp or fsdp2"),
    ("distributed.nproc_per_node", 0, "1 or more"),
    ("distributed.max_restarts", -1, "no restart"),
    ("distributed.agree_interval", 0, "1 or more"),
    ("distributed.timeout", 0.0, "more than 0"),
    ("distributed.timeout", float("nan"), "more than 0"),
    ("distributed.bucket_cap_mb", -1.0, "more than 0, or null"),
    ("data.loader.eval_batch_size", 0, "1 or more"),
    ("weights", "best", "averaged or raw"),
    ("sweep.max_workers", 0, "one per GPU"),
    ("sweep.max_retries", -1, "no retry"),
    ("sweep.on_failure", "go_on", "continue or stop"),
    ("sweep.executor", "slurm", "pool or submitit"),
    ("seed", 2**63, "2^63 - 1"),
    ("secrets", ["hooks.mine.dsn"], "secrets=[dsn] for hooks.mine.dsn"),
    ("secrets", ["5"], "letters"),
    ("secrets", [""], "letters"),
    ("task.model", None, "model=small_cnn"),
    ("task.metrics.accuracy", 5, "_target_"),
    ("scheduler.x", 5, "_target_"),
    ("optimizer.every", 0, "from 1"),
    ("optimizer.layer_decay", 1.5, "above 0, up to 1"),
    ("optimizer.params", "modules", "tensors, named or model"),
    ("optimizer.match", "head.*", "Leave it out"),
    ("optimizer", {}, "_target_"),
    ("hooks.timer", {"_target_": "x.X"}, "another name"),
    ("hooks.x", {"priority": 3}, "Add +hooks.x._target_=package.Class"),
    ("hooks.ema", {"priority": 3}, "Select it: hooks=[…,ema]"),
    ("hooks.x", 5, "# @package hooks.<name>"),
    ("hooks.x/y", {"_target_": "x.X"}, "without slashes"),
]


@cache
def _default() -> DictConfig:
    return hydraloop.compose([], folder=REPOSITORY)


def composed(*lines: str) -> DictConfig:
    return hydraloop.compose(lines, folder=REPOSITORY) if lines else copy.deepcopy(_default())


def error_of(cfg: DictConfig, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        validate(cfg, **options)
    return caught.value


@pytest.mark.parametrize(("key", "value", "remedy"), MISTAKES, ids=lambda value: str(value))
def test_a_mistake_names_key_and_fix(key: str, value: Any, remedy: str) -> None:
    cfg = composed()
    with open_dict(cfg):
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        node[name] = value
    error = error_of(cfg)
    assert error.key == key
    assert remedy in str(error.remedy)
    if not isinstance(value, dict | list | None):
        assert str(value) in error.problem


def test_the_optimizer_of_a_schedule_is_that_of_the_config_only_on_the_command_line() -> None:
    cfg = composed()
    cfg.scheduler.cosine.optimizer = "rest"
    assert error_of(cfg, trains=True).key == "scheduler.cosine.optimizer"
    validate(cfg)  # the optimizers may be finished objects


def test_what_is_right_passes_with_and_without_training_data() -> None:
    validate(composed(), trains=True)
    cfg = composed("data.train=null")
    validate(cfg)
    assert error_of(cfg, trains=True).key == "data.train"


def test_resume_and_load_from_exclude_each_other() -> None:
    cfg = composed()
    cfg.resume, cfg.load_from = "auto", "x.pth"
    assert error_of(cfg).key == "load_from"


def test_deterministic_and_benchmark_exclude_each_other() -> None:
    cfg = composed()
    cfg.engine.deterministic = cfg.engine.benchmark = True
    assert error_of(cfg).key == "engine.benchmark"


def test_limits_and_times_are_typed_as_on_the_command_line() -> None:
    lines = ("engine.limit_train_batches=1.0", "engine.limit_val_batches=1", "engine.max_time=1:30:00")
    cfg = composed(*lines)
    validate(cfg)
    assert [type(value) for value in (cfg.engine.limit_train_batches, cfg.engine.limit_val_batches)] == [float, int]
    with pytest.raises(UserError, match=r"engine\.limit_val_batches"):
        composed("engine.limit_val_batches=true")


def test_a_strategy_for_several_processes() -> None:
    check_strategy("auto", several=False)
    check_strategy("ddp", several=True)
    with pytest.raises(UserError, match="fsdp2 shares the work"):
        check_strategy("fsdp2", several=False)
