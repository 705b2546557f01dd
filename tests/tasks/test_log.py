"""Task.log: means over the samples and ranks, in the records of training, validation and test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.files.metrics_log import FILENAME
from hydraloop.hooks import LoggerHook, RuntimeInfoHook
from hydraloop.tasks import MeanAbsoluteError, Regression
from tests.helpers import EngineWithNeededHooks
from tests.ranks import on_ranks


class Logs(Regression):
    """Logs the mean of the inputs, as a tensor with a graph and as a number, and a constant twice."""

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        outputs = super().call_model(inputs, targets)
        self.log("input", inputs.mean() + 0 * outputs.mean())
        self.log("as_number", inputs.mean().item())
        self.log("constant", 1)
        self.log("constant", torch.tensor([2]))
        return outputs


def train(distributed: Distributed, run_dir: Path, samples: int) -> None:
    """One epoch with a record at its end, validation and test, each on other data."""
    task = Logs(nn.Linear(1, 1), nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size}

    def loader(begin: float, *, shuffle: bool) -> Any:
        inputs = torch.arange(float(begin), begin + samples).unsqueeze(1)
        return build_loader(InMemoryDataset(inputs, inputs), shuffle=shuffle, batch_size=2, seed=1, **part)

    loaders = Loaders(loader(0, shuffle=True), loader(100, shuffle=False), loader(200, shuffle=False))
    EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.0),
        loaders=loaders,
        hooks={"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=len(loaders.train or ()))},
        settings=Settings(max_epochs=2, val_interval=2, accumulate=2, device="cpu"),
        distributed=distributed,
        run_dir=run_dir,
    ).train()


@pytest.mark.parametrize("samples", [5, 7])  # with two ranks and 5 samples, one rank has none in the last batch
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_samples_have_the_same_weight(tmp_path: Path, world_size: int, samples: int) -> None:
    if world_size == 1:
        train(Distributed(), tmp_path, samples)
    else:
        on_ranks(world_size, train, tmp_path, samples)
    records = [json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines()]
    assert [record["mode"] for record in records] == ["train", "train", "val", "test"]
    mean = (samples - 1) / 2
    for record, expected in zip(records, (mean, mean, 100 + mean, 200 + mean), strict=True):
        assert record["input"] == pytest.approx(expected, rel=1e-6)
        assert record["as_number"] == pytest.approx(expected, rel=1e-6)
        assert record["constant"] == 2


class Both(Regression):
    """Logs and returns parameters, numbers of numpy, small types, and the same name."""

    def forward(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = self.model(inputs)
        bias = self.model.bias.reshape(()) if self.log_it else self.bias
        returned: dict[str, Any] = {"bias": bias, "steps": self.count, "twice": 0.0}
        if self.log_it:
            self.log("bias", returned.pop("bias"))
            self.log("steps", returned.pop("steps"))
            self.log("numpy", np.float32(2))
            self.log("half", torch.tensor(300, dtype=torch.float16))
        else:
            returned |= {"numpy": np.array(2.0), "half": torch.tensor(300, dtype=torch.float16), "text": np.str_("2")}
        self.log("twice", 1.0)
        if self.training:
            with torch.no_grad():
                self.count += 1
        return {"loss": outputs.mean(), "outputs": outputs, "targets": targets, **returned}


@pytest.mark.parametrize("log_it", [False, True])
def test_values_that_change_later_numpy_and_half_precision(tmp_path: Path, log_it: bool) -> None:
    task = Both(nn.Linear(1, 1), nn.MSELoss())
    task.log_it, task.bias = log_it, nn.Parameter(torch.zeros(()))  # type: ignore[assignment]
    task.register_buffer("count", torch.zeros((), dtype=torch.float64))
    nn.init.zeros_(task.model.bias)  # type: ignore[arg-type]
    batches = [(torch.ones(256, 1), torch.ones(256, 1))] * 4

    class Moves(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                task.bias += 1
                task.model.bias += 1  # type: ignore[operator]

    EngineWithNeededHooks(
        task=task,
        optimizer=Moves(task.parameters(), lr=1.0),
        loaders=Loaders(batches, batches),
        hooks={"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=4)},
        settings=Settings(max_epochs=1, device="cpu"),
        run_dir=tmp_path,
    ).train()
    train, val = (json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines())
    # A returned value is read after the iteration, a logged one when it is logged.
    assert (train["bias"], train["steps"]) == ((1.5, 1.5) if log_it else (2.5, 2.5))
    assert (val["bias"], val["steps"]) == (4, 4)
    for record in (train, val):
        assert (record["twice"], record["numpy"], record["half"]) == (1, 2, 300)
        assert "text" not in record


class CustomEvaluate(Regression):
    """Logs in a custom `evaluate`, before or after `update_metrics`."""

    late = False

    def evaluate(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        if not self.late:
            self.log("input", inputs.mean())
        self.update_metrics(targets.mean(), inputs, targets, len(inputs))
        if self.late:
            self.log("input", inputs.mean())
        return {"loss": targets.mean()}


def test_log_in_a_custom_evaluate() -> None:
    task = CustomEvaluate(nn.Identity(), metrics={"mae": MeanAbsoluteError()})
    for late in (False, True):
        task.late = late
        task.reset_metrics()
        for values in ([1.0, 2.0], [6.0]):
            task.evaluate((torch.tensor(values), torch.tensor(values)))
        if not late:
            assert task.compute_metrics() == {"mae": 0, "loss": 3, "input": 3}
            continue
        with pytest.raises(UserError, match=r"evaluate logs input and calls no update_metrics after it"):
            task.compute_metrics()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("loss", 1.0, "every record already has an entry 'loss'"),
        ("data_time", 1.0, "every record already has an entry 'data_time'"),
        ("norms", torch.zeros(2), r"log\('norms', …\) got a tensor of shape \[2\], not one number"),
        ("norms", "1", "got a str, not one number"),
    ],
)
def test_what_cannot_be_logged(name: str, value: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Regression(nn.Identity()).log(name, value)
