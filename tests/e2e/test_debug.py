"""The options of the group `debug` do what their files say. Without them, a run with a NaN loss fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.config.composed import composer, job
from tests.e2e.projects import Done, Project
from tests.marks import nightly, slow

MODELS = """
import torch
from torch import nn

class NaNGradient(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, images):
        logits = super().forward(images.flatten(1))
        return logits + (logits * 0).sqrt()  # the gradient of sqrt at 0 is infinite, and 0 times that is NaN
"""
OPTIONS = {
    "fast": ["debug=fast", "hooks=[ema]"],
    "fast in iterations": ["debug=fast", "experiment=char_lm", "engine.accumulate=2"],
    "nonfinite": ["debug=nonfinite", "task.model=null", "+task.model._target_=models.NaNGradient"],
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


def trained(project: Project, name: str) -> Done:
    """Run one of OPTIONS."""
    project.write("models.py", MODELS)
    return project.train(*OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast", "fast in iterations"])
def test_fast_goes_through_every_part_of_a_run(name: str, project: Project) -> None:
    shown, run = trained(project, name), project.run
    assert shown.code == 0, shown.text
    assert [record["iteration"] for record in run.records if record["mode"] == "train"] == [1, 2, 3]
    assert {record["mode"] for record in run.records} == {"train", "val", "test"}
    assert len(run.checkpoints) == 1


@pytest.mark.slow
def test_nan_names_the_operation_and_its_line(project: Project) -> None:
    shown, run = trained(project, "nonfinite"), project.run
    assert shown.code == 1
    assert "Function 'MulBackward0' returned nan values" in str(run.result["error"])
    assert "(logits * 0).sqrt()" in shown.text, "the line of the forward pass"
    assert run.result["progress"]["iteration"] == 0


@pytest.mark.slow
def test_profile_writes_a_trace_and_a_table(project: Project) -> None:
    shown, run = trained(project, "profile"), project.run
    assert shown.code == 0, shown.text
    assert len(list((run.path / "tf_tracing_logs").iterdir())) == 1
    assert "ProfilerStep*" in run.log
    assert run.result["progress"]["iteration"] == 20
    assert {record["mode"] for record in run.records} == {"train"}


@pytest.mark.parametrize("name", [slow("overfit"), nightly("overfit in iterations")])
def test_overfit_learns_one_batch_by_heart(name: str, project: Project) -> None:
    shown, run = trained(project, name), project.run
    assert shown.code == 0, shown.text
    first, *_ = [record["loss"] for record in run.records if record["mode"] == "train"]
    validations = [record["loss"] for record in run.records if record["mode"] == "val"]
    assert len(validations) == 5
    assert validations[-1] < first / 30
    assert run.result["test_metrics"] in (None, {})
    assert run.checkpoints == ["iter_500.pth" if "iterations" in name else "epoch_500.pth"]


def test_hooks_of_debug_are_added_to_those_that_are_selected() -> None:
    with composer() as opened:
        cfg = job(["debug=nonfinite", "hooks=[ema]", "hooks.anomaly_detection.check_nan=false"], opened)
    assert list(cfg.hooks) == ["ema", "anomaly_detection", "check_invalid_loss"]
    assert (cfg.hooks.anomaly_detection.check_nan, cfg.hooks.check_invalid_loss.interval) == (False, 1)


def test_every_file_begins_with_what_its_option_does() -> None:
    for file in (Path(__file__).parents[2] / "conf" / "debug").glob("*.yaml"):
        first, second, *_ = file.read_text(encoding="utf-8").splitlines()
        assert (first, second.split(":")[0]) == ("# @package _global_", f"# debug={file.stem}")


# Without `debug=nonfinite`. ------------------------------------------------------------------------------------------

DIVERGES = ("optimizer.lr=1e30", "~default_hooks.grad_clip")
SHORT = ("engine.max_epochs=1", "engine.device=cpu", "data.loader.num_workers=0")


@pytest.mark.parametrize("ranks", [(), nightly(("distributed.nproc_per_node=2",))], ids=["alone", "ranks"])
def test_the_run_fails_and_says_what_to_do(project: Project, ranks: tuple[str, ...]) -> None:
    done = project.train(*DIVERGES, *SHORT, "default_hooks.checkpoint.save_best=loss", *ranks)
    assert done.code == 1, done.text
    assert len(re.findall(r"engine\.allow_nan: the loss is (nan|inf) at iteration [1-9]\n", done.text)) == 1, done.text
    assert "hooks=anomaly_detection" in done.text
    assert "Traceback" not in done.text
    result = project.run.result
    assert result["status"] == "failed"
    assert result["objective"] == {"metric": "loss", "rule": "less", "value": "nan", "iteration": 10}
    assert project.run.checkpoints == []


def test_a_sweep_does_not_repeat_such_a_job(project: Project) -> None:
    line = ("-m", "optimizer.lr=1e30,1e-3", DIVERGES[1], *SHORT, "sweep.max_retries=2", "hydra.sweep.dir=sweep")
    done = project.train(*line)
    assert done.code == 1, done.text
    states = [json.loads((project.path / "sweep" / number / "job.json").read_text()) for number in "01"]
    assert [(state["state"], state["attempts"]) for state in states] == [("failed", 1), ("finished", 1)]
    assert states[0]["value"] == "nan"
