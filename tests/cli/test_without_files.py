"""hydraloop in an empty folder or a notebook: no config files, the user's own model and batches, records for pandas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

import hydraloop
from hydraloop.errors import UserError
from hydraloop.tasks import Classification

QUICK = ("engine.max_epochs=2", "engine.threads=1", "engine.device=cpu", "default_hooks.logger.interval=2")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compose(*lines: str) -> DictConfig:
    return hydraloop.compose([*QUICK, *lines], folder=Path.cwd())


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, 4, generator=generator)
    return [(points, points.argmax(1)) for points in inputs]


def test_a_model_and_batches_train_with_the_defaults_of_a_project(tmp_path: Path) -> None:
    import pandas

    data = {"train": batches(6), "val": batches(2)}
    engine = hydraloop.build(compose("optimizer.lr=0.1"), task=nn.Linear(4, 4), loaders=data)
    result = engine.train()
    assert isinstance(engine.task, Classification)
    assert [*engine.hooks] == [*compose().default_hooks]
    assert not [*tmp_path.glob("conf")]

    rows = engine.records()
    assert rows == hydraloop.records(engine.run_dir)
    frame = pandas.DataFrame(rows)
    assert [*frame.columns[:3]] == ["mode", "epoch", "iteration"]
    assert frame[frame["mode"] == "train"]["iteration"].tolist() == [2, 4, 6, 8, 10, 12]
    assert frame[frame["mode"] == "val"]["accuracy"].iloc[-1] == result.val_metrics["accuracy"] > 0.5

    loaded = hydraloop.load(engine.run_dir, checkpoint="last", task=nn.Linear(4, 4), loaders={"val": data["val"]})
    assert loaded.validate() == result.val_metrics


def test_build_composes_the_config_if_it_gets_none() -> None:
    engine = hydraloop.build(task=nn.Linear(4, 4), loaders={"train": batches(1)}, folder=Path.cwd())
    assert engine.max_epochs == 20


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"^task.model: there is no model\n.*in Python task=model"):
        hydraloop.build(compose(), loaders={"train": batches(1)})
    with pytest.raises(UserError, match=r"^data.train: there is no training data\n.*loaders="):
        hydraloop.build(compose(), task=nn.Linear(4, 4)).train()
    with pytest.raises(UserError, match=r"^task: int is not a task"):
        hydraloop.build(compose(), task=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UserError, match=r"the folder .*config does not exist"):
        hydraloop.compose(config_path="config", folder=Path.cwd())
    with pytest.raises(UserError, match=r"^run: .* is not a run directory"):
        hydraloop.records(Path.cwd())
