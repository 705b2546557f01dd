"""Every option of the group `optimizer`: it trains, and a resumed run ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hydraloop
from hydraloop import build
from hydraloop.schemas.optimizer import OPTIONS
from tests.config.composed import REPOSITORY
from tests.helpers import differences, logged

SEVERAL = ("~optimizer", "+optimizer@optimizer.hidden=muon", "+optimizer@optimizer.rest=adamw")
SHORT = ("engine.device=cpu", "engine.max_epochs=2", "engine.limit_train_batches=5", "engine.val_interval=null")
SHORT += ("engine.limit_test_batches=1", "hooks=[ema]", "default_hooks.logger.interval=1")


def trained(run_dir: Path, *lines: str) -> dict[str, Any]:
    """Return the last checkpoint of a run of two epochs."""
    build(hydraloop.compose([*SHORT, *lines], folder=REPOSITORY), run_dir=run_dir).train()
    found: dict[str, Any] = torch.load(run_dir / "checkpoints" / "epoch_2.pth", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_trains_and_resumes(option: str, tmp_path: Path) -> None:
    lines = [*SEVERAL, "optimizer.hidden.match=@matrix"] if option == "muon" else [f"optimizer={option}"]
    key = "optimizer.rest" if option == "muon" else "optimizer"
    if option == "lbfgs":  # takes no groups
        lines += ["optimizer.max_iter=4"]
    else:
        lines += [f'{key}.groups=[{{match: "@bias", lr_scale: 2}}]']
    uninterrupted = trained(tmp_path, *lines)
    losses = [record["loss"] for record in logged(tmp_path / "metrics.jsonl") if record["mode"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3])
    (tmp_path / "checkpoints" / "epoch_2.pth").unlink()
    resumed = trained(tmp_path, *lines, f"resume={tmp_path / 'checkpoints' / 'epoch_1.pth'}")
    for part in ("state_dict", "optimizer", "schedulers"):
        assert not list(differences(resumed[part], uninterrupted[part])), part
