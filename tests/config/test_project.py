"""`hydraloop/project` in a defaults list: a project's config file names only what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.cli import arguments
from hydraloop.cli.compose import Composer, opened
from hydraloop.schemas.root import DEFAULT_HOOKS
from tests.config.composed import job

LONG = f"""
defaults:
  - hydraloop
  - data: base
  - task: classification
  - model: null
  - optimizer: adamw
  - scheduler: cosine
  - precision: fp32
  - default_hooks: [{", ".join(DEFAULT_HOOKS)}]
  - hooks: []
  - _self_
  - experiment: null
experiment_name: project
"""
SHORT = "defaults: [hydraloop/project, _self_, experiment: null]\n"
OWN = "task: {model: {_target_: torch.nn.Linear, in_features: 2, out_features: 3}}\n"


@contextmanager
def project(folder: Path, config: str, **files: str) -> Iterator[Composer]:
    """A composer for a project with these files in its conf/: `experiment_mine` is experiment/mine.yaml."""
    for name, text in {"config": config, **files}.items():
        path = folder / f"{name.replace('_', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with opened(folder, "config") as composer:
        yield composer


def composed(folder: Path, config: str, lines: Sequence[str] = (), **files: str) -> Any:
    """The config of a run, as a plain container."""
    with project(folder, config, **files) as composer:
        return OmegaConf.to_container(job(arguments.with_hook_lists(list(lines))[0], composer))


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["task=regression", "data=diabetes", "hooks=ema,freeze", "optimizer=sgd", "scheduler=[linear,cosine]"],
        ["experiment=mine", "default_hooks=[logger]", "optimizer.lr=0.5"],
    ],
    ids=" ".join,
)
def test_every_group_has_the_default_that_a_long_list_names(lines: list[str], tmp_path: Path) -> None:
    mine = "# @package _global_\ndefaults: [override /task: regression]\nengine: {max_epochs: 7}\n"
    short, long = (composed(tmp_path, head + OWN, lines, experiment_mine=mine) for head in (SHORT, LONG))
    assert short == long
    assert short["task"]["model"]["_target_"] == "torch.nn.Linear"
    assert not lines or short["task"]["_target_"].endswith("Regression")


def test_a_file_names_what_differs(tmp_path: Path) -> None:
    differs = "defaults: [hydraloop/project, _self_, override task: regression, override /model: mlp]\nseed: 3\n"
    cfg = composed(tmp_path, differs)
    assert cfg["task"]["model"]["_target_"] == "hydraloop.models.MLP"
    assert [*cfg["task"]["metrics"]] == ["mae", "rmse", "r2"]
    assert [*cfg["default_hooks"]] == DEFAULT_HOOKS
    assert (cfg["seed"], cfg["hooks"]) == (3, {})
