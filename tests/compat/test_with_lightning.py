"""Real callbacks of Lightning 2.6.6 under LightningCallback; the runs are in with_lightning.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compat.packages import environment, outcomes_of
from tests.e2e.projects import Project

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return outcomes_of("with_lightning", "lightning", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("case", range(4), ids=["default", "validate_every_2", "accumulate_3", "validate_within"])
def test_a_callback_sees_the_same_as_in_lightnings_own_trainer(outcomes: Mapping[str, Any], case: int) -> None:
    """The order of its methods, epoch, step, stage and mode, at every method of a run."""
    traces = outcomes["traces"][case]
    assert len(traces["theirs"]) > 90
    assert traces["here"] == traces["theirs"]


@pytest.mark.parametrize("case", range(2), ids=["on_train_epoch_end", "on_validation_end"])
def test_early_stopping_stops_where_it_does_in_lightning(outcomes: Mapping[str, Any], case: int) -> None:
    found = outcomes["early_stopping"][case]
    assert found["here"] == found["theirs"]
    assert found["status"] == "stopped"
    assert found["reason"].startswith("EarlyStopping set trainer.should_stop in on_")


def test_state_is_resumed_before_training(outcomes: Mapping[str, Any]) -> None:
    """The checkpoint of an epoch is written before its validation; a resumed run first runs the missed validation."""
    found = outcomes["resumed"]
    assert found["seen"] == [0, 0.5, 2]
    assert (found["waited"], found["best"]) == (3, 0.5)


def test_timer(outcomes: Mapping[str, Any]) -> None:
    by_step, by_epoch = outcomes["timer"]
    assert by_step["reason"] == "Timer set trainer.should_stop in on_train_batch_end"
    assert by_epoch["reason"] == "Timer set trainer.should_stop in on_train_epoch_end"
    assert (by_epoch["status"], by_epoch["rest"]) == ("stopped", 0)


def test_lambda_callback_and_what_it_logs(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["lambdas"]["seen"] == [[["loss"], [4, 2], True]]
    assert outcomes["lambdas"]["record"] == {"norm": 1.5, "twice": 3.0, "epoch": 1, "h0/epoch": 0.0}
    assert outcomes["lambdas"]["logged"] == pytest.approx(1000)


def test_finetuning(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["finetuning"] == [[False, False], [True, True]]


def test_finetuning_is_resumed_only_before_it_unfreezes(outcomes: Mapping[str, Any]) -> None:
    found = outcomes["finetuning_resumed"]
    assert found["groups"] == [2, 2]
    assert found["same"]
    assert "the optimizer has 2 parameter groups, but it starts with 1" in found["refused"]
    assert "after AddsGroup has unfrozen" in found["refused"]


def test_spike_detection(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["spikes"] == "TrainingSpikeException"


def test_the_others_of_lightnings_own_callbacks_are_refused(outcomes: Mapping[str, Any]) -> None:
    messages, known = outcomes["refused"]["messages"], outcomes["refused"]["known"]
    carried = {name for name, message in messages.items() if message == "nothing was refused"}
    assert carried == {"BackboneFinetuning", "BaseFinetuning", "EarlyStopping", "SpikeDetection", "Timer"}
    for name in known:
        assert f"lightning's {name} is not supported" in messages[name]
    assert "ProgressBar, which TQDMProgressBar is derived from" in messages["TQDMProgressBar"]
    assert "on_predict_batch_end, on_predict_epoch_end" in messages["BasePredictionWriter"]


def test_what_has_no_counterpart_is_named(outcomes: Mapping[str, Any]) -> None:
    found = outcomes["unmapped"]
    assert "trainer.fit_loop has no counterpart in hydraloop (used by Looks in on_train_batch_start)" in found["used"]
    assert "has on_predict_start, on_before_zero_grad, for which hydraloop has no mount point" in found["predicts"]
    assert 1.0 in found["logs"]
    assert found["ignored"] == 1


def test_a_file_of_lightning_is_loaded(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["weights"]["same"]
    assert outcomes["weights"]["objects"] > 0, "it contains more than tensors"


def test_from_the_command_line(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write(
        "train.py", 'import hydraloop\n\nif __name__ == "__main__":\n    hydraloop.main(trusted=["lightning"])\n'
    )
    done = project.train(
        "+hooks.theirs._target_=hydraloop.compat.LightningCallback",
        "+hooks.theirs.callback._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+hooks.theirs.callback.monitor=val_accuracy",
        "+hooks.theirs.callback.mode=max",
        "+hooks.theirs.callback.min_delta=2",
        "+hooks.theirs.callback.patience=1",
        "+hooks.theirs.priority=LOWEST",
        "engine.max_epochs=5",
        **environment("lightning"),
    )
    assert done.code == 0, done.text
    assert "theirs (100)" in done.text
    result = project.run.result
    assert (result["status"], result["progress"]["epoch"]) == ("stopped", 2)
