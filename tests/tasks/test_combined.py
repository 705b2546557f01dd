"""A task of one method together with ranks, accumulation, bf16, an average and a resume inside an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.device.precision import make_precision
from hydraloop.engine.device.seeding import rng_state, seed_everything, set_rng_state
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.hooks import CheckpointHook, DistSamplerSeedHook, EMAHook, LoggerHook, RuntimeInfoHook
from hydraloop.run_files.record_log import FILENAME
from hydraloop.tasks import Accuracy, Metric, Task
from tests.helpers import EngineWithNeededHooks, differences
from tests.marks import slow
from tests.ranks import on_ranks

SAMPLES = 44


class Counts(Task):
    """The loss is a pair; a returned scalar, a logged one."""

    def forward(self, batch: Any) -> dict[str, Any]:
        inputs, classes = batch
        logits = self.model(inputs)
        self.log("confidence", logits.softmax(1).amax(1).float().mean())
        total = nn.functional.cross_entropy(logits.float(), classes, reduction="sum")
        return {"loss": (total, len(classes)), "norm": logits.float().norm(), "outputs": logits, "targets": classes}


class PerClass:
    """The share of each class among the targets, and the confusion matrix."""

    higher_is_better = True

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.counts[target, preds.argmax(1)] += 1

    def compute(self) -> Any:
        return {"rate": self.counts.sum(1) / self.counts.sum(), "matrix": self.counts}

    def reset(self) -> None:
        self.counts = torch.zeros(3, 3)

    def to(self, device: torch.device) -> Any:
        return self


def train(distributed: Distributed, run_dir: Path, resume: Path | None = None) -> dict[str, float]:
    """Two epochs on ranks whose last batches differ in size. Return the metrics of the test."""
    before = rng_state()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    data = InMemoryDataset(inputs, inputs[:, :3].argmax(1))
    seed_everything(0 if resume is None else 1)
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": 4, "seed": 7}
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    metrics: dict[str, Metric | None] = {"accuracy": Accuracy(), "classes": PerClass()}
    engine = EngineWithNeededHooks(
        task=Counts(model, metrics=metrics),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        loaders=Loaders(
            build_loader(data, shuffle=True, **part), *(build_loader(data, shuffle=False, **part) for _ in range(2))
        ),
        hooks={
            "runtime_info": RuntimeInfoHook(),
            "sampler_seed": DistSamplerSeedHook(),
            "ema": EMAHook(momentum=0.1),
            "logger": LoggerHook(interval=2),
            "checkpoint": CheckpointHook(
                interval=2, by_epoch=False, save_best=["classes/rate/1", "norm"], rule="greater"
            ),
        },
        settings=Settings(device="cpu", max_epochs=2, accumulate=2, resume=resume),
        precision=make_precision({"name": "bf16"}, torch.device("cpu")),
        run_dir=run_dir,
        seed=7,
        distributed=distributed,
    )
    engine.train()
    set_rng_state(before)
    return engine.evaluator.test_metrics


def on(world_size: int, *args: Any) -> list[dict[str, float]]:
    return [train(Distributed(), *args)] if world_size == 1 else on_ranks(world_size, train, *args)


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_resumed_run_ends_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    straight = on(world_size, tmp_path / "straight")
    resumed = on(world_size, tmp_path / "resumed", tmp_path / "straight" / "checkpoints" / "iter_4.pth")
    assert straight == resumed == [straight[0]] * world_size
    assert list(straight[0]) == [
        "accuracy", "classes/rate/0", "classes/rate/1", "classes/rate/2", "loss", "confidence", "norm",
    ]  # fmt: skip
    kept = []
    for name in ("straight", "resumed"):
        found = sorted((tmp_path / name / "checkpoints").glob("iter_*.pth"), key=lambda path: int(path.stem[5:]))
        kept.append(torch.load(found[-1], weights_only=True))
    for checkpoint in kept:
        del checkpoint["meta"]["time"], checkpoint["meta"]["records"], checkpoint["hooks"]["checkpoint"]
    assert list(differences(*kept)) == []
    records = [
        [json.loads(line) for line in (tmp_path / name / FILENAME).read_text().splitlines()]
        for name in ("straight", "resumed")
    ]
    names = ("iteration", "mode", "loss", "norm", "confidence", "accuracy", "classes/rate/1")
    later = [
        [[record.get(name) for name in names] for record in run if record["iteration"] > 4 and "objects" not in record]
        for run in records
    ]
    assert later[0] == later[1]
    assert {record["mode"] for record in records[0] if "confidence" in record and "norm" in record} == {
        "train",
        "val",
        "test",
    }
