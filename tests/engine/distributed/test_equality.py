"""Training is the same with one process, two and three ranks, DDP and FSDP2, whole and accumulated batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed import buckets
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.distributed.process_group import ProcessGroup
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.hooks import DistSamplerSeedHook, EMAHook, GradClipHook, RuntimeInfoHook
from hydraloop.tasks import Regression
from tests.helpers import make_engine
from tests.ranks import on_ranks

SAMPLES = 17
"""Samples. The last global batch of 6 has 5, which three ranks share unevenly."""
WITH_FILLER = 13
"""Samples. The last global batch has 1, so the other ranks have none."""


class Padded(Regression):
    """A loss over tokens of which some do not count: `(sum, count)`."""

    def forward(self, batch: Any) -> dict[str, Any]:
        """The squared errors of the samples whose first input is positive, and their number."""
        inputs, targets = batch
        counts = inputs[:, 0] > 0
        errors = (self.model(inputs) - targets).square()[:, 0]
        return {"loss": (errors[counts].sum(), counts.sum())}


def network() -> nn.Sequential:
    """Two layers, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def dataset(samples: int = SAMPLES) -> InMemoryDataset:
    """Random numbers, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return InMemoryDataset(torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator))


def train(
    distributed: Distributed, batch_size: int, accumulate: int, options: dict[str, Any], run_dir: str
) -> dict[str, Any]:
    """Two epochs over 17 samples. Returns weights, averages, metrics, gradients of the first step."""
    task = (Padded if options.get("pairs") else Regression)(network(), nn.MSELoss())
    distributed.prepare(task.model)
    optimizer: Any = None
    if options.get("several"):
        first, last = task.model[0], task.model[2]
        optimizer = OptimizerSet(
            {"a": torch.optim.AdamW(first.parameters(), lr=0.05), "b": torch.optim.SGD(last.parameters(), lr=0.1)}
        )
    optimizer = optimizer or torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    train_loader: Any = build_loader(
        dataset(options.get("samples", SAMPLES)), shuffle=True, seed=3, batch_size=batch_size, **part
    )
    if options.get("foreign"):  # a list of batches, which does not know the samples of the other ranks
        train_loader = [
            (x[: train_loader.samples_at(i)[0]], y[: train_loader.samples_at(i)[0]])
            for i, (x, y) in enumerate(train_loader)
        ]
    hooks: dict[str, Any] = {
        "sampler_seed": DistSamplerSeedHook(),
        "ema": EMAHook(),
        "clip": GradClipHook(max_norm=options.get("max_norm", 1.0)),
        "runtime_info": RuntimeInfoHook(),
    }
    engine = make_engine(
        Path(run_dir),
        hooks,
        train=train_loader,
        val=build_loader(dataset(5), shuffle=False, batch_size=2, **part),
        task=task,
        optimizer=optimizer,
        distributed=distributed,
        max_epochs=2,
        accumulate=accumulate,
    )
    result = engine.train()
    return {
        "weights": {name: whole(value).detach().clone() for name, value in task.model.state_dict().items()},
        "averages": {name: whole(value).clone() for name, value in hooks["ema"].state_dict()["averaged"].items()},
        "val": result.val_metrics,
        "samples": engine.progress.samples,
        "steps": engine.progress.optimizer_step,
        "loss": engine.messages.means(distributed)["loss"],
    }


def alone(*args: Any) -> dict[str, Any]:
    """Call `train` in this process."""
    return train(Distributed(), *args)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare weights, averages and metrics to 1e-6, and counters exactly."""
    for part in ("weights", "averages"):
        for name, value in expected[part].items():
            torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-6)
    assert found["val"] == pytest.approx(expected["val"], abs=1e-6)
    assert (found["samples"], found["steps"]) == (expected["samples"], expected["steps"])


@pytest.mark.parametrize(
    ("world_size", "strategy", "accumulate", "options"),
    [
        (3, "ddp", 1, {}),
        (2, "fsdp2", 3, {}),
        (3, "ddp", 3, {"foreign": True}),
        (2, "fsdp2", 1, {"pairs": True}),
        (2, "ddp", 3, {"foreign": True, "pairs": True}),
        (3, "ddp", 1, {"samples": WITH_FILLER}),
        (2, "ddp", 1, {"samples": WITH_FILLER, "pairs": True}),
        (3, "ddp", 3, {"samples": WITH_FILLER, "pairs": True}),
        (2, "fsdp2", 3, {"samples": WITH_FILLER, "pairs": True}),
        (2, "ddp", 3, {"several": True}),
        (2, "fsdp2", 1, {"several": True}),
    ],
)
def test_ranks_train_as_one_process_does(
    world_size: int, strategy: str, accumulate: int, options: dict[str, Any], tmp_path: Path
) -> None:
    batch_size = 6 // world_size
    expected = alone(6, accumulate, options, str(tmp_path))
    for found in on_ranks(world_size, train, batch_size, accumulate, options, str(tmp_path), strategy=strategy):
        if options.get("foreign"):  # all ranks are assumed to have as many samples in each batch
            found["samples"] = expected["samples"]
        assert_same(found, expected)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-7)


class NothingCounts(Padded):
    """A window in which no token counts."""

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return a sum over no tokens."""
        total, count = super().forward(batch)["loss"]
        return {"loss": (total * 0, count * 0)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_in_which_nothing_counts_changes_nothing(accumulate: int, tmp_path: Path) -> None:
    task = NothingCounts(network(), nn.MSELoss())
    engine = make_engine(
        tmp_path, train=build_loader(dataset(), shuffle=True, batch_size=4), task=task, lr=0.1, accumulate=accumulate
    )
    engine.train()
    for name, value in network().state_dict().items():
        assert torch.equal(task.model.state_dict()[name], value)


def all_kinds(seed: int) -> nn.Module:
    """Parameters and buffers of several types, with strides of their own, empty ones and scalars."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
    module.register_parameter("short", nn.Parameter(torch.randn(5).to(torch.bfloat16)))
    module.register_buffer("flags", torch.rand(6) > 0.5)
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("transposed", torch.randn(3, 5).T)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer += seed
    return module


def made_equal(distributed: ProcessGroup, limit: int) -> list[Any]:
    """The number of broadcasts of a start and of an evaluation, then all values."""
    buckets.LIMIT, before = limit, buckets.LIMIT
    try:
        module = all_kinds(distributed.rank)
        strides = [tensor.stride() for tensor in module.parameters()]
        counts = [_so_far()]
        distributed.broadcast_weights(module)
        counts.append(_so_far())
        distributed.before_evaluation(module)
        counts.append(_so_far())
        assert strides == [tensor.stride() for tensor in module.parameters()]
    finally:
        buckets.LIMIT = before
    return [counts[1] - counts[0], counts[2] - counts[1], values_of(module)]


def _so_far() -> int:
    """Return torch's number of the next collective of the group."""
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


def values_of(module: nn.Module) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.tolist() for name, value in tensors.items()}


@pytest.mark.parametrize(("limit", "expected"), [(250 * 2**20, (4, 3)), (100, (6, 3))])
def test_a_start_and_an_evaluation_need_few_broadcasts(limit: int, expected: tuple[int, int]) -> None:
    for start, evaluation, values in on_ranks(2, made_equal, limit):
        assert values == values_of(all_kinds(0))
        assert (start, evaluation) == expected, "one for each type, and for each that is larger than a bucket"
