"""The sanity step: what it finds before the first iteration, and that it changes nothing."""

from __future__ import annotations

import logging
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.seeding import mix_seed, rng_state, seed_everything
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook
from hydraloop.tasks import Regression, Task
from tests.engine.distributed.test_equality import dataset, network
from tests.helpers import Recorder, at, batches, differences, make_engine, tiny_task
from tests.marks import slow
from tests.ranks import on_ranks


class Lazy(Dataset[Any]):
    """Opens its file at the first sample, as a set that shall work in workers does."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.file = length, ""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.file = "open"
        return torch.full((3,), float(index)), torch.zeros(1)


# What changes nothing. -----------------------------------------------------------------------------------------------


class Drawing(Task):
    """Draws from each generator, changes a buffer and logs a picture in each evaluation."""

    def __init__(self) -> None:
        super().__init__(tiny_task().model, nn.MSELoss())
        self.register_buffer("calls", torch.zeros(()))

    def evaluate(self, batch: Any) -> dict[str, Any]:
        self.calls = self.calls + 1
        self.engine.log_image("noise", torch.rand(4, 4).numpy() + random.random() + np.random.rand())
        return super().evaluate(batch)


def listed(state: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [item.tolist() if isinstance(item, Tensor) else item for item in own] for name, own in state.items()}


def test_it_calls_no_hook_leaves_no_process_and_changes_no_state(tmp_path: Path) -> None:
    recorder, task, data = Recorder(), Drawing(), Lazy()
    loader = build_loader(data, shuffle=False, batch_size=4, num_workers=2)
    found: dict[str, Any] = {}
    others = set(multiprocessing.active_children())  # ranks of other tests

    def look(engine: Engine) -> None:
        found.update(
            state=rng_state(), processes=set(multiprocessing.active_children()) - others, trace=list(recorder.trace),
            modes=[module.training for module in task.modules()], calls=task.calls.item(), file=data.file,
            mode=engine.progress.mode, media=list(tmp_path.glob("media/**/*")), names=engine.validations.metric_names,
        )  # fmt: skip

    task.model.eval()
    engine = make_engine(tmp_path, {"recorder": recorder, "look": at("before_run", look)}, task=task)
    engine.batches.use(Loaders(batches(2), loader))
    modes = [module.training for module in task.modules()]
    seed_everything(mix_seed(0, 0, 0))  # as at the start of training: the seed, the rank, the iteration
    before = rng_state()
    engine.train()
    after = rng_state()
    assert found["state"].pop("torch").equal(before["torch"])
    assert after.pop("torch").equal(before.pop("torch")), "the validation and the test draw separate numbers"
    assert listed(found.pop("state")) == listed(after) == listed(before)
    assert found == {
        "processes": set(), "trace": ["before_run"], "modes": modes, "calls": 0, "file": "", "mode": "train",
        "media": [], "names": ("loss",),
    }  # fmt: skip
    assert task.calls == 3, "of the validation"
    assert data.file == "", "read in the workers"


def run(distributed: Distributed, run_dir: str, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Two epochs with dropout in training and in evaluation, accumulation and EMA."""
    torch.manual_seed(distributed.rank)
    Path(run_dir).mkdir(exist_ok=True)

    class Noisy(Regression):
        def evaluate(self, batch: Any) -> dict[str, Any]:
            return super().evaluate((nn.functional.dropout(batch[0]), batch[1]))

    task = Noisy(nn.Sequential(network(), nn.Dropout(0.3), nn.Linear(1, 1)), nn.MSELoss())
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.fill_(0.3)
    distributed.prepare(task.model)
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": 3}
    hooks = {"ema": EMAHook(), "checkpoint": CheckpointHook(interval=1, by_epoch=False)}
    engine = make_engine(
        Path(run_dir),
        hooks,
        train=build_loader(dataset(), shuffle=True, seed=3, **part),
        val=build_loader(dataset(5), shuffle=False, **part),
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9),
        distributed=distributed,
        max_epochs=2,
        accumulate=2,
        sanity_val_steps=steps,
        **settings,
    )
    result = engine.train()
    weights = {name: whole(value).detach().clone() for name, value in task.model.state_dict().items()}
    return {"weights": weights, "val": result.val_metrics, "generator": torch.get_rng_state()}


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "auto"), (2, "ddp"), slow(2, "fsdp2")])
def test_runs_with_and_without_it_are_equal_to_the_last_bit(world_size: int, strategy: str, tmp_path: Path) -> None:
    def ran(steps: int, name: str, **settings: Any) -> list[Any]:
        if world_size == 1:
            return [run(Distributed(), str(tmp_path / name), steps, settings)]
        return on_ranks(world_size, run, str(tmp_path / name), steps, settings, strategy=strategy)

    without = ran(0, "without")
    assert list(differences(ran(1, "with"), without)) == []
    (first, *_) = sorted((tmp_path / "with" / "checkpoints").glob("iter_*.pth"), key=lambda path: len(path.name))
    resumed = ran(2, "resumed", resume=tmp_path / "with" / "checkpoints" / first.name)
    assert list(differences(resumed, without)) == []


