"""The code of the project whose runs are killed: data with random augmentation, a model with dropout, two witnesses."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydraloop

faulthandler.enable()  # a run that hangs is aborted, and prints its stacks

Sample = tuple[Tensor, int]


class Augmented:
    """Data sets whose strong augmentation a hook can switch off."""

    noise = 0.1

    def set_strong_augmentation(self, on: bool) -> None:
        """Move the points by more."""
        self.noise = 0.1 if on else 0.05

    def sample(self, index: int) -> Sample:
        """Return x, y and the index as the channels of an image `[3, 1, 1]`, and a class. Three generators move it."""
        angle = index * 2.4
        moved = [torch.randn(1).item(), float(np.random.randn()), random.gauss(0, 1)]
        x, y = np.cos(angle) + self.noise * moved[0], np.sin(angle) + self.noise * moved[1] * moved[2]
        return torch.tensor([x, y, index], dtype=torch.float32).reshape(3, 1, 1), index % 3


class Points(Augmented):
    """Samples with an index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)


class Stream(Augmented):
    """The same samples, one after the other, with a state."""

    def __init__(self, samples: int) -> None:
        self.samples, self.position = samples, 0

    def __iter__(self) -> Iterator[Sample]:
        while self.position < self.samples:
            self.position += 1
            yield self.sample(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of samples that were yielded."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after them."""
        self.position = state["position"]


class Model(nn.Module):
    """Logits `[N, 3]` of points; batch norm and dropout have a state and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 3
        self.layers = nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh()
        )
        self.head = nn.Linear(16, 3)

    def set_epoch(self, epoch: int) -> None:
        """Drop less in later epochs."""
        self.layers[3].p = 0.2 / (1 + epoch)

    def forward(self, points: Tensor) -> Tensor:
        """Leave out the index of each point."""
        logits: Tensor = self.head(self.layers(points.flatten(1)[:, :2]))
        return logits


class Ledger(hydraloop.Hook):
    """Appends a line for each iteration and rank: the indices of the samples, and a checksum of what was loaded."""

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)

    def after_train_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        """Fillers are left out."""
        points = batch[0]
        samples_at = getattr(engine.loaders.train, "samples_at", None)
        mine = len(points) if samples_at is None else samples_at(batch_idx)[0]
        line = {
            "iteration": engine.progress.iteration,
            "rank": engine.distributed.rank,
            "samples": [int(index) for index in points[:mine, 2].flatten()],
            "checksum": zlib.crc32(points.numpy().tobytes()),
        }
        _append(self.path, json.dumps(line))


class Witness(hydraloop.Hook):
    """Appends a line with what the run does now, so that a test can kill it there."""

    priority = 10
    rank_zero_only = True

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)

    def _note(self, what: str) -> None:
        _append(self.path, f"{os.getpid()} {what}")

    def before_run(self, engine: hydraloop.Engine) -> None:
        """The run is built; then the checkpoint is loaded."""
        self._note("start")

    def after_load_checkpoint(self, engine: hydraloop.Engine, checkpoint: dict[str, Any]) -> None:
        """Inside of the resume."""
        self._note("resume")

    def before_train_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any) -> None:
        """In an iteration."""
        self._note("iteration")

    def before_save_checkpoint(self, engine: hydraloop.Engine, checkpoint: dict[str, Any]) -> None:
        """The file is written next."""
        self._note("save")

    def before_val_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any) -> None:
        """In an evaluation."""
        self._note("evaluation")

    def after_train(self, engine: hydraloop.Engine) -> None:
        """The last checkpoint is written next, then the test and the result."""
        self._note("shutdown")


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
