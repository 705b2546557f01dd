"""Train and eval modes: training keeps the modes that the user has set; evaluation restores them."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.model_preparation import in_eval_mode
from hydraloop.tasks.task import Task
from tests.helpers import at, batches, make_engine


class MergedLora(nn.Linear):
    """A linear layer `[N, 3] -> [N, 1]` as in loralib: in eval mode its update is merged into the weight."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.update = nn.Parameter(torch.full((1, 3), 0.1))
        self.merged = False

    def train(self, mode: bool = True) -> MergedLora:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.update.data if mode else self.update.data
            self.merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.merged else super().forward(inputs) + inputs @ self.update.T


class FreezesNorms(nn.Sequential):
    """Keeps its batch norm in eval mode from `train` on, as the backbones of MMDetection with `norm_eval` do."""

    def train(self, mode: bool = True) -> FreezesNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def _modes(module: nn.Module) -> dict[str, bool]:
    return {name: inner.training for name, inner in module.named_modules()}


def _train(run_dir: Path, model: nn.Sequential, *, seen: list[Any] | None = None, **options: Any) -> None:
    """Train two epochs with validations, one of them inside the first; `seen` gets the modes in each iteration."""
    look = at("before_train_iter", lambda engine: None if seen is None else seen.append(_modes(model)), nth=0)
    settings = {"val_by_epoch": False, "val_interval": 1, "max_epochs": 2, **options}
    make_engine(run_dir, {"look": look}, task=Task(model, nn.MSELoss()), val=batches(1), **settings).train()


def test_a_part_in_eval_mode_stays_so_in_all_epochs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model[0].eval()
    seen: list[dict[str, bool]] = []
    _train(tmp_path, model, seen=seen)
    assert seen == [{"": True, "0": False, "1": True, "2": True}] * 4
    assert model[0].num_batches_tracked == 0, "the statistics of a frozen batch norm do not move"


def test_a_part_that_training_puts_into_eval_mode_stays_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    freeze = at("after_train_iter", lambda engine: engine.model[0].eval())
    make_engine(tmp_path, {"freeze": freeze}, task=Task(model, nn.MSELoss()), val=batches(1), max_epochs=3).train()
    assert _modes(model) == {"": True, "0": False, "1": True}
    assert model[0].num_batches_tracked == 1


def test_a_merged_lora_is_split_again_and_learns_after_an_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    validated = nn.Sequential(MergedLora())
    plain = copy.deepcopy(validated)
    _train(tmp_path, validated)
    _train(tmp_path, plain, val_interval=None)
    assert not validated[0].merged
    for one, other in zip(validated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_that_freezes_layers_in_its_own_train_does_so_from_the_first_iteration(tmp_path: Path) -> None:
    seen: list[dict[str, bool]] = []
    _train(tmp_path, FreezesNorms(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)), seen=seen)
    assert seen == [{"": True, "0": False, "1": True, "2": True}] * 4


def test_modes_inside_modules_with_a_train_of_their_own_are_exact() -> None:
    model = FreezesNorms(nn.BatchNorm1d(3), nn.Sequential(MergedLora(), nn.Dropout()), MergedLora())
    model[0].train()  # against what the class does
    model[1].eval()
    model[1][1].train()
    before = _modes(model)
    for _ in range(2):
        with in_eval_mode(model):
            assert not any(_modes(model).values())
            assert model[1][0].merged
            assert model[2].merged
        assert _modes(model) == before
        assert (model[1][0].merged, model[2].merged) == (True, False)


def test_a_disabled_train_is_respected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).eval(), nn.Linear(3, 1))
    model[0].train = lambda mode=True: model[0]  # type: ignore[method-assign]  # as LAVIS does it
    _train(tmp_path, model)
    assert _modes(model) == {"": True, "0": False, "0.0": False, "0.1": False, "1": True}


def test_a_model_wholly_in_eval_mode_is_trained_so_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    _train(tmp_path, model)
    assert not any(_modes(model).values())
    assert [record.getMessage()[:33] for record in caplog.records] == ["the whole model is in eval mode, "]
    caplog.clear()
    _train(tmp_path, nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 1)))
    assert not caplog.records
