"""Every option of default_hooks and scheduler runs on the digits, and all hooks together.

docs/how-to/coming_from.md lists which option takes the place of a hook of another framework.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hydra.core.config_store import ConfigStore

import hydraloop
from hydraloop.schemas import stored
from hydraloop.schemas.selected_hooks import HOOK_CLASSES
from tests.e2e.projects import Done, Project, Run

COMMANDS = (
    "engine.max_epochs=2 default_hooks.checkpoint.interval=3 default_hooks.checkpoint.by_epoch=false",
    "engine.max_epochs=1 hooks=[ema,profiler] hooks.ema.priority=HIGH hooks.profiler.priority=95",
    "engine.max_epochs=2 engine.val_interval=2",
    "engine.max_epochs=1 engine.val_by_epoch=false engine.val_interval=8 engine.val_begin=5",
    "engine.max_epochs=1 hydra.run.dir=runs/first",
    "engine.max_epochs=2 hydra.run.dir=runs/first resume=auto",
    "engine.max_epochs=1 load_from=runs/first/checkpoints/epoch_1.pth",
    "engine.max_epochs=1 init.checkpoint=runs/first/checkpoints/epoch_1.pth init.prefix=features.",
    "engine.max_epochs=2 default_hooks.logger.interval=5 task.metrics.accuracy.top_k=2 engine.val_begin=2 "
    "default_hooks.checkpoint.save_best=auto",
    "engine.max_epochs=1 +task.metrics.top3._target_=torchmetrics.Accuracy +task.metrics.top3.task=multiclass "
    "+task.metrics.top3.num_classes=10 +task.metrics.top3.top_k=3 default_hooks.checkpoint.save_best=top3",
    "engine.max_epochs=2 distributed.nproc_per_node=2",
    "engine.max_epochs=1 scheduler=[warmup_cosine,momentum]",
    "engine.max_epochs=1 scheduler=[] +scheduler.cycle._target_=torch.optim.lr_scheduler.OneCycleLR "
    "+scheduler.cycle._partial_=true +scheduler.cycle.max_lr=0.01 +scheduler.cycle.total_steps=null",
    "engine.max_epochs=1 scheduler=[linear,poly,plateau]",
    "engine.max_epochs=1 scheduler=[constant,multistep,exponential]",
    "engine.max_epochs=3 default_hooks.checkpoint.max_keep_ckpts=2 default_hooks.checkpoint.save_best=auto "
    "default_hooks.checkpoint.published_keys=[meta,state_dict]",
    "engine.max_epochs=1 default_hooks.checkpoint.by_epoch=false default_hooks.checkpoint.interval=5 "
    "default_hooks.checkpoint.save_begin=5 default_hooks.checkpoint.out_dir=elsewhere",
    "engine.max_epochs=1 default_hooks.grad_clip.clip_value=0.1",
    "engine.max_iters=3 precision=fp16 default_hooks.grad_clip.max_norm=1.0 hooks=[ema]",
    "engine.max_iters=3 precision=fp16 precision.loss_scale=512",
    "engine.max_epochs=1 default_hooks.progress.enabled=true",
    "engine.max_iters=3 hooks=[ema] "
    "hooks.ema.weight={_target_:torch.optim.swa_utils.get_ema_avg_fn,decay:0.9,_partial_:false}",
    "engine.max_epochs=2 hooks=[ema] hooks.ema.ema_type=stochastic hooks.ema.by_epoch=true",
    "engine.max_epochs=1 hooks=[sync_buffers,sync_norm] distributed.nproc_per_node=2",
    "engine.max_epochs=1 hooks=[profiler] hooks.profiler.on_trace_ready=tb_trace",
    "engine.max_epochs=4 hooks=[early_stopping] hooks.early_stopping.patience=1 hooks.early_stopping.min_delta=0.9",
    "engine.max_epochs=1 hooks=[tta] hooks.tta.transforms=[identity,shift]",
    "engine.max_epochs=1 hooks=[memory_profiler] hooks.memory_profiler.interval=10",
    "engine.max_epochs=4 scheduler=yolox scheduler.yolox.num_last_epochs=1 "
    "default_hooks=[runtime_info,timer,sampler_seed,logger,param_scheduler,last_and_best]",
    "engine.max_epochs=2 data=digits_augmented hooks=[mode_switch] hooks.mode_switch.num_last_epochs=1",
    "engine.max_epochs=1 hooks=[visualization,tensorboard,wandb,mlflow] hooks.tensorboard.histograms=10 "
    "hooks.tensorboard.interval=20",
)
"""Arguments of `train.py`. They run in order, in one folder."""
REFUSED = {
    "hooks=[npu_profiler]": "torch_npu cannot be imported",
    "hooks=[num_class_check] task.model.num_classes=12": "it is 12, but Digits of data.train has 10",
    "engine.max_epochs=1 hooks=[check_invalid_loss] hooks.check_invalid_loss.interval=5 optimizer.lr=1e30": (
        "the loss is nan at iteration 2, noticed at iteration 5"
    ),
}
"""Command lines that are errors, and a part of the message."""
OF_EVERY_RUN = ("runtime_info", "timer", "sampler_seed", "param_scheduler", "cosine")
"""Options of the default run that no command changes."""


def options(group: str) -> list[str]:
    """The built-in options of a group."""
    assert hydraloop.Hook  # importing hydraloop fills the store
    return sorted(name.removesuffix(".yaml") for name in ConfigStore.instance().list(group))


def test_every_built_in_option_is_here() -> None:
    here = " ".join((*COMMANDS, *REFUSED, *OF_EVERY_RUN))
    names = [*options("default_hooks"), *options("scheduler")]
    assert [name for name in names if not re.search(rf"\b{name}\b", here)] == []


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Run]]:
    """COMMANDS, one after the other in one folder; each with its run."""
    project = Project.make(tmp_path_factory.mktemp("catalogue") / "project")
    found = {}
    for number, command in enumerate(COMMANDS):
        named = re.search(r"hydra\.run\.dir=(\S+)", command)
        run = named[1] if named else f"runs/{number}"
        line = command.split() if named else [*command.split(), f"hydra.run.dir={run}"]
        found[command] = project.train(*line), Run(project.path / run)
    return found


@pytest.mark.nightly  # a minute: forty runs; the test of all hooks at once, in CI, has the same options together
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs_on_the_digits(command: str, done: dict[str, tuple[Done, Run]]) -> None:
    came, run = done[command]
    assert came.code == 0, came.text
    assert run.result["status"] == ("stopped" if "early_stopping" in command else "finished")
    assert "failed at" not in run.log, "a hook that warns would hide its error"


@pytest.mark.slow
@pytest.mark.parametrize("command", REFUSED)
def test_the_command_is_an_error(command: str, project: Project) -> None:
    came = project.train(*command.split())
    assert came.code in (1, 2), came.text
    assert REFUSED[command] in came.err


@pytest.mark.slow
def test_all_hooks_at_once_train_the_digits_in_the_order_they_ask_for(project: Project) -> None:
    hooks = [name for name in options("hooks") if name != "npu_profiler"]  # which needs torch_npu
    augmented = ["data=digits_augmented"]
    required = ["hooks.freeze.modules=[features]", "hooks.freeze.epochs=1"]
    done = project.train(f"hooks=[{','.join(hooks)}]", *augmented, *required, "engine.max_epochs=2")
    assert done.code == 0, done.text
    assert project.run.result["status"] == "finished"
    assert list(project.run.config.hooks) == hooks
    assert "failed at" not in done.text, "a hook that warns would hide its error"
    lines = re.findall(r"^  ((?:before|after|on)_\w+) +(\w+ \(\d+\).*)$", done.out, re.M)
    order = {point: re.findall(r"(\w+) \((\d+)\)", printed) for point, printed in lines}
    assert len(order) > 20
    assert {name for called in order.values() for name, _ in called} >= set(hooks)
    runs_after = {
        name: earlier
        for group in ("default_hooks", "hooks")
        for name, schema in stored(group)
        for earlier in HOOK_CLASSES[schema._target_.removeprefix("hydraloop.hooks.")]["runs_after"]
    }
    assert runs_after
    for called in order.values():
        names = [name for name, _ in called]
        assert all(int(one) <= int(other) for (_, one), (_, other) in pairwise(called))
        for name, earlier in runs_after.items():
            if name in names and earlier in names:
                assert names.index(earlier) < names.index(name)
