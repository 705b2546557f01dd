"""Several data sets of a validation and of a test: names, hooks, best files, ranks and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, NumClassCheckHook, VisualizationHook
from hydraloop.hooks.monitoring import direction
from hydraloop.tasks import Classification, Regression
from hydraloop.tasks.metrics import Accuracy
from tests.engine.distributed.test_equality import assert_same, dataset, network
from tests.helpers import EngineWithNeededHooks, Recorder, batches, differences, make_engine, tiny_task
from tests.ranks import on_ranks


class Sets(Hook):
    """Notes the data set and the ends of each evaluation's batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bool]] = []

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any, mode: Any) -> None:
        if mode != "train":
            self.seen.append((mode, engine.evaluator.data_set, self.end_of_epoch(engine, batch_idx, mode)))


def test_each_set_is_evaluated_in_one_validation(tmp_path: Path) -> None:
    a, b, c = batches(2, seed=1), batches(3, seed=2), batches(1, seed=3)
    recorder, sets = Recorder(), Sets()
    task = tiny_task()
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(batches(2), {"a": a, "b": b}, {"c": c}),
        hooks={"recorder": recorder, "sets": sets},
        settings=Settings(device="cpu", max_epochs=1, limit_val_batches=2, sanity_val_steps=0),
        run_dir=tmp_path,
    )
    assert engine.evaluator.metric_names == ("a/loss", "b/loss")
    engine.train()
    of_set = ["before_val_iter 0", "after_val_iter 0", "before_val_iter 1", "after_val_iter 1"]
    traced = [point for point in recorder.trace if "val" in point]
    assert traced == ["before_val", "before_val_epoch", *of_set, *of_set, "after_val_epoch", "after_val"]
    evaluated = [("val", "a", False), ("val", "a", True), ("val", "b", False), ("val", "b", True), ("test", "c", True)]
    assert sets.seen == evaluated
    alone = {
        name: make_engine(tmp_path, val=data[:2], task=engine.task) for name, data in (("a", a), ("b", b), ("c", c))
    }
    expected = {name: one.validate()["loss"] for name, one in alone.items()}
    assert engine.metrics == {"a/loss": expected["a"], "b/loss": expected["b"]}
    assert engine.evaluator.test_metrics == {"c/loss": expected["c"]}


def run(distributed: Distributed, batch_size: int, run_dir: str, resume: str | None, missed: bool) -> dict[str, Any]:
    """Three epochs with EMA, a best file for a metric of each set, and early stopping by one of them."""
    Path(run_dir).mkdir(exist_ok=True)
    task = Regression(network(), nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": batch_size, "shuffle": False}
    hooks: dict[str, Hook] = {
        "ema": EMAHook(),
        "checkpoint": CheckpointHook(save_best=["b/loss", "a/loss"]),
        "stop": EarlyStoppingHook(monitor="a/loss", patience=9),
    }
    if missed:

        class Fails(Hook):
            def before_val(self, engine: Engine) -> None:
                if engine.progress.epoch == 2:
                    raise FloatingPointError("told to")

        hooks["fails"] = Fails()
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.1),
        loaders=Loaders(
            build_loader(dataset(), **{**part, "shuffle": True}),
            {"a": build_loader(dataset(5), **part), "b": build_loader(dataset(9), **part)},
            {"c": build_loader(dataset(7), **part), "d": build_loader(dataset(6), **part)},
        ),
        hooks=hooks,
        settings=Settings(
            device="cpu",
            max_epochs=3,
            accumulate=2,
            resume=None if resume is None else Path(resume),
            resume_strict=False,  # the hook that fails is gone
        ),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    result = engine.train()
    return {
        "weights": {name: whole(value).detach().clone() for name, value in task.model.state_dict().items()},
        "averages": {name: whole(value).clone() for name, value in hooks["ema"].state_dict()["averaged"].items()},
        "val": {**result.val_metrics, **result.test_metrics},
        "samples": engine.progress.samples,
        "steps": engine.progress.optimizer_step,
    }


def test_ranks_and_resumed_runs_have_the_metrics_of_each_set(tmp_path: Path) -> None:
    alone = run(Distributed(), 6, str(tmp_path / "alone"), None, False)
    assert list(alone["val"]) == ["a/loss", "b/loss", "c/loss", "d/loss"]
    best = sorted(path.name.partition("_epoch")[0] for path in (tmp_path / "alone" / "checkpoints").glob("best_*"))
    assert best == ["best_a_loss", "best_b_loss"]
    for found in on_ranks(2, run, 3, str(tmp_path / "two"), None, False):
        assert_same(found, alone)
    with pytest.raises(FloatingPointError):
        run(Distributed(), 6, str(tmp_path / "cut"), None, True)
    resumed = run(Distributed(), 6, str(tmp_path / "cut"), str(tmp_path / "cut/checkpoints/epoch_2.pth"), False)
    assert list(differences(resumed, alone)) == []


# Hooks. --------------------------------------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    """Images of some classes."""

    def __init__(self, classes: int, shade: float) -> None:
        self.classes, self.shade = [f"class {number}" for number in range(classes)], shade

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 4, 4), self.shade), index % 2


class Net(nn.Module):
    """Logits of three classes."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images.flatten(1))
        return logits


def pictures_engine(run_dir: Path, hooks: dict[str, Hook], *, classes: int = 3) -> Engine:
    train, dark, light = (
        build_loader(Images(number, shade), shuffle=False, batch_size=2)
        for number, shade in ((3, 0.5), (3, 0.1), (classes, 0.9))
    )
    task = Classification(Net(), nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    return EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.1),
        loaders=Loaders(train, {"dark": dark, "light": light}, {"dark": dark}),
        hooks=hooks,
        settings=Settings(device="cpu", max_epochs=1),
        run_dir=run_dir,
    )


def test_each_set_has_its_picture_and_its_classes_are_checked(tmp_path: Path) -> None:
    hooks: dict[str, Hook] = {"visualization": VisualizationHook(interval=2), "check": NumClassCheckHook()}
    pictures_engine(tmp_path, hooks).train()
    found = {str(path.relative_to(tmp_path / "media")) for path in tmp_path.glob("media/**/*.png")}
    assert found == {
        "val/dark/predictions_iter_2.png", "val/light/predictions_iter_2.png", "test/dark/predictions_iter_2.png",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"Images of data\.val\.light has 4 classes"):
        pictures_engine(tmp_path, {"check": NumClassCheckHook()}, classes=4).train()


@pytest.mark.parametrize("name", ["desktop", "phone"])
def test_the_name_of_a_set_does_not_say_which_values_are_better(tmp_path: Path, name: str) -> None:
    """`desktop` contains `top`, as in top-1."""

    class Logging(Regression):
        def forward(self, batch: Any) -> dict[str, Any]:
            return {**super().forward(batch), "class_loss": torch.tensor(float(len(batch)))}

    task = Logging(nn.Linear(3, 1), nn.MSELoss())
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(batches(1), {name: batches(1)}),
        hooks={},
        settings=Settings(device="cpu", max_epochs=1),
        run_dir=tmp_path,
    )
    engine.train()
    assert f"{name}/class_loss" in engine.metrics
    assert direction(f"{name}/class_loss", engine) is False
