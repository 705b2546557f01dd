"""Resuming that fails, from Python, or with other folders: no run loses its records, every run is found again."""

from __future__ import annotations

import signal

import pytest
import torch
from omegaconf import OmegaConf

from hydraloop.engine.checkpoint.format import load
from tests.e2e.projects import Project, Run

SHORT = ("engine.limit_train_batches=5", "engine.limit_val_batches=1", "engine.test=false")
QUICK = ("engine.max_epochs=1", *SHORT)


def records_of(run: Run) -> dict[str, bytes]:
    """The files with the config, the records and the result of a run."""
    names = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "result.json", "metrics.jsonl")
    return {name: (run.path / name).read_bytes() for name in names}


def test_an_attempt_that_fails_leaves_the_run_as_it_was(project: Project) -> None:
    assert project.train(*QUICK).code == 0
    run, before = project.run, records_of(project.run)
    name = run.path.relative_to(project.path)

    done = project.train(f"resume={name}", "model=mlp", "engine.max_epochs=2")
    assert done.code == 1, done.text
    assert records_of(run) == before
    assert OmegaConf.load(run.path / ".hydra/resume_1/config.yaml").resume == str(name)
    assert Run(run.path / ".hydra/resume_1").result["status"] == "failed"

    done = project.train(f"resume={name}", "task.model.width=32", "engine.max_epochs=2")
    assert done.code == 1, done.text
    assert "the weights do not fit the model" in done.err
    assert "the weights do not fit the model" in run.log
    assert records_of(run) == before
    assert "do not fit" in Run(run.path / ".hydra/resume_2").result["error"]

    done = project.train("resume=auto", "engine.max_epochs=2", *SHORT)
    assert done.code == 0, done.text
    assert project.run.result["progress"]["epoch"] == 2
    after = records_of(run)
    assert {name for name in before if before[name] != after[name]} == {"result.json", "metrics.jsonl"}
    assert not (run.path / ".hydra/resume_3/result.json").exists()


def test_a_run_is_continued_with_its_saved_config(project: Project) -> None:
    assert project.train(*QUICK, "hooks=[ema]", "+my.wandb_api_key=hunter2hunter2", "optimizer.lr=2e-3").code == 0
    run = project.run
    name = str(run.path.relative_to(project.path))
    command = ("train.py", "resume", name, "engine.max_epochs=2")
    refused = project.python(*command)
    assert (refused.code, "error: my.wandb_api_key: its value is a secret" in refused.err) == (2, True), refused.text
    done = project.python(*command, "my.wandb_api_key=hunter2hunter2", "hooks.ema.momentum=0.5")
    assert done.code == 0, done.text
    assert "\nengine.max_epochs: 1 -> 2\nhooks.ema.momentum: 0.0002 -> 0.5\n" in done.out
    assert run.result["progress"]["epoch"] == 2
    attempt = run.path / ".hydra" / "resume_1"
    found = OmegaConf.load(attempt / "config.yaml")
    assert (found.hooks.ema.momentum, found.optimizer.lr, found.my.wandb_api_key) == (0.5, 2e-3, "***")
    assert OmegaConf.load(attempt / "overrides.yaml")[1] == "my.wandb_api_key=***"
    assert OmegaConf.load(attempt / "hydra.yaml").hydra.run.dir == name


def test_a_resumed_run_ends_with_the_same_bits(project: Project) -> None:
    """Without a default hook, with a hook of the project, a value of Hydra's job and a masked secret."""
    line = [*SHORT, "engine.max_epochs=2", "~default_hooks.progress", "hooks=[ema,weight_norm]"]
    line += ["experiment_name=${hydra:job.name}", "+my.wandb_api_key=hunter2hunter2"]
    assert project.train(*line, "hydra.run.dir=whole").code == 0
    paused = project.train(*line, "engine.pause_after=1", "hydra.run.dir=paused")
    assert paused.code == 75, paused.text
    done = project.train("resume", "paused", "my.wandb_api_key=hunter2hunter2")
    assert done.code == 0, done.text
    whole, resumed = (load(project.path / name / "checkpoints" / "epoch_2.pth") for name in ("whole", "paused"))
    assert whole["state_dict"].keys() == resumed["state_dict"].keys()
    assert all(torch.equal(value, resumed["state_dict"][name]) for name, value in whole["state_dict"].items())
    config = Run(project.path / "paused" / ".hydra" / "resume_1").path / "config.yaml"
    assert OmegaConf.load(config).experiment_name == "train"
    assert Run(project.path / "paused").log.count("weight norm") == 2


