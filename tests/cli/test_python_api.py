"""hydraloop in a script: finished objects, what is printed, random numbers, Hydra around it, other processes."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

import hydraloop
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks import EMAHook, TestTimeAugmentationHook
from tests.config.composed import REPOSITORY
from tests.e2e.projects import Project
from tests.helpers import batches, tiny_task

QUICK = ("engine.device=cpu", "engine.max_iters=4", "default_hooks.progress=null", "engine.limit_val_batches=1")


def composed(*lines: str) -> DictConfig:
    return hydraloop.compose([*QUICK, *lines], folder=REPOSITORY)


def weights(engine: hydraloop.Engine) -> list[torch.Tensor]:
    return [value.clone() for value in engine.model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def refused(cfg: DictConfig, run_dir: Path, **objects: Any) -> str:
    with pytest.raises(UserError) as caught:
        hydraloop.build(cfg, run_dir=run_dir, **objects)
    return str(caught.value)


def refused_training(cfg: DictConfig, run_dir: Path, **objects: Any) -> str:
    with pytest.raises(UserError) as caught:
        hydraloop.build(cfg, run_dir=run_dir, **objects).train()
    return str(caught.value)


# Trust. ----------------------------------------------------------------------------------------------------------


STARTS = "hooks.mine._target_: a config may not instantiate subprocess.CompletedProcess"


def test_trust_ends_with_the_call_and_with_its_config(tmp_path: Path) -> None:
    """A notebook loads a run that it trusts, and then a config from the web."""
    lines = ["+hooks.mine._target_=subprocess.CompletedProcess", "+hooks.mine.args=x", "+hooks.mine.returncode=0"]
    assert STARTS in refused(composed(*lines), tmp_path)
    cfg = hydraloop.compose([*QUICK, *lines], folder=REPOSITORY, trusted=["subprocess"])
    assert STARTS in refused(composed(*lines), tmp_path)
    built = refused(cfg, tmp_path)  # by the allowlist: the object is made, and is not a hook
    assert STARTS not in built
    assert "hooks.mine" in built
    assert STARTS not in refused(composed(*lines), tmp_path, trusted=["subprocess"])
    assert STARTS in refused(composed(*lines), tmp_path)


def test_the_folder_of_a_call_is_trusted_for_that_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("import hydraloop\nclass Mine(hydraloop.Hook): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [*QUICK, "+hooks.mine._target_=theirs.Mine"]
    hydraloop.build(hydraloop.compose(lines, folder=REPOSITORY), run_dir=tmp_path / "run", folder=tmp_path)
    assert "a config may not instantiate theirs.Mine" in refused(composed(*lines), tmp_path / "other")


def test_the_follower_of_a_trusted_tracker_is_told_of_the_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower starts when the engine trains, after the call that trusts its package."""
    (tmp_path / "their_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    sent = tmp_path / "sent"
    cfg = composed("+hooks.mine._target_=their_tracker.Mine", f"+hooks.mine.file={sent}", "engine.test=false")
    hydraloop.build(cfg, run_dir=tmp_path / "run", folder=tmp_path).train()
    assert sent.read_text() == "4"


TRACKER = """
from hydraloop.tracking import Tracker, TrackerHook

class Mine(TrackerHook):
    kind = "their_tracker.MineTracker"

    def __init__(self, *, file: str) -> None:
        super().__init__(flush_timeout=60.0, options={"file": file})

class MineTracker(Tracker):
    def open(self) -> None:
        pass

    def send(self, records) -> None:
        with open(self.options["file"], "w") as file:
            file.write(str(records[-1].iteration))

    def finish(self, finish) -> None:
        pass
"""


# Finished objects. -----------------------------------------------------------------------------------------------


def test_finished_objects_for_all_parts_train_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    """Two optimizers with a schedule, averaged weights, accumulation, and checkpoints."""

    def objects() -> dict[str, Any]:
        task = tiny_task(seed=3)
        loaders = Loaders(batches(4), batches(2, seed=1), batches(2, seed=2))
        bias, weight = ([parameter] for parameter in (task.model.bias, task.model.weight))
        optimizer = {"bias": torch.optim.SGD(bias, lr=0.1), "weight": torch.optim.AdamW(weight, lr=0.01)}
        return {"task": task, "loaders": loaders, "optimizer": optimizer, "hooks": {"ema": EMAHook(momentum=0.5)}}

    lines = ["engine.max_iters=8", "engine.accumulate=2", "precision=bf16", "scheduler=[cosine]"]
    lines += ["scheduler.cosine.optimizer=weight"]
    lines += ["default_hooks.checkpoint.interval=4", "default_hooks.checkpoint.by_epoch=false"]
    cfg, given = composed(*lines), objects()
    OmegaConf.update(cfg, "scheduler.cosine.optimizer", "weight")
    engine = hydraloop.build(cfg, run_dir=tmp_path / "run", **given)
    assert engine.task is given["task"]
    assert engine.hooks["ema"] is given["hooks"]["ema"]
    assert list(engine.run.optimizers) == ["bias", "weight"]
    whole = engine.train()
    assert whole.progress["iteration"] == 8
    file = tmp_path / "run" / "checkpoints" / "iter_4.pth"
    assert engine.run.optimizers["bias"].param_groups[0]["lr"] == 0.1, "without a schedule"
    assert engine.run.optimizers["weight"].param_groups[0]["lr"] < 0.01
    cfg.resume = str(file)
    with pytest.raises(UserError, match=r"^optimizer, data\.val, hooks\.ema: the run got an object") as caught:
        hydraloop.build(cfg, task=tiny_task(), loaders={"train": batches(4), "test": None})
    assert f"hydraloop.build(hydraloop.compose([…, 'resume={file}']), optimizer=…, " in str(caught.value)
    assert "loaders=…, hooks=…)." in str(caught.value)
    resumed = hydraloop.build(cfg, **objects())
    assert resumed.train().test_metrics == whole.test_metrics
    assert same(weights(resumed), weights(engine))
    loaded = hydraloop.load(tmp_path / "run", task=tiny_task(), loaders={"test": batches(2, seed=2)})
    assert not loaded.model.training
    assert loaded.test() == whole.test_metrics
    with pytest.raises(UserError, match="got an object from Python") as caught:
        hydraloop.load(tmp_path / "run")
    assert "hydraloop.load(…, task=…)" in str(caught.value)
    with pytest.raises(UserError, match=r"data\.test: .* got an object") as caught:
        hydraloop.load(tmp_path / "run", task=tiny_task(), splits=["test"])
    assert "loaders=…" in str(caught.value)


def test_a_hook_object_that_changes_the_evaluation_is_given_again(tmp_path: Path) -> None:
    """Other hooks are not needed to load a run."""

    def augmented() -> dict[str, hydraloop.Hook]:
        return {"views": TestTimeAugmentationHook(transforms=["identity", "rot90"]), "noise": _Noise()}

    result = hydraloop.build(composed(), run_dir=tmp_path, hooks=augmented()).train()
    with pytest.raises(UserError, match=r"^hooks\.views: the run got an object") as caught:
        hydraloop.load(tmp_path, splits=["test"])
    assert "hydraloop.load(…, hooks=…)" in str(caught.value)
    with pytest.raises(UserError, match=r"hooks\.views: int is not a Hook"):
        hydraloop.load(tmp_path, hooks={"views": 1})  # type: ignore[dict-item]
    assert hydraloop.load(tmp_path, splits=["test"], hooks=augmented()).test() == result.test_metrics


def test_some_parts_are_given_and_the_others_are_those_of_the_config(tmp_path: Path) -> None:
    """If loaders are given, other splits are empty: the config's test set says nothing about the user's data."""
    cfg = composed("optimizer=sgd")
    train = [(torch.rand(10, 1, 8, 8), torch.arange(10))] * 5
    sgd = functools.partial(torch.optim.SGD, lr=0.25)
    engine = hydraloop.build(cfg, run_dir=tmp_path, loaders={"train": train, "val": train[:1]}, optimizer=sgd)
    assert engine.loaders == Loaders(train, train[:1])
    assert type(engine.model).__name__ == "SmallCNN"
    assert engine.optimizer.param_groups[0]["lr"] == 0.25
    result = engine.train()
    assert (result.status, result.test_metrics) == ("finished", {})
    assert "accuracy" in result.val_metrics
    with pytest.raises(UserError, match=r"data\.test: the run got an object"):
        hydraloop.load(tmp_path, splits=["test"])
    assert "data.train: there is no training data" in refused_training(cfg, tmp_path / "2", loaders={"val": train})


def test_objects_that_do_not_fit(tmp_path: Path) -> None:
    cfg, task = composed(), tiny_task()
    other = torch.optim.SGD(tiny_task().parameters(), lr=1)
    lost = "weight is in no optimizer\n  Give each parameter of task.model to exactly one"
    assert lost in refused(cfg, tmp_path, task=task, optimizer=other)
    both = {"a": torch.optim.SGD(task.parameters(), lr=1), "b": torch.optim.SGD([task.model.bias], lr=1)}
    assert "bias is in two optimizers, a and b" in refused(cfg, tmp_path, task=task, optimizer=both)
    assert "int is not an optimizer" in refused(cfg, tmp_path, optimizer=1)
    used = EMAHook()
    twice = refused(cfg, tmp_path, hooks={"one": used, "two": used})
    assert "hooks.two: this EMAHook has been given to an engine before, and has its state" in twice
    assert "hooks.checkpoint: the config has a hook" in refused(cfg, tmp_path, hooks={"checkpoint": EMAHook()})
    wrong: Any = {"mine": nn.Identity()}
    assert "hooks.mine: Identity is not a Hook" in refused(cfg, tmp_path, hooks=wrong)
    wrong_task: Any = 3
    assert "int is not a task" in refused(cfg, tmp_path, task=wrong_task)
    wrong = [EMAHook()]
    assert "hooks: list is not a mapping\n  Give them by name: hooks=" in refused(cfg, tmp_path, hooks=wrong)
    wrong = batches(2)
    assert "loaders: list is not a mapping\n  Give them by name: loaders=" in refused(cfg, tmp_path, loaders=wrong)
    for wrong in ((batch for batch in batches(2)), 3, TensorDataset(torch.ones(8, 4))):
        assert "data.train: " in (found := refused(cfg, tmp_path, loaders={"train": wrong}))
        assert f"{type(wrong).__name__} is not a loader: a length and batches\n  Use torch" in found
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_run_directory_is_a_path_or_a_text(tmp_path: Path) -> None:
    assert hydraloop.build(composed(), run_dir=str(tmp_path / "run"), task=tiny_task()).run_dir == tmp_path / "run"


# Random numbers. -------------------------------------------------------------------------------------------------


def test_an_engine_trains_as_alone_if_another_one_is_built_and_trained_before_it(tmp_path: Path) -> None:
    lines = (("seed=1",), ("seed=2", "hooks=[ema]"))
    alone = []
    for index, line in enumerate(lines):
        engine = hydraloop.build(composed(*line), run_dir=tmp_path / f"alone{index}", hooks={"noise": _Noise()})
        engine.train()
        alone.append(weights(engine))
    engines = [
        hydraloop.build(composed(*line), run_dir=tmp_path / f"both{index}", hooks={"noise": _Noise()})
        for index, line in enumerate(lines)
    ]
    for engine, before in zip(reversed(engines), reversed(alone), strict=True):
        engine.validate()
        engine.train()
        assert same(weights(engine), before)


class _Noise(hydraloop.Hook):
    """Adds random numbers to the gradients."""

    def before_optimizer_step(self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        for parameter in engine.model.parameters():
            assert parameter.grad is not None
            parameter.grad += torch.rand_like(parameter)


# Hydra around it. ------------------------------------------------------------------------------------------------


def test_compose_does_not_disturb_a_surrounding_hydra(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert composed("seed=3").seed == 3
        assert hydra.compose("theirs").answer == 42
        with pytest.raises(UserError):
            composed("no_such_key=1")
        assert hydra.compose("theirs", ["answer=43"]).answer == 43
    assert not GlobalHydra.instance().is_initialized()
    composed()
    assert not GlobalHydra.instance().is_initialized()


def test_a_surrounding_job_of_hydra_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        job = hydra.compose("theirs", return_hydra_config=True)
    HydraConfig.instance().set_config(job)
    try:
        composed()
        assert HydraConfig.get().job.config_name == "theirs"
    finally:
        HydraConfig.instance().cfg = None


# A saved config, and other processes. ----------------------------------------------------------------------------


def test_a_saved_config_is_built_twice_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    cfg = composed("hooks=[ema]", "scheduler=[linear,cosine]")
    OmegaConf.update(cfg, "data.val", {"a": "${data.test}", "b": "${data.test}"}, merge=False)
    first = hydraloop.build(cfg, run_dir=tmp_path / "first")
    result = first.train()
    saved = OmegaConf.load(tmp_path / "first" / ".hydra" / "config.yaml")
    assert isinstance(saved, DictConfig)
    before = OmegaConf.to_yaml(saved)
    for name in ("second", "third"):
        engine = hydraloop.build(saved, run_dir=tmp_path / name)
        again = engine.train()
        assert (again.val_metrics, again.test_metrics) == (result.val_metrics, result.test_metrics)
        assert same(weights(engine), weights(first))
    assert OmegaConf.to_yaml(saved) == before
    saved.resume, saved.engine.max_iters = str(tmp_path / "second"), 6
    assert hydraloop.build(saved).train().progress["iteration"] == 6


SCRIPT = """
import multiprocessing, sys
import hydraloop
from omegaconf import OmegaConf

def train(*configs):
    for cfg in configs:
        engine = hydraloop.build(cfg)
        engine.train()
        print("trained", engine.hooks["mine"].__class__.__name__)

if __name__ == "__main__":
    from pathlib import Path
    lines = sys.argv[2:]
    cfg = hydraloop.compose(lines)
    if sys.argv[1] == "spawn":
        both = (cfg, OmegaConf.create(OmegaConf.to_yaml(cfg)))
        process = multiprocessing.get_context("spawn").Process(target=train, args=both)
        process.start()
        process.join()
        assert process.exitcode == 0
    else:
        hydraloop.build(cfg, run_dir=Path("script")).train()
"""


def _project(folder: Path) -> Project:
    project = Project.make(folder / "project")
    (project.path / "script.py").write_text(SCRIPT, encoding="utf-8")
    return project


def _printed(project: Project, *arguments: str, stdin: str | None = None) -> str:
    done = project.python(*arguments, stdin=stdin)
    assert (done.code, done.err) == (0, "")
    return done.out


@pytest.mark.slow
def test_a_script_prints_what_the_command_line_prints(tmp_path: Path) -> None:
    """Except for times."""
    project = _project(tmp_path)
    lines = ("engine.device=cpu", "engine.max_iters=30", "default_hooks.logger.interval=10", "hooks=[ema]")
    typed = _printed(project, "train.py", *lines, "hydra.run.dir=script").splitlines()
    shutil.rmtree(project.path / "script")
    called = _printed(project, "script.py", "here", *lines).splitlines()
    assert len(typed) > 20
    assert [_timeless(line) for line in called] == [_timeless(line) for line in typed]


def _timeless(line: str) -> str:
    if re.match(r"hooks .*\d+(µs|ms|s), ", line):  # by their times
        return "hooks"
    return re.sub(r"\s+", " ", re.sub(r"[\d.:]+(ms|µs|s|MiB|samples/s|iterations/s)?", "#", line))


@pytest.mark.slow
def test_a_spawned_process_builds_a_config_with_classes_of_the_project(tmp_path: Path) -> None:
    hook = ("+hooks.mine._target_=my_project.hooks.MyHook", "engine.device=cpu", "engine.max_iters=2")
    printed = _printed(_project(tmp_path), "script.py", "spawn", *hook, stdin="")  # in a new interpreter
    assert printed.count("trained MyHook") == 2
