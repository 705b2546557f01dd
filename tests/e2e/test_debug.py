"""The options of the group `debug` do what the comments in their files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.composed import composer, job
from tests.e2e.projects import Done, Project, Run

MODELS = """
import torch
from torch import nn

class NaNGradient(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, images):
        logits = super().forward(images.flatten(1))
        return logits + (logits * 0).sqrt()  # the gradient of sqrt at 0 is infinite, and 0 times that is NaN

class InfiniteLoss(nn.CrossEntropyLoss):
    def forward(self, logits, classes):
        return super().forward(logits, classes) + torch.inf
"""
OPTIONS = {
    "fast": ["debug=fast", "hooks=[ema]"],
    "fast in iterations": ["debug=fast", "experiment=char_lm", "engine.accumulate=2"],
    "nan": ["debug=nan", "task.model=null", "+task.model._target_=models.NaNGradient"],
    "inf": ["debug=nan", "task.loss=null", "+task.loss._target_=models.InfiniteLoss"],
    "profile": ["debug=profile"],
    "overfit": ["debug=overfit", "experiment=diabetes", "hooks=[ema]", "precision=bf16"],
    "overfit in iterations": [
        "debug=overfit",
        "experiment=char_lm",
        "task.model.layers=1",
        "data.loader.batch_size=2",
        "engine.accumulate=2",
    ],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Run]]:
    """The runs of OPTIONS, in one process."""
    project = Project.make(tmp_path_factory.mktemp("debug") / "project")
    project.write("models.py", MODELS)
    runs = project.many([[*line, f"hydra.run.dir='runs/{name}'"] for name, line in OPTIONS.items()])
    return {name: (one, Run(project.path / "runs" / name)) for name, one in zip(OPTIONS, runs, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast", "fast in iterations"])
def test_fast_goes_through_every_part_of_a_run(name: str, done: dict[str, tuple[Done, Run]]) -> None:
    shown, run = done[name]
    assert shown.code == 0, shown.text
    assert [record["iteration"] for record in run.records if record["mode"] == "train"] == [1, 2, 3]
    assert {record["mode"] for record in run.records} == {"train", "val", "test"}
    assert len(run.checkpoints) == 1


@pytest.mark.slow
def test_nan_names_the_operation_and_its_line(done: dict[str, tuple[Done, Run]]) -> None:
    shown, run = done["nan"]
    assert shown.code == 1
    assert "Function 'MulBackward0' returned nan values" in str(run.result["error"])
    assert "(logits * 0).sqrt()" in shown.text, "the line of the forward pass"
    assert run.result["progress"]["iteration"] == 0


@pytest.mark.slow
def test_nan_ends_a_run_at_the_first_infinite_loss(done: dict[str, tuple[Done, Run]]) -> None:
    shown, run = done["inf"]
    assert shown.code == 1
    assert "inf" in str(run.result["error"])
    assert run.result["progress"]["iteration"] == 0


@pytest.mark.slow
def test_profile_writes_a_trace_and_a_table(done: dict[str, tuple[Done, Run]]) -> None:
    shown, run = done["profile"]
    assert shown.code == 0, shown.text
    assert len(list((run.path / "tf_tracing_logs").iterdir())) == 1
    assert "ProfilerStep*" in run.log
    assert run.result["progress"]["iteration"] == 20
    assert {record["mode"] for record in run.records} == {"train"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overfit", "overfit in iterations"])
def test_overfit_learns_one_batch_by_heart(name: str, done: dict[str, tuple[Done, Run]]) -> None:
    shown, run = done[name]
    assert shown.code == 0, shown.text
    first, *_ = [record["loss"] for record in run.records if record["mode"] == "train"]
    validations = [record["loss"] for record in run.records if record["mode"] == "val"]
    assert len(validations) == 5
    assert validations[-1] < first / 30
    assert run.result["test_metrics"] in (None, {})
    assert run.checkpoints == ["iter_500.pth" if "iterations" in name else "epoch_500.pth"]


def test_hooks_of_debug_are_added_to_those_that_are_selected() -> None:
    with composer() as opened:
        cfg = job(["debug='nan'", "hooks=[ema]", "hooks.anomaly_detection.check_nan=false"], opened)
    assert list(cfg.hooks) == ["ema", "anomaly_detection", "check_invalid_loss"]
    assert (cfg.hooks.anomaly_detection.check_nan, cfg.hooks.check_invalid_loss.interval) == (False, 1)


def test_every_file_begins_with_what_its_option_does() -> None:
    for file in (Path(__file__).parents[2] / "conf" / "debug").glob("*.yaml"):
        first, second, *_ = file.read_text(encoding="utf-8").splitlines()
        assert (first, second.split(":")[0]) == ("# @package _global_", f"# debug={file.stem}")
