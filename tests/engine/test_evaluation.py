"""Validation and test: when, on which weights, of which data sets, and what is undone at the end."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.seeding import seed_everything, seeded
from hydraloop.errors import UserError
from hydraloop.files.result import Best, Result
from hydraloop.hooks import (
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    NumClassCheckHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
    VisualizationHook,
)
from hydraloop.optim import Plateau, Schedule
from hydraloop.tasks import Classification, Regression, Task
from hydraloop.tasks.metrics import Accuracy
from tests.engine.distributed.test_equality import assert_same, dataset, network
from tests.helpers import Recorder, at, batches, differences, failing, make_engine, tiny_task
from tests.hooks.tiny_runs import Scripted, engine_of, model
from tests.ranks import on_ranks


class Context(Hook):
    """Enters a context for each evaluation and records when."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace

    @contextmanager
    def _context(self) -> Iterator[None]:
        self.trace.append("enter")
        try:
            yield
        finally:
            self.trace.append("exit")

    def before_val_epoch(self, engine: Engine) -> None:
        engine.evaluator.during(self._context())

    def before_test_epoch(self, engine: Engine) -> None:
        engine.evaluator.during(self._context())


def _around(trace: list[str], mode: str) -> list[str]:
    """Return the trace from before_<mode>_epoch to after_<mode>, or to the error."""
    begin = trace.index(f"before_{mode}_epoch")
    end = trace.index(f"after_{mode}") if f"after_{mode}" in trace else len(trace)
    return trace[begin : end + 1]


def test_contexts_last_until_the_last_iteration(tmp_path: Path) -> None:
    recorder = Recorder()
    hooks: dict[str, Hook] = {"recorder": recorder, "context": Context(recorder.trace)}
    make_engine(tmp_path, hooks, val=batches(1), test=batches(1)).train()
    for mode in ("val", "test"):
        assert _around(recorder.trace, mode) == [
            f"before_{mode}_epoch", "enter", f"before_{mode}_iter 0", f"after_{mode}_iter 0", "exit",
            f"after_{mode}_epoch", f"after_{mode}",
        ]  # fmt: skip


@pytest.mark.parametrize("mode", ["val", "test"])
@pytest.mark.parametrize("point", ["before_{}_epoch", "before_{}_iter", "after_{}_iter"])
def test_contexts_are_closed_after_an_error_and_before_anybody_is_told(tmp_path: Path, mode: str, point: str) -> None:
    recorder = Recorder()
    hooks: dict[str, Hook] = {
        "recorder": recorder,
        "context": Context(recorder.trace),
        "failing": failing(point.format(mode)),
    }
    with pytest.raises(RuntimeError):
        make_engine(tmp_path, hooks, val=batches(1), test=batches(1)).train()
    around = _around(recorder.trace, mode)
    assert around.count("enter") == around.count("exit") == 1
    assert around.index("exit") + 1 == around.index("on_exception")


# When. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "validated"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"val_interval": 2}, [4, 8, 10]),  # the end always
        ({"val_interval": 2, "val_begin": 3}, [6, 10]),
        ({"val_interval": 99}, [10]),
        ({"val_interval": None}, []),
        ({"val_interval": 3, "val_by_epoch": False}, [3, 6, 9, 10]),
        ({"val_interval": 4, "val_begin": 5, "val_by_epoch": False}, [5, 9, 10]),
        ({"max_iters": 5}, [2, 4, 5]),
    ],
)
def test_validation_is_due_at_the_interval_and_at_the_end(
    tmp_path: Path, settings: dict[str, Any], validated: list[int]
) -> None:
    seen: list[int] = []
    look = at("before_val", lambda engine: seen.append(engine.progress.iteration), nth=0)
    engine = make_engine(tmp_path, {"look": look}, val=batches(1), **{"max_epochs": 5, **settings})
    engine.train()
    assert seen == validated
    assert engine.progress.last_validation == (validated[-1] if validated else 0)


# On which weights. ---------------------------------------------------------------------------------------------------


def _weights(engine: Engine) -> dict[str, Any]:
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


@pytest.mark.parametrize("error", [False, True])
def test_the_test_runs_on_the_best_checkpoint_and_the_last_weights_are_back_afterwards(
    tmp_path: Path, error: bool
) -> None:
    seen: dict[str, dict[str, Any]] = {}
    paths: list[Path | None] = []

    def look(engine: Engine) -> None:
        seen["test"] = _weights(engine)
        paths.append(engine.evaluator.tested_checkpoint)
        if error:
            raise RuntimeError("on purpose")

    # A learning rate that diverges: the first validation stays the best.
    hooks: dict[str, Hook] = {
        "checkpoint": CheckpointHook(save_best="loss"),
        "trained": at("after_train", lambda engine: seen.update(trained=_weights(engine))),
        "look": at("before_test_iter", look),
    }
    engine = make_engine(tmp_path, hooks, val=batches(1), test=batches(1), max_epochs=3, lr=5.0)
    if error:
        with pytest.raises(RuntimeError):
            engine.train()
    else:
        engine.train()
    assert engine.best is not None
    assert engine.best.iteration == 2
    best = torch.load(engine.best.checkpoint, weights_only=True)["state_dict"]
    assert list(differences(seen["test"], best)) == []
    assert list(differences(_weights(engine), seen["trained"])) == []
    assert list(differences(best, seen["trained"])), "these are others"
    assert paths == [Path(engine.best.checkpoint)]
    assert engine.evaluator.tested_checkpoint is None


