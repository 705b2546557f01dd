"""Mistakes in a composed config, found without torch by the command line and by `build` alike."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, open_dict

import hydraloop
from hydraloop.config.checks import validate
from hydraloop.errors import UserError
from tests.config.composed import REPOSITORY


@cache
def _default() -> DictConfig:
    return hydraloop.compose([], folder=REPOSITORY)


def composed(*lines: str) -> DictConfig:
    return hydraloop.compose(lines, folder=REPOSITORY) if lines else copy.deepcopy(_default())


def error_of(cfg: DictConfig, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        validate(cfg, **options)
    return caught.value


@pytest.mark.parametrize("name", ["x/y", "x\\y", "x\0y", "x\x1b[2J", "x" * 300])
def test_files_are_named_after_hooks(name: str) -> None:
    cfg = composed()
    with open_dict(cfg):
        cfg.hooks[name] = {"_target_": "x.X"}
    assert "without slashes" in str(error_of(cfg).remedy)


def test_keys_that_are_numbers_are_looked_at() -> None:
    with pytest.raises(UserError, match=r"hooks\.mine"):
        composed("++hooks.mine={every:{0:{a:1}}}")


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


def test_limits_and_times_are_typed_as_on_the_command_line() -> None:
    lines = ("engine.limit_train_batches=1.0", "engine.limit_val_batches=1", "engine.max_time=1:30:00")
    cfg = composed(*lines)
    validate(cfg)
    assert [type(value) for value in (cfg.engine.limit_train_batches, cfg.engine.limit_val_batches)] == [float, int]
    with pytest.raises(UserError, match=r"engine\.limit_val_batches"):
        composed("engine.limit_val_batches=true")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_experiment_has_a_name(name: str) -> None:
    """A tracker would refuse the empty name after the start of the run."""
    cfg = composed()
    cfg.experiment_name = name
    assert error_of(cfg).key == "experiment_name"


def test_nesterov_without_momentum_names_both() -> None:
    """torch's own message names neither option."""
    with pytest.raises(UserError, match=r"optimizer\.nesterov=false") as caught:
        composed("optimizer=sgd", "optimizer.momentum=0")
    assert caught.value.key == "optimizer.nesterov"
    validate(composed("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"))
