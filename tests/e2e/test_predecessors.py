"""The examples of MMEngine's, MMClassification's, MMDetection's and iMIX's documents, translated, on the digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.projects import Done, Project, Run

pytestmark = pytest.mark.slow  # twenty runs

TRANSLATED = '''
import logging
import torch
from hydraloop import Hook

log = logging.getLogger(__name__)


class CheckInvalidLossHook(Hook):
    """MMEngine's example, and MMDetection's with MMCV's helper."""

    priority = "ABOVE_NORMAL"

    def __init__(self, interval=50):
        self.interval = interval

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if self.every_n_train_iters(engine, self.interval):
            assert torch.isfinite(outputs["loss"]), "loss become infinite or NaN!"
            log.info("checked after %d", engine.progress.iteration)
        assert self.every_n_iters(engine, self.interval) == self.every_n_train_iters(engine, self.interval)


class MyHook(Hook):
    """MMClassification's example: the six general points."""

    def __init__(self, a, b):
        self.calls = [f"{a} {b}"]

    def before_run(self, engine):
        self.calls.append("before_run")

    def after_run(self, engine):
        self.calls.append("after_run")
        log.info("calls: %s", ", ".join(dict.fromkeys(self.calls)))

    def before_epoch(self, engine, mode):
        self.calls.append(f"before_epoch {mode}")

    def after_epoch(self, engine, mode):
        self.calls.append(f"after_epoch {mode}")

    def before_iter(self, engine, batch_idx, batch, mode):
        self.calls.append(f"before_iter {mode}")

    def after_iter(self, engine, batch_idx, batch, outputs, mode):
        self.calls.append(f"after_iter {mode}")


class EMAIterHook(Hook):
    """iMIX's example; the trainer is an argument, and hooks reach each other through it."""

    def before_train(self, engine):
        self.average = {name: value.clone() for name, value in engine.model.named_parameters()}

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(engine.model.parameters()), 0.5)

    def after_train(self, engine):
        log.info("%d updates, ema made %d", engine.progress.iteration, engine.hooks["ema"].updates)


class FactsHook(Hook):
    """Reads MMEngine's message hub only."""

    priority = "LOWEST"

    def after_val_epoch(self, engine, metrics):
        facts = {name: engine.messages.read(name) for name in ("epoch", "iter", "max_epochs", "max_iters", "lr")}
        log.info("facts: %s", facts)
        log.info("momentum %s, losses %s", engine.messages.read("momentum"), list(engine.messages.read("losses")))
        assert engine.messages.read("metrics") == metrics
