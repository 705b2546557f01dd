"""Real hooks of MMEngine 0.10.7 under MMEngineHook; the runs are in with_mmengine.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compat.packages import REPOSITORY, environment, outcomes_of
from tests.e2e.projects import Project

pytestmark = pytest.mark.nightly
STORED_SCHEDULES = REPOSITORY / "tests" / "optim" / "mmengine_values.json"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return outcomes_of("with_mmengine", "mmengine", tmp_path_factory.mktemp("mmengine"))


def test_a_hook_sees_the_same_as_in_mmengines_own_runner(outcomes: Mapping[str, Any]) -> None:
    """The order of the mount points, iter and epoch, the helpers' answers, at every point of two epochs."""
    traces = outcomes["traces"]
    assert len(traces["theirs"]) > 30
    assert traces["here"] == traces["theirs"]


def test_a_file_of_mmengine_is_loaded(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["weights"]["same"]
    assert outcomes["weights"]["objects"] > 0, "it contains more than tensors"


def test_early_stopping_hook(outcomes: Mapping[str, Any]) -> None:
    found = outcomes["early_stopping"]
    assert (found["status"], found["epochs"]) == ("stopped", 4)
    assert found["reason"] == "EarlyStoppingHook set train_loop.stop_training in after_val_epoch"


def test_empty_cache_hook(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["empty_cache"] == 3


def test_sync_buffers_hook(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["sync_buffers"] == [0.5, 0.5]


def test_iter_timer_hook(outcomes: Mapping[str, Any]) -> None:
    """Its scalars are in the records of training, and those of the validation nowhere."""
    assert outcomes["iter_timer"] == [["train/data_time", "train/time"], ["train/data_time", "train/time"], []]


def test_sampler_seed_hook(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["sampler_seed"] == [0, 1, 2]


def test_profiler_hook(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["profiler"] is True


def test_scalars_with_counts_mean_the_same_as_in_mmengine(outcomes: Mapping[str, Any]) -> None:
    found = outcomes["counted"]
    assert found["here"] == found["theirs"]


def test_weights_that_are_revised_too_late_are_named(outcomes: Mapping[str, Any]) -> None:
    assert "Revises changes 'state_dict.0.weight' of the checkpoint in after_load_checkpoint" in outcomes["revised"]


def test_the_others_of_mmengines_own_hooks_are_refused(outcomes: Mapping[str, Any]) -> None:
    messages, known = outcomes["refused"]["messages"], outcomes["refused"]["known"]
    carried = {name for name, message in messages.items() if message == "nothing was refused"}
    assert carried == {
        "DistSamplerSeedHook",
        "EarlyStoppingHook",
        "EmptyCacheHook",
        "IterTimerHook",
        "ProfilerHook",
        "SyncBuffersHook",
    }
    assert known == sorted(messages.keys() - carried)
    assert "mmengine's CheckpointHook is not supported" in messages["CheckpointHook"]
    assert "Use default_hooks.checkpoint." in messages["CheckpointHook"]


def test_what_has_no_counterpart_is_named(outcomes: Mapping[str, Any]) -> None:
    found = outcomes["unmapped"]
    assert "runner.visualizer has no counterpart in hydraloop (used by Looks in after_val_epoch)" in found["used"]
    assert "setting mmengine's runner.model has no counterpart" in found["replaced"]
    assert "EMAHook, which Averages is derived from, is not supported" in found["derived"]


def test_from_the_command_line(tmp_path: Path) -> None:
    """With mmengine trusted it runs, at the hook's own priority; otherwise the message says how to trust it."""
    project = Project.make(tmp_path / "project")
    hook = [
        "+hooks.theirs._target_=hydraloop.compat.MMEngineHook",
        "+hooks.theirs.hook._target_=mmengine.hooks.EarlyStoppingHook",
        "+hooks.theirs.hook.monitor=accuracy",
        "+hooks.theirs.hook.patience=1",
        "+hooks.theirs.hook.min_delta=2",
        "engine.max_epochs=5",
    ]
    variables = environment("mmengine")
    refused = project.train(*hook, **variables)
    assert refused.code != 0
    assert 'trusted=["mmengine"]' in refused.text

    project.write(
        "train.py", 'import hydraloop\n\nif __name__ == "__main__":\n    hydraloop.main(trusted=["mmengine"])\n'
    )
    done = project.train(*hook, **variables)
    assert done.code == 0, done.text
    assert "theirs (100)" in done.text  # LOWEST, mmengine's for it
    result = project.runs[-1].result
    assert (result["status"], result["progress"]["epoch"]) == ("stopped", 2)


def test_the_stored_values_of_schedules_are_mmengines(tmp_path: Path) -> None:
    """tests/optim/test_mmengine_values.py compares them with the values here."""
    values = tmp_path / "values.json"
    command = [sys.executable, "-m", "tests.compat.mmengine_schedules", str(values)]
    subprocess.run(command, env=environment("mmengine"), cwd=tmp_path, check=True)
    found, stored = (json.loads(path.read_text(encoding="utf-8")) for path in (values, STORED_SCHEDULES))
    assert [entry["case"] for entry in found] == [entry["case"] for entry in stored]
    for new, old in zip(found, stored, strict=True):
        for here, there in zip(new["values"], old["values"], strict=True):
            assert here == pytest.approx(there, rel=1e-12, abs=1e-12)
