"""A project with a finished run, for the commands that do not change it."""

from __future__ import annotations

import pytest

from tests.e2e.projects import Project

SETS = """
# @package data
defaults: [base, _self_]
train: {_target_: hydraloop.data.Digits, split: train}
val: {_target_: hydraloop.data.Digits, split: val}
test:
  small: {_target_: hydraloop.data.Digits, split: test}
  large: {_target_: hydraloop.data.Digits, split: val}
"""
TRAINED = (
    "data=sets",
    *("hooks=[ema,tta]", "hooks.ema.momentum=0.1", "hooks.tta.transforms=[identity,shift]", "optimizer.lr=1e-2"),
    *("engine.max_epochs=4", "default_hooks.checkpoint.save_best=loss", "hydra.run.dir=run"),
)
"""The best checkpoint is not the last one, and metrics depend on averaged weights and several views."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with one finished run in the folder `run`, tested on two data sets."""
    project = Project.make(tmp_path_factory.mktemp("after") / "project")
    project.write("conf/data/sets.yaml", SETS)
    done = project.train(*TRAINED)
    assert done.code == 0, done.text
    return project