'''


LINES = {
    "checked": "+hooks.mine._target_=translated.CheckInvalidLossHook +hooks.mine.interval=8",
    "general": "+hooks.mine._target_=translated.MyHook +hooks.mine.a=1 +hooks.mine.b=two",
    "reach": "hooks=[ema] +hooks.mine._target_=translated.EMAIterHook",
    "facts": "+hooks.mine._target_=translated.FactsHook",
    "number": "+hooks.mine._target_=translated.CheckInvalidLossHook +hooks.mine.priority=45",
    "higher": "hooks=[ema] hooks.ema.priority=HIGHER",
    "lower": "hooks=[profiler] hooks.profiler.priority=LOWER",
    "tied": "hooks=[ema] hooks.ema.priority=LOW",
    "ema": "hooks=[ema] hooks.ema.interval=10 hooks.ema.priority=HIGH",
    "no checkpoint": "default_hooks.checkpoint=null",
    "workflow": "engine.val_interval=2 engine.max_epochs=4",
    "start": "engine.val_begin=3 engine.max_epochs=4",
    "start by iteration": "engine.val_by_epoch=false engine.val_interval=8 engine.val_begin=5",
    "log config": "default_hooks.logger.interval=5 engine.test=false",
    "evaluation": "+task.metrics.top3._target_=torchmetrics.Accuracy +task.metrics.top3.task=multiclass "
    "+task.metrics.top3.num_classes=10 +task.metrics.top3.top_k=3 default_hooks.checkpoint.save_best=top3 "
    "engine.val_begin=2 engine.max_epochs=2",
    "clipped": "default_hooks.grad_clip.max_norm=0.001",
    "not clipped": "",
    "fp16": "precision=fp16 default_hooks.grad_clip.max_norm=0.001 engine.max_iters=3 default_hooks.logger.interval=1",
    "fp32": "default_hooks.grad_clip.max_norm=0.001 engine.max_iters=3 default_hooks.logger.interval=1",
}
"""What is typed, by name."""


class Finished:
    """The outcomes of the lines above, by name."""

    def __init__(self, project: Project) -> None:
        project.write("translated.py", TRANSLATED)
        lines = [
            ["engine.max_epochs=1", "engine.verbose=true", f"hydra.run.dir='runs/{name}'", *line.split()]
            for name, line in LINES.items()
        ]
        self.done: dict[str, Done] = dict(zip(LINES, project.many(lines), strict=True))
        self.runs = {name: Run(project.path / "runs" / name) for name in LINES}
        for name, done in self.done.items():
            assert done.code == 0, f"{name}: {done.text}"

    def order(self, name: str, point: str) -> list[str]:
        """The printed order at a mount point: `name (priority)`."""
        (line,) = (line for line in self.done[name].out.splitlines() if line.startswith(f"  {point} "))
        return line.split(maxsplit=1)[1].split(", ")

    def evaluated(self, name: str, mode: str = "val") -> list[dict[str, Any]]:
        """The records of evaluations."""
        return [record for record in self.runs[name].records if record["mode"] == mode]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All lines, one after the other."""
    return Finished(Project.make(tmp_path_factory.mktemp("predecessors") / "project"))


# Custom hooks. ------------------------------------------------------------------------------------------------------


def test_a_hook_with_mmengines_helper_is_due_as_there(finished: Finished) -> None:
    checked = [line for line in finished.done["checked"].out.splitlines() if line.startswith("checked after")]
    assert checked == ["checked after 8", "checked after 16"]
    assert "mine (40)" in finished.order("checked", "after_train_iter"), "the priority of its class"
    assert "mine (45)" in finished.order("number", "after_train_iter"), "the priority of the config"


def test_the_general_points_are_called_in_training_validation_and_test(finished: Finished) -> None:
    points = ("before_epoch", "before_iter", "after_iter", "after_epoch")
    calls = [f"{point} {mode}" for mode in ("train", "val", "test") for point in points]
    assert f"calls: 1 two, before_run, {', '.join(calls)}, after_run" in finished.done["general"].out


def test_hooks_reach_each_other_through_the_engine(finished: Finished) -> None:
    assert "20 updates, ema made 20" in finished.done["reach"].out


def test_the_message_hub_has_runtime_infos_facts(finished: Finished) -> None:
    out = finished.done["facts"].out
    assert "facts: {'epoch': 1, 'iter': 20, 'max_epochs': 1, 'max_iters': 20, 'lr': " in out
    assert "momentum 0.9, losses ['loss']" in out


# Order. --------------------------------------------------------------------------------------------------------------


def test_imixs_names_of_priorities(finished: Finished) -> None:
    assert finished.order("higher", "after_train_iter")[:2] == ["runtime_info (10)", "ema (10)"]
    assert finished.order("lower", "after_train")[1:3] == ["checkpoint (90)", "profiler (90)"]


def test_a_custom_hook_runs_after_the_default_hook_of_its_level(finished: Finished) -> None:
    order = finished.order("tied", "after_train_epoch")
    assert order.index("param_scheduler (70)") + 1 == order.index("ema (70)")
    assert "ema (30)" in finished.order("ema", "after_train_iter")


def test_a_default_hook_can_be_removed(finished: Finished) -> None:
    assert "checkpoint (" not in finished.done["no checkpoint"].out
    assert finished.runs["no checkpoint"].checkpoints == []


# Validation, records, metrics. ---------------------------------------------------------------------------------------


def test_the_val_workflow_is_an_interval_and_reports_the_loss(finished: Finished) -> None:
    records = finished.evaluated("workflow")
    assert [record["epoch"] for record in records] == [2, 4]
    assert records[0]["loss"] > records[1]["loss"] > 0


def test_evaluation_can_start_later_by_epoch_or_iteration(finished: Finished) -> None:
    assert [record["epoch"] for record in finished.evaluated("start")] == [3, 4]
    assert [record["iteration"] for record in finished.evaluated("start by iteration")] == [5, 13, 20]


def test_log_config_is_the_loggers_interval(finished: Finished) -> None:
    assert [record["iteration"] for record in finished.evaluated("log config", "train")] == [5, 10, 15, 20]


def test_evaluation_with_topk_of_torchmetrics_and_the_best_of_it(finished: Finished) -> None:
    (record,) = finished.evaluated("evaluation")
    assert record["epoch"] == 2
    assert record["accuracy"] < record["top3"] <= 1
    best = finished.runs["evaluation"].result["best"]
    assert (best["metric"], best["value"]) == ("top3", record["top3"])
    assert "best_top3_epoch_2.pth" in finished.runs["evaluation"].checkpoints
    (tested,) = finished.evaluated("evaluation", "test")
    assert {"accuracy", "top3", "loss"} <= set(tested)


# Clipping and 16 bits. -----------------------------------------------------------------------------------------------


def test_the_record_has_the_norm_before_clipping(finished: Finished) -> None:
    clipped, plain = (finished.evaluated(name, "train")[-1] for name in ("clipped", "not clipped"))
    assert clipped["grad_norm"] > 0.5
    assert "grad_norm" not in plain
    assert clipped["loss"] != plain["loss"]


def test_16_bits_clip_and_record_unscaled_gradients(finished: Finished) -> None:
    norms = {name: [record["grad_norm"] for record in finished.evaluated(name, "train")] for name in ("fp16", "fp32")}
    assert len(norms["fp16"]) == 3
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05), "without the scale of 65536"


# Weights. ------------------------------------------------------------------------------------------------------------


def _losses(project: Project, *lines: str) -> list[float]:
    """The loss of the first iteration of each line."""
    done = project.many(
        [
            ["engine.max_iters=1", "default_hooks.logger.interval=1", f"hydra.run.dir=runs/{number}", *line.split()]
            for number, line in enumerate(lines)
        ]
    )
    assert [one.code for one in done] == [0] * len(lines), [one.text for one in done]
    return [float(Run(project.path / f"runs/{number}").records[0]["loss"]) for number in range(len(lines))]


def test_load_from_and_pretrained_with_a_prefix(project: Project) -> None:
    assert project.train("engine.max_epochs=1", "engine.test=false", "hydra.run.dir=runs/first").code == 0
    first = Path(project.path, "runs/first/checkpoints/epoch_1.pth")
    state = torch.load(first, weights_only=True)["state_dict"]
    # As MMClassification saves an ImageClassifier: the network is under `backbone.`, next to other entries.
    detector = {**{f"backbone.{name}": value for name, value in state.items()}, "neck.weight": torch.ones(3)}
    torch.save({"meta": {"epoch": 3}, "state_dict": detector}, project.path / "detector.pth")
    parts = {name: value for name, value in state.items() if name.startswith("features.")}
    torch.save({f"backbone.{name}": value for name, value in parts.items()}, project.path / "features.pth")
    new, loaded, prefixed, undotted, part = _losses(
        project,
        "",
        f"load_from={first}",
        "init.checkpoint=detector.pth init.prefix=backbone.",
        "init.checkpoint=detector.pth init.prefix=backbone",
        "init.checkpoint=features.pth init.prefix=backbone.",
    )
    assert loaded == prefixed == undotted
    assert loaded < part < new, "only a part of the network was initialised"
