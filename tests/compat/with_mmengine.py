"""Writes a checkpoint with mmengine's own runner, and loads it; test_files_of_others.py starts this."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's warnings about mmengine's use of it
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from tests.helpers import converted
from tests.hooks.tiny_runs import BATCHES, batches, same


class Model(BaseModel):  # type: ignore[misc]  # mmengine is not typed
    """The smallest model that mmengine trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Any, targets: Any, mode: str = "tensor") -> Any:
        difference = (self.layer(inputs) - targets).square().mean()
        return {"loss": difference} if mode == "loss" else [difference]


def outcome() -> dict[str, Any]:
    """Load a file with mmengine's message hub and the states of its hooks; compare the weights."""
    model = Model()
    folder = Path(tempfile.mkdtemp())
    samples = [sample for inputs, targets in batches(BATCHES) for sample in zip(inputs, targets, strict=True)]
    Runner(
        model=model,
        work_dir=str(folder),
        train_dataloader=torch.utils.data.DataLoader(samples, batch_size=len(samples) // BATCHES),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.1}},
        param_scheduler=[{"type": "LinearLR", "start_factor": 0.1, "end": 2}],
        default_hooks={"logger": {"type": "LoggerHook", "interval": 1}},
        default_scope="mmengine",
        experiment_name="weights",
    ).train()
    own = nn.ModuleDict({"layer": nn.Linear(3, 2)})
    initialise(own, converted(folder / "epoch_1.pth"), Rules())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(folder / "epoch_1.pth")
    return {"same": same(own.state_dict(), model.state_dict()), "objects": len(unsafe)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(outcome()), encoding="utf-8")
