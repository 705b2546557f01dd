"""Writes a checkpoint with Lightning's own trainer, and loads it; test_files_of_others.py starts this."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import lightning.pytorch.callbacks as theirs

from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from tests.helpers import converted
from tests.hooks.tiny_runs import batches, same


class Model(pl.LightningModule):
    """The smallest model that Lightning trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_accuracy", 0.5, batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def outcome() -> dict[str, Any]:
    """Load a file with hyperparameters of other classes and a callback's state; compare the weights."""
    folder = Path(tempfile.mkdtemp())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[theirs.EarlyStopping("val_accuracy")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        max_epochs=1,
    )
    loader = torch.utils.data.DataLoader
    model = Model()
    trainer.fit(model, loader(batches(), batch_size=None), loader(batches(2), batch_size=None))
    path = folder / "a.ckpt"
    model.save_hyperparameters({"act": torch.nn.ReLU, "where": Path("data")})
    trainer.save_checkpoint(path)
    own = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})
    initialise(own, converted(path), Rules())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return {"same": same(own.state_dict(), model.state_dict()), "objects": len(unsafe)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(outcome()), encoding="utf-8")
