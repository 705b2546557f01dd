"""Mistakes that are found in building, or before the first iteration: each is one error with the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

import hydraloop
from tests.config.composed import REPOSITORY

DIGITS = "{_target_:hydraloop.examples.Digits,split:train}"
MISTAKES: dict[str, tuple[str, str]] = {
    # command line: (key, remedy)
    "+hooks.mine._target_=my_project.hooks.MyHok": ("hooks.mine._target_", "Did you mean MyHook"),
    "+hooks.mine._target_=my_project.hoks.MyHook": ("hooks.mine._target_", "Did you mean hooks?"),
    "+hooks.mine._target_=my_projct.hooks.MyHook": ("hooks.mine._target_", "Check the spelling, or install"),
    "+hooks.mine._target_=MyHook": ("hooks.mine._target_", "Write package.module.Class."),
    "+hooks.mine._target_=os.system": ("hooks.mine._target_", 'hydraloop.compose(…, trusted=["os.system"])'),
    "+hooks.mine._target_=torch.hub.load": ("hooks.mine._target_", "trusted=["),
    "+hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.digts=3": ("hooks.mine.digts", "Did you mean digits?"),
    "+hooks.mine._target_=my_project.model.SpiralNet": (
        "hooks.mine._target_",
        "Inherit from hydraloop.Hook; hydraloop.compat",
    ),
    "hooks=weight_norm +hooks.weight_norm.digts=3": ("hooks.weight_norm.digts", "Did you mean digits?"),
    "data.train.root=/nonexistent": ("data.train.root", "Name the folder with digits.csv.gz"),
    "data.train._target_=hydraloop.examples.Diabets": ("data.train._target_", "Did you mean Diabetes"),
    "data.train.split=trian": ("data.train.split", "Use train, val, test."),
    "+data.train.foo=1": ("data.train.foo", "root"),
    "experiment=spirals data.train.samples=0": ("data.train", ""),
    "data.loader.batch_size=0": ("data.loader.batch_size", "Use 1 or more."),
    "data.loader.num_workers=-1": ("data.loader.num_workers", "Use 0 to load in the training process."),
    "task.loss._target_=torch.nn.CrossEntropyLos": ("task.loss._target_", "Did you mean CrossEntropyLoss"),
    "task.metrics.accuracy.top_k=0": ("task.metrics.accuracy", "top_k must be at least 1"),
    "task.model.width=???": ("task.model.width", "Give it one: task.model.width=…"),
    "task._target_=my_project.model.SpiralNet": ("task._target_", "+task.model._target_=my_project.model.SpiralNet"),
    "task.loss=null": ("task.loss", "task.loss._target_=torch.nn.CrossEntropyLoss"),
    "task.loss=mse": ("task.loss", "Name a class: task.loss._target_=torch.nn.MSELoss."),
    "task.model=resnet50": ("task.model", "Select one: model=small_cnn."),
    "+task.metrics.f1={_target_:torch.nn.Linear,in_features:1,out_features:1}": ("task.metrics.f1", "update, compute"),
    f"data=base data.train={{a:{DIGITS}}} data.lengths=4": ("data.lengths", "{a: 1}"),
    f"data=base data.train={DIGITS} data.val={{a:{DIGITS},b:{{traget:1}},c:null}}": ("data.val.b", "_target_"),
    "+task.metrics.fid={_target_:torchmetrics.image.fid.FrechetInceptionDistance}": ("task.metrics.fid", "pip install"),
    "task=huggingface": ("task", "Let the data set return dicts"),
    "task=regression": ("task.model", "one value for each target"),
    "optimizer.lr=-1": ("optimizer", "Invalid learning rate"),
    "optimizer.betas=[0.9,0.9,0.9]": ("optimizer.betas", "Write 2 numbers: optimizer.betas=[0.9,0.999]"),
    "~optimizer +optimizer={_target_:torch.optim.NAdam,_partial_:true,betas:0.9}": ("optimizer.betas", "Write 2"),
    "optimizer.betas=[]": ("optimizer.betas", "Write 2 numbers: optimizer.betas=[0.9,0.999]"),
    "~optimizer +optimizer={_target_:torch.optim.NAdam,_partial_:true,betas:{a:1}}": ("optimizer.betas", "Write 2"),
    "~optimizer +optimizer={_target_:torch.optim.Rprop,_partial_:true,step_sizes:0.5}": (
        "optimizer.step_sizes",
        "Write 2 numbers: optimizer.step_sizes=[1e-06,50]",
    ),
    "+optimizer.foo=1": ("optimizer.foo", "lr, maximize"),
    "default_hooks.checkpoint.save_best=acc": ("default_hooks.checkpoint.save_best", "Did you mean accuracy?"),
    "default_hooks.checkpoint.interval=0": ("default_hooks.checkpoint.interval", "Use 1 or more, or null"),
    "scheduler=plateau scheduler.plateau.monitor=acuracy": ("scheduler.plateau.monitor", "Did you mean accuracy?"),
    "hooks=[ema] hooks.ema.momentum=2": ("hooks.ema.momentum", "0.0002"),
    "hooks=[profiler] hooks.profiler.on_trace_ready=foo": ("hooks.profiler.on_trace_ready", "tb_trace"),
    "engine.device=foo": ("engine.device", "Use auto, cpu"),
    "engine.compile=yes": ("engine.compile", "options of torch.compile"),
    "engine.compile={mod:default}": ("engine.compile.mod", "Did you mean mode?"),
    "engine.activation_checkpointing=[Block]": ("engine.activation_checkpointing", "Conv2d"),
    "engine.channels_last=maybe": ("engine.channels_last", "auto, true or false"),
    "load_from=/nonexistent.pth": ("load_from", "Name a file"),
    "load_from=train.py": ("load_from", "Name another checkpoint"),
    "init.checkpoint=/nonexistent.pth": ("init.checkpoint", "Name a file"),
}


LINES = [pytest.param(line, marks=pytest.mark.slow) if "torchmetrics" in line else line for line in MISTAKES]


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_names_key_and_fix(line: str, tmp_path: Path) -> None:
    key, remedy = MISTAKES[line]
    cfg = hydraloop.compose(line.split(), folder=REPOSITORY)
    with pytest.raises(hydraloop.UserError) as caught:
        hydraloop.build(cfg, run_dir=tmp_path).train()
    assert caught.value.key == key
    assert remedy in str(caught.value)
