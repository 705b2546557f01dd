"""TensorBoardLoggerHook: the run in event files, and histograms of weights and gradients. See tests/tracking, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks.grad_clip import GradClipHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.hooks.trackers import TensorBoardLoggerHook
from hydraloop.tasks import Regression
from hydraloop.tasks.task import Task
from tests.helpers import at, batches, failing, make_engine
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks

# The hook. -----------------------------------------------------------------------------------------------------------


def engine_with(run_dir: Path, hook: Hook, *, more: dict[str, Hook] | None = None, **settings: Any) -> Engine:
    """Four iterations an epoch."""
    run_dir.mkdir(exist_ok=True)
    hooks = {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=2), **(more or {}), "tensorboard": hook}
    return make_engine(run_dir, hooks, **{"train": batches(4), "val": batches(2), **settings})


def announced(run_dir: Path) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["mode"] == "train" for record in records if "objects" in record)
    return [(record["iteration"], record["objects"][0]["path"]) for record in records if "objects" in record]


def counts(run_dir: Path, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "media" / "train" / f"parameters_iter_{iteration}.json").read_text())
    return found


def read(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def test_a_run_is_in_its_event_files(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, TensorBoardLoggerHook(histograms=3), max_epochs=2)
    engine.train()
    found = read(tmp_path)
    steps = {tag: [event.step for event in found.Scalars(tag)] for tag in ("train/loss", "val/loss")}
    assert steps == {"train/loss": [2, 4, 6, 8], "val/loss": [4, 8]}
    assert announced(tmp_path) == [(n, f"media/train/parameters_iter_{n}.json") for n in (3, 6)]
    tags = {f"{kind}/{name}" for kind in ("weights", "gradients") for name in ("weight", "bias")}
    assert set(found.Tags()["histograms"]) == tags
    events = found.Histograms("gradients/weight")
    assert [event.step for event in events] == [3, 6]
    assert events[1].histogram_value.max == counts(tmp_path, 6)["gradients/weight"]["max"]
    assert "_hparams_/session_end_info" in found.PluginTagToContent("hparams")
    summary = engine.messages.read("tracked")["tensorboard"]
    lines = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert summary == f"{lines} of {lines} records sent, tensorboard --logdir {tmp_path}/tensorboard"


def test_an_interval_sends_every_nth_iteration_and_all_evaluations(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, TensorBoardLoggerHook(interval=6, histograms=4), max_epochs=3)
    engine.train()
    found = read(tmp_path)
    steps = {tag: [event.step for event in found.Scalars(tag)] for tag in ("train/loss", "val/loss")}
    assert steps == {"train/loss": [6, 12], "val/loss": [4, 8, 12]}
    assert [event.step for event in found.Histograms("gradients/weight")] == [4, 8, 12], "they have their own interval"
    told = engine.messages.read("tracked")["tensorboard"]
    said = "12 of 12 records sent, without those that interval=6 leaves out, "
    assert told == f"{said}tensorboard --logdir {tmp_path}/tensorboard"


class Counting(TensorBoardLoggerHook):
    """Without the follower, to test the training process."""

    def before_run(self, engine: Engine) -> None:
        """Start nothing."""

    def _begin(self, engine: Engine) -> None:
        self._begun = True


def test_gradients_and_the_weights_they_were_taken_at(tmp_path: Path) -> None:
    seen: dict[str, Tensor] = {}

    def look(engine: Engine) -> None:
        seen.update({name: value.detach().clone() for name, value in engine.model.named_parameters()})
        for name, value in engine.model.named_parameters():
            assert value.grad is not None
            seen[f"grad {name}"] = value.grad.clone()

    engine_with(tmp_path, Counting(histograms=4), more={"look": at("before_optimizer_step", look, nth=4)}).train()
    found = counts(tmp_path, 4)
    assert list(found) == ["weights/weight", "gradients/weight", "weights/bias", "gradients/bias"]
    for name, tensor in (("weights/weight", seen["weight"]), ("gradients/weight", seen["grad weight"])):
        assert (found[name]["min"], found[name]["max"]) == (tensor.min().item(), tensor.max().item())
        assert found[name]["num"] == 3


def test_gradients_are_those_after_grad_clip(tmp_path: Path) -> None:
    engine_with(tmp_path, Counting(histograms=4), more={"grad_clip": GradClipHook(clip_value=1e-3)}).train()
    found = counts(tmp_path, 4)
    assert found["gradients/weight"]["max"] <= 1.001e-3
    assert found["weights/weight"]["max"] > 1e-3


def test_what_is_due_inside_a_window_waits_for_its_step(tmp_path: Path) -> None:
    engine_with(tmp_path, Counting(histograms=3), max_epochs=3, accumulate=2).train()
    assert [iteration for iteration, _ in announced(tmp_path)] == [4, 6, 10, 12]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    stopping = at("after_train_iter", lambda engine: engine.request_stop("told to"), nth=4)
    saving = at("after_train_iter", lambda engine: engine.request_checkpoint("it"), nth=4)
    engine_with(tmp_path / "a", Counting(histograms=3), more={"s": saving, "t": stopping}, max_epochs=3).train()
    assert [iteration for iteration, _ in announced(tmp_path / "a")] == [3]
    saved = tmp_path / "a" / "checkpoints" / "it.pth"
    engine_with(tmp_path / "b", Counting(histograms=3), max_epochs=2, resume=saved).train()
    assert [iteration for iteration, _ in announced(tmp_path / "b")] == [6], "and not again at 5"


def test_parameters_without_gradients_and_frozen_ones(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model[0].requires_grad_(requires_grad=False)
    engine_with(tmp_path, Counting(histograms=4), task=Task(model, nn.MSELoss())).train()
    assert set(counts(tmp_path, 4)) == {"weights/unused", "weights/1.weight", "gradients/1.weight", "weights/1.bias",
                                        "gradients/1.bias"}  # fmt: skip


def test_a_step_that_failed_announces_nothing_later(tmp_path: Path) -> None:
    hook = Counting(histograms=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine_with(tmp_path, hook, more={"fails": failing("before_optimizer_step", priority=100)}).train()
    engine_with(tmp_path / "again", hook, train=batches(1), task=None).train()
    assert [iteration for iteration, _ in announced(tmp_path / "again")] == [1]


# TensorBoardLoggerHook on several ranks: rank 0's shard is counted, without waiting for other ranks. ------------------


def train(distributed: Distributed, run_dir: str) -> None:
    """Two steps of a model of 15 + 5 + 5 + 1 parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    distributed.prepare(model)
    engine_of(
        Path(run_dir),
        {"tensorboard": Counting(histograms=2)},
        task=Regression(model, nn.MSELoss()),
        loaders=Loaders([(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]),
        distributed=distributed,
        max_epochs=1,
    ).train()


@pytest.mark.parametrize(("strategy", "rows"), [("ddp", 5), ("fsdp2", 3)])
def test_rank_0_counts_what_it_has(tmp_path: Path, strategy: str, rows: int) -> None:
    on_ranks(2, train, str(tmp_path), strategy=strategy)
    (path,) = (tmp_path / "media" / "train").iterdir()
    found = json.loads(path.read_text())
    assert path.name == "parameters_iter_2.json"
    for kind in ("weights", "gradients"):
        counted = {name: facts["num"] for name, facts in found.items() if name.startswith(kind)}
        assert counted == {
            f"{kind}/0.weight": 3 * rows,
            f"{kind}/0.bias": rows,
            f"{kind}/2.weight": 5,
            f"{kind}/2.bias": 1,
        }