def test_a_test_on_its_own_takes_a_checkpoint(tmp_path: Path) -> None:
    saving = at("after_train_epoch", lambda engine: engine.request_checkpoint("a"))
    trained = make_engine(tmp_path, {"saving": saving}, test=batches(1), lr=0.2)
    trained.train()
    fresh = make_engine(tmp_path, test=batches(1))
    before = _weights(fresh)
    assert fresh.test(tmp_path / "checkpoints" / "a.pth") == trained.evaluator.test_metrics
    assert fresh.test() != trained.evaluator.test_metrics
    assert list(differences(_weights(fresh), before)) == []
    with pytest.raises(UserError, match="no checkpoint file"):
        fresh.test(tmp_path / "none.pth")


def test_a_checkpoint_that_does_not_fit_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.full((1, 3), 7.0)}}, tmp_path / "a.pth")
    engine = make_engine(tmp_path, test=batches(1))
    before = _weights(engine)
    with pytest.raises(UserError, match="bias") as caught:
        engine.test(tmp_path / "a.pth")
    assert caught.value.key == "test"
    assert list(differences(_weights(engine), before)) == []


class Drawing(Task):
    """Draws from each generator, in training and in evaluations."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Dropout(0.5), tiny_task().model), nn.MSELoss())

    def forward(self, batch: Any) -> dict[str, Any]:
        outputs = super().forward(batch)
        outputs["loss"] = outputs["loss"] * (torch.rand(()) + np.random.rand() + random.random())
        return outputs

    def predict(self, batch: Any) -> Any:
        return self.model(batch[0]) + torch.rand(()) + np.random.rand() + random.random()


@pytest.fixture
def _seeded() -> Iterator[None]:
    with seeded(0):
        yield


def _drawing(run_dir: Path, **options: Any) -> Engine:
    seed_everything(0)
    sets = {"a": batches(2), "b": batches(3)}
    options = {"train": batches(4), "val": sets, "test": batches(3), "max_epochs": 3, **options}
    return make_engine(run_dir, task=Drawing(), **options)


@pytest.mark.usefixtures("_seeded")
def test_training_continues_as_if_nobody_had_validated(tmp_path: Path) -> None:
    with_validation, without = _drawing(tmp_path), _drawing(tmp_path, val_interval=None)
    for engine in (with_validation, without):
        seed_everything(0)
        engine.train()
    assert list(differences(_weights(with_validation), _weights(without))) == []


@pytest.mark.usefixtures("_seeded")
def test_an_evaluation_with_random_numbers_equals_that_of_the_run(tmp_path: Path) -> None:
    engine = _drawing(tmp_path)
    engine.train()
    draws = torch.get_rng_state()
    assert engine.test() == engine.evaluator.test_metrics
    assert engine.validate() == engine.metrics
    assert torch.equal(torch.get_rng_state(), draws)
    other = _drawing(tmp_path)
    other.task.load_state_dict(engine.task.state_dict())
    assert other.test() == engine.evaluator.test_metrics
    assert other.validate() == engine.metrics
    object.__setattr__(other.run, "seed", 1)
    assert other.test() != engine.evaluator.test_metrics


@pytest.mark.usefixtures("_seeded")
def test_predictions_draw_the_same_numbers_each_time(tmp_path: Path) -> None:
    engine = _drawing(tmp_path)
    expected = list(engine.predict())
    draws = torch.get_rng_state()
    torch.testing.assert_close(list(engine.predict()), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), draws)
    first, second = (torch.cat(list(engine.predict(loader))) for loader in engine.loaders.val.values())
    assert not torch.equal(first[:4], second[:4])


class LosingItsLoss(Task):
    """The loss of some validations is NaN."""

    lost: tuple[int, ...] = (2,)

    def evaluate(self, batch: Any) -> dict[str, Any]:
        result = self.forward(batch)
        loss = result["loss"] * (math.nan if self.engine.progress.epoch in self.lost else 1.0)
        self.update_metrics(loss, result["outputs"], result["targets"], self.num_samples(batch))
        return {**result, "loss": loss}


def test_the_best_validation_is_that_of_the_first_metric_in_the_direction_it_declares(tmp_path: Path) -> None:
    for direction, best in ((True, (0.75, 2)), (False, (0.25, 3)), (None, None)):
        metrics = {"mine": Scripted([0.5, 0.75, 0.25, 0.75], direction)}
        engine = engine_of(tmp_path, {}, metrics=metrics, max_epochs=4)
        engine.train()
        assert engine.best == (None if best is None else Best("mine", best[0], best[1] * 4))


def test_a_resumed_run_knows_its_best_validation_as_long_as_the_objective_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without `save_best`. An earlier validation was not compared by another metric."""
    caplog.set_level(logging.INFO)

    def best(values: list[float], save_best: str | None = None, **settings: Any) -> Best | None:
        metrics = {"acc": Scripted(values), "other": Scripted([0.5] * 4, True)}
        hooks = {"checkpoint": CheckpointHook(save_best=save_best)}
        engine_of(tmp_path, hooks, metrics=metrics, **settings).train()
        result = Result.read(tmp_path)
        return result and result.best

    assert best([0.5, 0.75, 0.25], max_epochs=3) == Best("acc", 0.75, 8)
    resume = tmp_path / "checkpoints" / "epoch_3.pth"
    assert best([0.25, 0.5], max_epochs=4, resume=resume) == Best("acc", 0.75, 8)
    found = best([0.25, 0.5], "other", max_epochs=4, resume=resume)
    assert found is not None
    assert (found.metric, found.iteration) == ("other", 12)
    assert "the objective was acc and is other now" in caplog.text