class Custom(nn.Module):
    """A model that torch compiles, unlike a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs).tanh()
        return outputs


@pytest.mark.slow
def test_compiled_code_is_made_for_training_first(tmp_path: Path) -> None:
    def graphs(steps: int) -> list[str]:
        torch.compiler.reset()
        task = Task(Custom(), nn.MSELoss())
        engine = make_engine(
            tmp_path, task=task, train=batches(2, 4), val=batches(1, 6), sanity_val_steps=steps, max_epochs=2
        )
        seen: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.append(str([tuple(one.shape) if isinstance(one, Tensor) else one for one in inputs]))
            return graph.forward

        engine.model.compile(backend=backend)
        engine.train()
        return seen

    without = graphs(0)
    assert "(4, 3)" in without[0], "the shape of training is static"
    assert graphs(1) == without


# What it finds. ------------------------------------------------------------------------------------------------------


class Several(Task):
    """Returns a scalar of its own and has a metric of several values."""

    def forward(self, batch: Any) -> dict[str, Any]:
        return {**super().forward(batch), "margin": batch[0].mean()}


class Parts:
    """A metric with two values and a matrix."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.preds = preds

    def compute(self) -> dict[str, Tensor]:
        return {"mean": self.preds.mean(), "table": torch.eye(2)}

    def reset(self) -> None:
        """Nothing to forget."""

    def to(self, device: torch.device) -> Parts:
        return self


def test_all_names_are_known_before_the_first_hook_runs(tmp_path: Path) -> None:
    task = Several(tiny_task().model, nn.MSELoss(), {"parts": Parts()})
    names: list[tuple[str, ...]] = []
    look = at("before_run", lambda engine: names.append(engine.validations.metric_names))
    stop = EarlyStoppingHook(monitor="margin", rule="less", patience=9)
    engine = make_engine(tmp_path, {"look": look, "stop": stop}, task=task, val=batches(2))
    engine.train()
    assert names == [("parts/mean", "loss", "margin")]
    assert tuple(engine.metrics) == names[0]


def test_without_it_only_declared_names_can_be_followed(tmp_path: Path) -> None:
    stop = EarlyStoppingHook(monitor="margin", rule="less", patience=9)
    engine = make_engine(
        tmp_path, {"stop": stop}, task=Several(tiny_task().model, nn.MSELoss()), val=batches(2), sanity_val_steps=0
    )
    with pytest.raises(UserError, match=r"hooks\.stop\.monitor: there is no metric 'margin'") as caught:
        engine.train()
    assert "engine.sanity_val_steps=1" in str(caught.value.remedy)
    assert engine.progress.iteration == 0


def test_a_mistake_in_the_validation_ends_the_run_before_the_first_iteration(tmp_path: Path) -> None:
    misshapen = [batches(1)[0], (torch.ones(4, 2), torch.ones(4, 1))]
    for steps, trained in ((1, 2), (2, 0)):
        recorder = Recorder()
        engine = make_engine(tmp_path, {"recorder": recorder}, val=misshapen, sanity_val_steps=steps)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            engine.train()
        notes = "".join(getattr(caught.value, "__notes__", []))
        assert ("In the sanity step" in notes) is (trained == 0)
        assert engine.progress.iteration == trained
        assert engine.outcome.result is not None
        assert engine.outcome.result.status == "failed"


def test_a_metric_that_needs_more_samples_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Needs(Parts):
        def compute(self) -> dict[str, Tensor]:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 1:
                raise ValueError("needs at least two batches")
            return super().compute()

    task = Task(tiny_task().model, nn.MSELoss(), {"needs": Needs()})
    engine = make_engine(tmp_path, task=task, val=batches(2))
    with caplog.at_level(logging.WARNING):
        engine.train()
    assert [record.getMessage() for record in caplog.records] == [
        "the metrics cannot be computed from 1 batch, so their names are not checked: ValueError: needs at least two "
        "batches"
    ]
    assert tuple(engine.metrics) == ("needs/mean", "loss")


@pytest.mark.parametrize("settings", [{"val_interval": None}, {"sanity_val_steps": 0}])
def test_without_a_validation_nothing_is_evaluated(tmp_path: Path, settings: dict[str, Any]) -> None:
    make_engine(tmp_path, val=[None] if settings.get("val_interval", 1) is None else batches(1), **settings).train()
    assert make_engine(tmp_path, test=batches(1)).train().test_metrics