@pytest.mark.slow
def test_runs_from_python_and_from_the_command_line_find_each_other(project: Project) -> None:
    script = "import hydraloop\ncfg = hydraloop.compose({lines})\nprint(hydraloop.build(cfg{more}).train().status)\n"
    project.write("own.py", script.format(lines=[*QUICK], more=""))
    done = project.python("own.py")
    assert done.code == 0, done.text
    run = project.run
    assert run.config.engine.max_epochs == 1
    done = project.train("resume=auto", "engine.max_epochs=2", "engine.test=false")
    assert done.code == 0, done.text
    checkpoint = run.path / "checkpoints" / "epoch_2.pth"
    project.write("own.py", script.format(lines=[f"resume={checkpoint}", "engine.max_epochs=3"], more=""))
    done = project.python("own.py")
    assert done.code == 0, done.text
    assert project.run.result["progress"]["epoch"] == 3
    assert run.config.engine.max_epochs == 1, "the config of its first attempt"
    for number, epochs in ((1, 2), (2, 3)):
        assert OmegaConf.load(run.path / f".hydra/resume_{number}/config.yaml").engine.max_epochs == epochs

    before = records_of_python(run)
    more = f", run_dir=__import__('pathlib').Path({str(run.path)!r})"
    project.write("own.py", script.format(lines=[*QUICK], more=more))
    done = project.python("own.py")
    assert "run_dir: " in done.err
    assert "holds a run already" in done.err
    assert records_of_python(run) == before


def records_of_python(run: Run) -> dict[str, bytes]:
    """All files of a run except for its checkpoints."""
    files = [path for path in run.path.rglob("*") if path.is_file() and path.suffix != ".pth"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.slow
def test_checkpoints_in_a_folder_that_only_the_job_knows(project: Project) -> None:
    line = ["default_hooks.checkpoint.out_dir=${hydra:runtime.output_dir}/ck", "engine.test=false"]
    assert project.train(*line, "engine.max_epochs=1").code == 0
    name = str(project.run.path.relative_to(project.path))
    for epochs, resume in ((2, name), (3, "auto"), (4, f"{name}/ck/epoch_3.pth")):
        done = project.train(*line, f"engine.max_epochs={epochs}", f"resume={resume}")
        assert done.code == 0, done.text
        assert project.run.result["progress"]["epoch"] == epochs
    assert sorted(path.name for path in (project.run.path / "ck").glob("*.pth")) == [
        f"epoch_{epoch}.pth" for epoch in range(1, 5)
    ]


def test_what_only_a_job_knows_is_a_mistake_in_python(project: Project) -> None:
    project.write(
        "own.py",
        "import hydraloop\n"
        "cfg = hydraloop.compose(['default_hooks.checkpoint.out_dir=${hydra:runtime.output_dir}/ck'])\n"
        "try:\n"
        "    hydraloop.build(cfg)\n"
        "except hydraloop.UserError as error:\n"
        "    print(error.key, '|', error.remedy)\n",
    )
    done = project.python("own.py")
    assert done.out.startswith("default_hooks.checkpoint.out_dir | Write a value"), done.text


@pytest.mark.nightly
def test_a_typed_hyperparameter_takes_effect_on_a_resumed_run(project: Project) -> None:
    lines = ["scheduler=[]", "engine.test=false", "default_hooks.logger.interval=10"]
    assert project.train(*lines, "engine.max_epochs=1").code == 0
    two = ["distributed.nproc_per_node=2", "data.loader.batch_size=32"]
    for epochs, more, said in (
        (2, ["optimizer.lr=1e-5"], "optimizer.lr: 0.001 -> 1e-05"),
        (3, [], "optimizer.lr: 1e-05 -> 0.001; takes effect only if it is typed on the command line"),
        (4, [*two, "optimizer.lr=1e-6"], "optimizer.lr: 0.001 -> 1e-06"),
    ):
        done = project.train(*lines, "resume=auto", f"engine.max_epochs={epochs}", *more)
        assert done.code == 0, done.text
        assert done.text.count("optimizer.lr: ") == 1
        assert f"{said}\n" in done.text
        assert f"\nengine.max_epochs: {epochs - 1} -> {epochs}\n" in done.text
        assert ("data.loader.batch_size: 64 -> 32" in done.text) == (epochs == 4)
        lr = [record["lr"] for record in project.run.records if record["mode"] == "train"]
        assert lr[-1] == (1e-6 if epochs == 4 else 1e-5)
    assert project.run.log.count("optimizer.lr: ") == 3


KILLED = """
import os
import signal

import hydraloop


class Killed(hydraloop.Hook):
    def __init__(self, *, at: int) -> None:
        self.at = at

    def before_train_epoch(self, engine):
        if engine.progress.epoch == self.at:
            engine.checkpoints.wait_for_save()  # else the file of the epoch may not be complete
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_auto_continues_the_branch_that_was_written_last(project: Project) -> None:
    project.write("killed.py", KILLED)
    line = ["experiment=spirals", "engine.max_epochs=6", "engine.test=false"]
    assert project.train(*line).code == 0
    run = project.run
    branch = ["optimizer.lr=0.5", "+hooks.kill._target_=killed.Killed", "+hooks.kill.at=4"]
    done = project.train(*line, f"resume={run.path}/checkpoints/epoch_2.pth", *branch)
    assert done.code == -signal.SIGKILL, done.text
    assert "epoch_6.pth" in run.checkpoints
    done = project.train(*line, "resume=auto")
    assert done.code == 0, done.text
    assert "checkpoints/epoch_4.pth, iteration" in done.out
    assert run.result["progress"]["epoch"] == 6