@pytest.mark.parametrize("allowed", [False, True])
def test_a_validation_whose_loss_is_nan_is_never_the_best_without_a_word(
    allowed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All that compare validations by another metric: best checkpoints, early stopping, a plateau, the objective."""
    task = LosingItsLoss(model(), nn.functional.mse_loss, {"score": Scripted([0.5, 0.9, 0.6, 0.7], True)})
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    schedule = Schedule("plateau", Plateau(mode="max", patience=0, factor=0.5), optimizer, monitor="score")
    stopping = EarlyStoppingHook(monitor="score", check_finite=False)
    hooks = {"runtime_info": RuntimeInfoHook(), "param_scheduler": ParamSchedulerHook(), "early_stopping": stopping}
    hooks["checkpoint"] = CheckpointHook(save_best=["score", "loss"])
    options: dict[str, Any] = {"schedules": {"plateau": schedule}, "optimizer": optimizer, "allow_nan": allowed}
    result = engine_of(tmp_path, hooks, task=task, max_epochs=4, **options).train()
    assert result.best is not None
    assert (result.best.value, result.best.iteration) == ((0.9, 8) if allowed else (0.7, 16))
    assert result.objective is not None
    assert result.objective.value == result.best.value
    assert stopping.last_improvement == result.best.value
    assert optimizer.param_groups[0]["lr"] == (0.025 if allowed else 0.05), "two without an improvement, or one"
    assert result.val_metrics["score"] == 0.7
    told = [line for line in caplog.messages if "validation loss is nan" in line]
    assert len(told) == (0 if allowed else 1)
    assert allowed or "iteration 8, so score counts as nan" in told[0]


@pytest.mark.parametrize(("lost", "expected"), [((1, 2, 3), math.nan), ((3,), 0.9), ((1, 2), 0.6)])
def test_a_validation_whose_loss_is_nan_is_not_the_objective(
    lost: tuple[int, ...], expected: float, tmp_path: Path
) -> None:
    task = LosingItsLoss(model(), nn.functional.mse_loss, {"score": Scripted([0.5, 0.9, 0.6], True)})
    task.lost = lost
    result = engine_of(tmp_path, {"runtime_info": RuntimeInfoHook()}, task=task).train()
    assert result.objective is not None
    assert result.objective.value == pytest.approx(expected, nan_ok=True)
    assert result.val_metrics["score"] == 0.6


def test_only_the_metrics_of_its_own_data_set_count_as_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = [(inputs, targets * math.nan) for inputs, targets in batches(1)]
    task = Task(tiny_task().model, nn.MSELoss(), {"score": Scripted([0.5, 0.9], True)})
    engine = make_engine(tmp_path, task=task, val={"good": batches(1), "bad": nothing}, sanity_val_steps=0)
    engine.train()
    assert engine.metrics["bad/score"] == 0.9
    assert math.isnan(engine.validations.comparable["bad/score"])
    assert engine.validations.comparable["good/score"] == 0.5
    assert "so bad/score counts as nan" in caplog.text


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
    engine = make_engine(
        tmp_path,
        {"recorder": recorder, "sets": sets},
        val={"a": a, "b": b},
        test={"c": c},
        task=task,
        limit_val_batches=2,
        sanity_val_steps=0,
    )
    assert engine.validations.metric_names == ("a/loss", "b/loss")
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
    engine = make_engine(
        Path(run_dir),
        hooks,
        train=build_loader(dataset(), **{**part, "shuffle": True}),
        val={"a": build_loader(dataset(5), **part), "b": build_loader(dataset(9), **part)},
        test={"c": build_loader(dataset(7), **part), "d": build_loader(dataset(6), **part)},
        task=task,
        lr=0.1,
        distributed=distributed,
        max_epochs=3,
        accumulate=2,
        resume=None if resume is None else Path(resume),
        resume_strict=False,
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
    return make_engine(
        run_dir, hooks, train=train, val={"dark": dark, "light": light}, test={"dark": dark}, task=task, lr=0.1
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
    engine = make_engine(tmp_path, train=batches(1), val={name: batches(1)}, task=task)
    engine.train()
    assert f"{name}/class_loss" in engine.metrics
    assert engine.validations.direction(f"{name}/class_loss") is False
