"""Mistakes in a command line or a config file: each is one error with the key and the fix.

Tables of what a user types and the message. The commands for finished runs have their own, and so has the allowlist.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig

import hydraloop
from hydraloop.cli import arguments
from hydraloop.cli.compose import opened
from hydraloop.errors import UserError
from hydraloop.processes import checks as launch_checks
from hydraloop.sweeps.planning import check_command
from tests.config.composed import REPOSITORY
from tests.marks import nightly, slow

MISTAKES: dict[str, tuple[str, str]] = {
    # command line: (key, part of the problem or the remedy)
    "hooks=emaa": ("hooks", "Did you mean ema?"),
    "~data data.loader.drop_last=true": ("data.loader.drop_last", "Leave ~data out"),
    "default_hooks.timr.priority=3": ("default_hooks.timr", "Did you mean timer?"),
    "deafult_hooks.logger.priority=61": ("deafult_hooks.logger.priority", "Did you mean default_hooks"),
    "hooks=[tta] hooks=[ema] hooks.tta.priority=30": ("hooks.tta", "'hooks=[ema,tta]' hooks.tta.priority=30"),
    "engine.max_epochs": ("'engine.max_epochs'", "Give it a value: engine.max_epochs=…"),
    "engine.max_epochs=": ("engine.max_epochs", "It takes a whole number: engine.max_epochs=20"),
    "-m sweep.gpus_per_job=0.5,1 seed=1,2": ("sweep.gpus_per_job", "Give it one value"),
    "hooks=profiler +hooks.profiler.on_trace_ready._target_=my_project.hooks.MyHook": (
        "hooks.profiler.on_trace_ready",
        "Write the whole list",
    ),
    "hooks=wandb hooks.wandb.api_key=hunter2-0123": ("hooks.wandb.api_key", "read -rs WANDB_API_KEY && export WANDB_"),
    "hooks=ema,profilr": ("hooks", "Did you mean profiler, "),
    "~scheduler={}": ("scheduler", "To select none, use scheduler=[]."),
    "scheduler={}": ("scheduler", "To select none, use scheduler=[]."),
    "-m scheduler={},cosine": ("scheduler", "To select none, use scheduler=[]."),
    "data.loader.batch_size=0": ("data.loader.batch_size", "Use 1 or more."),
    "data.loader.batch_size=???": ("data.loader.batch_size", "Give it one: data.loader.batch_size=…"),
    "precision=[???]": ("precision", "Options: bf16, fp16, fp32, tf32."),
    "hoks=ema": ("hoks", "Did you mean hooks?"),
    "optimizer=[adamw,muon]": ("optimizer", "Select one: optimizer=muon. For several optimizers: see docs"),
    "+optimizer@optimizer.hidden=sgd": ("optimizer.hidden", "remove the one without a name: ~optimizer"),
    "~optimizer optimizer@optimizer.hidden=sgd": ("optimizer@optimizer.hidden", "+optimizer@optimizer.hidden=sgd"),
    "~optimizer +optimizer.a=5": ("optimizer.a", "_target_"),
    "~optimizer +optimizer@optimizer.a=adam optimizer.lr=1": ("optimizer.lr", "Did you mean optimizer.a.lr?"),
    "~optimizer +optimizer@optimizer.a=adam optimizer.a.lrr=1": ("optimizer.a.lrr", "Did you mean optimizer.a.lr"),
    "~optimizer +optimizer@optimizer.a=adam +optimizer@optimizer.b=sgd": ("optimizer.b.match", "names, globs"),
    "~optimizer +optimizer@optimizer.a=adam scheduler.cosine.optimizer=b": (
        "scheduler.cosine.optimizer",
        "Known: a.",
    ),
    "distributed.strategy=dpp": ("distributed.strategy", "ddp"),
    "distributed.strategy=fsdp2": ("distributed.strategy", "distributed.nproc_per_node=2"),
    "distributed.backend=nccl": ("distributed.backend", "gloo"),
    "distributed.nproc_per_node=2 engine.device=cpu:0": ("engine.device", "each process"),
    "lr=1": ("lr", "Did you mean optimizer.lr?"),
    "optimizer.foo.bar=1": ("optimizer.foo.bar", "optimizer.lr"),
    "+engine.max_epoch=3": ("engine.max_epoch", "Did you mean max_epochs"),
    "++data.loader.workers=3": ("data.loader.workers", "num_workers"),
    "model.width=32": ("model.width", "Did you mean task.model.width?"),
    "hydra.run.foo=1": ("hydra.run.foo", "hydra.run.dir"),
    "optimizer.lr=fast": ("optimizer.lr", "a number: optimizer.lr=0.001"),
    "engine.deterministic=maybe": ("engine.deterministic", "true or false"),
    "optimizer.betas=[a,b]": ("optimizer.betas[0]", "a number"),
    "engine=5": ("engine", "engine.max_epochs"),
    "~engine": ("engine", "Leave ~engine out"),
    "~data.train": ("data.train", "Use data.train=null for none"),
    "data.val_loader=5": ("data.val_loader", "Set each of them: data.val_loader.batch_size=8."),
    "~default_hooks.loger": ("default_hooks.loger", "Did you mean default_hooks.logger"),
    "default_hooks.param_scheduler=null": ("default_hooks.param_scheduler", "scheduler=[]"),
    "~hooks": ("hooks", "hooks=[]"),
    "~default_hooks=[]": ("default_hooks", "To select none, use default_hooks=[]"),
    "hooks={ema:{}}": ("hooks", "hooks=[]"),
    "hooks=": ("hooks", "To select none, use hooks=[]"),
    "hooks=[null]": ("hooks", "Options: anomaly_detection, "),
    "experiment=null": ("experiment", "To select none, use ~experiment"),
    "optimizer=null": ("optimizer", "Options: adafactor, adagrad, adam, "),
    "+experiment=diabetes": ("experiment", "Leave the + out"),
    "hooks=[ema] hooks.profiler.priority=30": ("hooks.profiler", "'hooks=[ema,profiler]' hooks.profiler.priority=30"),
    "+hooks.profiler.priority=30": ("hooks.profiler", "Select it: hooks=[profiler]"),
    "default_hooks.logger.filename=log.jsonl": ("default_hooks.logger.filename", "default_hooks.logger.interval"),
    "hooks.mine.priority=30": ("hooks.mine", "+hooks.mine._target_=package.Class"),
    "hooks.mine._target_=my_project.hooks.MyHook": ("hooks.mine", "+hooks.mine._target_=my_project.hooks.MyHook"),
    "+hooks.mine.priority=30": ("hooks.mine", "Add +hooks.mine._target_=package.Class"),
    "+hooks.mine=my_project.hooks.MyHook": ("hooks.mine", "To add a custom hook: +hooks.mine._target_="),
    "hooks=weight_norm hooks.weight_norm.on_error=warn": (
        "hooks.weight_norm.on_error",
        "write a +: +hooks.weight_norm.on_error=warn",
    ),
    "task.model={foo:1}": ("task.model.foo", "Did you mean task.model."),
    "hooks=ema hooks.ema={priority:30,momentm:0.1}": ("hooks.ema.momentm", "Did you mean hooks.ema.momentum"),
    "hooks.logger.interval=3": ("hooks.logger", "Use default_hooks.logger.interval=…"),
    "hooks=[ema] default_hooks.ema.momentum=0.1": ("default_hooks.ema", "Use hooks.ema.momentum=…"),
    "~default_hooks.logger default_hooks.logger.interval=3": ("default_hooks.logger", "Use 'default_hooks=["),
    "+hooks.checkpoint._target_=my_project.hooks.MyHook": ("hooks.checkpoint", "Give it another name."),
    "hooks=[profiler] hooks.profiler.priority=HIHG": ("hooks.profiler.priority", "Did you mean HIGH"),
    "hooks=[profiler] hooks.profiler.priority=101": ("hooks.profiler.priority", "from 0 (first) to 100 (last)"),
    "hooks=[ema] hooks.ema.on_error=explode": ("hooks.ema.on_error", "raise, warn"),
    "default_hooks.logger.priority=5": ("default_hooks.logger.priority", "Give it a number above 10."),
    "hooks=choice(ema,profiler)": ("hooks", "Add -m to run it."),
    "optimizer=sgd,adamw": ("optimizer", "a single run takes one of them."),
    "optimizer.lr=${nope}": ("optimizer.lr", "Name a key that exists"),
    "foo": ("'foo'", "Write key=value"),
    "-m optimizer.lr=1e-3, 1e-2": ("'optimizer.lr=1e-3,'", "Leave out the spaces: optimizer.lr=1e-3,1e-2"),
    "hooks=[ema, profiler]": ("'hooks=[ema,'", "Leave out the spaces: 'hooks=[ema,profiler]'"),
    "optimizer.lr = 0.1 seed=1": ("'optimizer.lr'", "Leave out the spaces: optimizer.lr=0.1"),
    "optimizer.lr= 0.1": ("'0.1'", "Leave out the spaces: optimizer.lr=0.1"),
    "+optimizer.lr=0.1": ("optimizer.lr", "Leave the + out: optimizer.lr=0.1"),
    "+optimizer.betas=0.9": ("optimizer.betas", "It takes a list: 'optimizer.betas=[0.9,0.999]'"),
    "=1": ("'=1'", "Write key=value"),
    "-m hooks=[profiler],[] hooks.profiler.priority=10,20": ("hooks.profiler", "hooks=[profiler]"),
    "-m hooks=ema,profiler hooks.ema.momentum=0.1,0.2": ("hooks.ema", "Use 'hooks="),
    "-m hooks=[ema] hooks.ema.priority=HIGH,HIHG": ("hooks.ema.priority", "Did you mean HIGH"),
    "-m hooks=[ema] hooks.ema.priority=50,100": ("default_hooks.checkpoint.priority", "Give ema a number below 90."),
    "-m optimizer.lr=1,x": ("optimizer.lr", "a number"),
    "-m optimizer.lr=interval(0,1)": ("optimizer.lr", "list its values"),
    "-m optimizer.lr=glob(*)": ("optimizer.lr", "List its values"),
    "-m resume=auto seed=1,2": ("resume", "use load_from="),
    "task.metrics.accuracy=5": ("task.metrics.accuracy", "_target_"),
    "+scheduler.foo=1": ("scheduler.foo", "_target_"),
    "engine.max_iters=0": ("engine.max_iters", "Use 1 or more, or null for max_epochs."),
    "seed=-1": ("seed", "Use 0"),
    "~load_from": ("load_from", "Leave ~load_from out."),
    "~seed ++seed=[]": ("seed", "Use 0"),
    "hydra.job.env_copy=[NOPE]": ("hydra.job.env_copy", "export NOPE="),
    "-m seed=1,2 hydra.job.env_copy=[NOPE]": ("hydra.job.env_copy", "export NOPE="),
    "hydra.verbose=[a,5]": ("hydra.verbose", "true, false or names of loggers"),
    "+hydra.callbacks.x=5": ("hydra.callbacks.x", "_target_"),
    "hydra.run.dir=${nope}": ("hydra.run.dir", "Name a key that exists"),
    "-m seed=1,2 hydra.sweep.dir=${nope}": ("hydra.sweep.dir", "Name a key that exists"),
    "++hydra.job.env_set.A=${nope}": ("hydra.job.env_set.A", "Name a key that exists"),
    "weights=rw": ("weights", "Use averaged or raw."),
    "engine.limit_val_batches=1.5": ("engine.limit_val_batches", "a share up to 1.0"),
    "engine.max_time=soon": ("engine.max_time", "0:30:00"),
    "resume=auto load_from=x.pth": ("load_from", "Leave one of the two out."),
    "distributed.timeout=nan": ("distributed.timeout", "above 0"),
    "secrets=[hooks.mine.dsn]": ("secrets", "secrets=[dsn] for hooks.mine.dsn"),
    "task.model=null": ("task.model", "model=small_cnn"),
    "optimizer.every=0": ("optimizer.every", "from 1"),
    "optimizer.layer_decay=1.5": ("optimizer.layer_decay", "above 0, up to 1"),
    "optimizer.match='head.*'": ("optimizer.match", "Leave it out"),
    "scheduler=cosine,linear": ("scheduler", "For a list write 'scheduler=[cosine,linear]'; for a sweep add -m"),
    "optimizer.betas=0.9,0.99": ("optimizer.betas", "For a list write 'optimizer.betas=[0.9,0.99]'"),
    "hooks=[ema] hooks.ema.patience=3": (
        "hooks.ema.patience",
        "Use 'hooks=[ema,early_stopping]' hooks.early_stopping.",
    ),
    "hooks=freeze hooks.freeze.modules=head": (
        "hooks.freeze.modules",
        "It takes a list: 'hooks.freeze.modules=[head]'",
    ),
    "seed:1": ("'seed:1'", "Did you mean seed=1?"),
}
MORE_MISTAKES: dict[str, tuple[str, str]] = {
    # found in the same place as one above, with the same words
    "hooks=[ema,profilr]": ("hooks", "Did you mean profiler, "),
    "optimiser=adamw": ("optimiser", "Did you mean optimizer?"),
    "optimizer=adamv": ("optimizer", "Did you mean adam"),
    "precision=[bf16,fp16]": ("precision", "Select one: precision=fp16."),
    "precision=bf17": ("precision", "Did you mean bf16"),
    "distributed.nproc_per_node=0": ("distributed.nproc_per_node", "1"),
    "experiment=diabets": ("experiment", "Did you mean diabetes?"),
    "batch_size=32": ("batch_size", "Did you mean data.loader.batch_size?"),
    "optimizer.lrr=1": ("optimizer.lrr", "Did you mean optimizer.lr"),
    "engine.max_epoch=3": ("engine.max_epoch", "Did you mean engine.max_epochs"),
    "task.model.widht=32": ("task.model.widht", "task.model.width"),
    "engine.accumulate=1.5": ("engine.accumulate", "a whole number: engine.accumulate=1"),
    "data.train.split_seed=x": ("data.train.split_seed", "a whole number"),
    "~optimizer": ("optimizer", "Leave ~optimizer out"),
    "~data": ("data", "Leave ~data out"),
    "~task.metrics": ("task.metrics", "Use task.metrics.accuracy=null for none"),
    "hooks=null": ("hooks", "To select none, use hooks=[]"),
    "hooks=[5]": ("hooks", "Options: anomaly_detection, "),
    "default_hooks=null": ("default_hooks", "To select none, use default_hooks=[]"),
    "hooks.profiler.priority=30": ("hooks.profiler", "Use 'hooks=[profiler]' hooks.profiler.priority=30"),
    "+hooks.mine=5": ("hooks.mine", "# @package hooks.<name>"),
    "hooks=[profiler] hooks.profiler.priority=-1": ("hooks.profiler.priority", "from 0 (first) to 100 (last)"),
    "hooks=weight_norm hooks.weight_norm.priority=HGH": ("hooks.weight_norm.priority", "Did you mean HIGH"),
    "default_hooks.logger=null default_hooks.logger.interval=3": (
        "default_hooks.logger",
        "Use 'default_hooks=[",
    ),
    "hooks=[ema] hooks.ema.moment=0.1": ("hooks.ema.moment", "Did you mean hooks.ema.momentum"),
    "hooks=[ema] hooks.ema.momentum=high": ("hooks.ema.momentum", "hooks.ema.momentum=0.0002"),
    "default_hooks.checkpoint.priority=20": ("default_hooks.checkpoint.priority", "a number above 70"),
    "optimizer.lr=1e-3,1e-2": ("optimizer.lr", "For a sweep add -m"),
    "hooks=[ema],[profiler]": ("hooks", "For a sweep add -m"),
    "optimizer.lr=choice(1,2)": ("optimizer.lr", "Add -m to run it."),
    "seed=1,2": ("seed", "For a sweep add -m"),
    "-m hooks=[ema],[emaa]": ("hooks", "Did you mean ema?"),
    "-m hooks=[ema],null": ("hooks", "To select none, use hooks=[]"),
    "engine.max_epochs=0": ("engine.max_epochs", "Use 1 or more."),
    "engine.accumulate=0": ("engine.accumulate", "Use 1 or more."),
    "engine.val_interval=-1": ("engine.val_interval", "null for never"),
    "engine.val_begin=-1": ("engine.val_begin", "Use 0"),
    "engine.threads=0": ("engine.threads", "null for all cores"),
    "engine.limit_train_batches=0": ("engine.limit_train_batches", "from 1"),
    "engine.limit_test_batches=-0.5": ("engine.limit_test_batches", "null for all"),
    "distributed.max_restarts=-1": ("distributed.max_restarts", "no restart"),
    "distributed.agree_interval=0": ("distributed.agree_interval", "1 or more"),
    "distributed.timeout=0": ("distributed.timeout", "above 0"),
    "distributed.bucket_cap_mb=-1": ("distributed.bucket_cap_mb", "above 0, or null"),
    "data.loader.eval_batch_size=0": ("data.loader.eval_batch_size", "1 or more"),
    "data.loader.num_workers=-1": ("data.loader.num_workers", "Use 0 to load in the training process."),
    "-m seed=1,2 sweep.max_retries=-1": ("sweep.max_retries", "no retry"),
    "-m seed=1,2 sweep.max_workers=0": ("sweep.max_workers", "one per GPU"),
    "-m seed=1,2 sweep.executor=slurm": ("sweep.executor", "pool, submitit or ray"),
    "-m seed=1,2 sweep.on_failure=x": ("sweep.on_failure", "continue or stop"),
    "seed": ("'seed'", "is not key=value\n  Write key=value, +key=value to add, ~key to delete"),
    "hooks=ema,": ("'hooks=ema,'", "is not key=value"),
    "+": ("'+'", "is not key=value"),
    "seed==1": ("'seed==1'", "is not key=value"),
    "a=[1": ("'a=[1'", "is not key=value"),
    "hooks=''": ("hooks", "To select none, use hooks=[]"),
    "+hooks=null": ("hooks", "To select none, use hooks=[]"),
    "seed=9223372036854775808": ("seed", "2^63 - 1"),
    "secrets=['5']": ("secrets", "letters"),
    "secrets=['']": ("secrets", "letters"),
}
DIGITS = "{_target_:hydraloop.examples.Digits,split:train}"
BUILDING: dict[str, tuple[str, str]] = {
    # found in building, or before the first iteration
    "+hooks.mine._target_=my_project.hooks.MyHok": ("hooks.mine._target_", "Did you mean MyHook"),
    "+hooks.mine._target_=os.system": ("hooks.mine._target_", "Name a function of your own"),
    "+hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.digts=3": ("hooks.mine.digts", "Did you mean digits?"),
    "+hooks.mine._target_=my_project.model.SpiralNet": (
        "hooks.mine._target_",
        "Inherit from hydraloop.Hook.",
    ),
    "hooks=weight_norm +hooks.weight_norm.digts=3": ("hooks.weight_norm.digts", "Did you mean digits?"),
    "data.train.root=/nonexistent": ("data.train.root", "Name the folder with digits.csv.gz"),
    "data.train._target_=hydraloop.examples.Digit": ("data.train._target_", "Did you mean Digits"),
    "data.train.split=trian": ("data.train.split", "Use train, val, test."),
    "+data.train.foo=1": ("data.train.foo", "root"),
    "experiment=spirals data.train.samples=0": ("data.train", ""),
    "task.loss._target_=torch.nn.CrossEntropyLos": ("task.loss._target_", "Did you mean CrossEntropyLoss"),
    "task.metrics.accuracy.top_k=0": ("task.metrics.accuracy", "top_k must be at least 1"),
    "task._target_=my_project.model.SpiralNet": ("task._target_", "+task.model._target_=my_project.model.SpiralNet"),
    "task.loss=null": ("task.loss", "task.loss._target_=torch.nn.CrossEntropyLoss"),
    "task.loss=mse": ("task.loss", "Name a class: task.loss._target_=torch.nn.MSELoss."),
    "task.model=resnet50": ("task.model", "Select one: model=small_cnn."),
    "+task.metrics.f1={_target_:torch.nn.Linear,in_features:1,out_features:1}": ("task.metrics.f1", "update, compute"),
    f"data=base data.train={DIGITS} data.val={{a:{DIGITS},b:{{traget:1}},c:null}}": ("data.val.b", "_target_"),
    "+task.metrics.fid={_target_:torchmetrics.image.fid.FrechetInceptionDistance}": ("task.metrics.fid", "pip install"),
    "task=huggingface": ("task", "Let the data set return dicts"),
    "task=regression": ("task.model", "one value for each target"),
    "optimizer.lr=-1": ("optimizer", "Invalid learning rate"),
    "optimizer.betas=[0.9,0.9,0.9]": ("optimizer.betas", "Write 2 numbers: 'optimizer.betas=[0.9,0.999]'"),
    "~optimizer +optimizer={_target_:torch.optim.NAdam,_partial_:true,betas:0.9}": ("optimizer.betas", "Write 2"),
    "optimizer.betas=[]": ("optimizer.betas", "Write 2 numbers: 'optimizer.betas=[0.9,0.999]'"),
    "~optimizer +optimizer={_target_:torch.optim.NAdam,_partial_:true,betas:{a:1}}": ("optimizer.betas", "Write 2"),
    "~optimizer +optimizer={_target_:torch.optim.Rprop,_partial_:true,step_sizes:0.5}": (
        "optimizer.step_sizes",
        "Write 2 numbers: 'optimizer.step_sizes=[1e-06,50]'",
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


NEW_ENTRIES: dict[str, tuple[str, str]] = {
    # command line: (key, the command that the remedy gives)
    "hooks=weight_norm hooks.weight_norm.on_error=warn": (
        "hooks.weight_norm.on_error",
        "hooks=weight_norm +hooks.weight_norm.on_error=warn",
    ),
    "+hooks.mine._target_=my_project.hooks.MyHook hooks.mine.priority=30": (
        "hooks.mine.priority",
        "+hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.priority=30",
    ),
    "task.loss.reduction=sum": ("task.loss.reduction", "+task.loss.reduction=sum"),
    "task.loss={reduction:sum,label_smoothing:0.1}": (
        "task.loss.reduction",
        "+task.loss={reduction:sum,label_smoothing:0.1}",
    ),
    "task.metrics={f1:{_target_:torchmetrics.F1Score}}": (
        "task.metrics.f1",
        "+task.metrics={f1:{_target_:torchmetrics.F1Score}}",
    ),
    "task.model={_target_:my_project.model.Net,depth:3,heads:2}": (
        "task.model.depth",
        "task.model=null +task.model={_target_:my_project.model.Net,depth:3,heads:2}",
    ),
    "task.loss={_target_:torch.nn.L1Loss,reduction:sum}": (
        "task.loss.reduction",
        "task.loss=null +task.loss={_target_:torch.nn.L1Loss,reduction:sum}",
    ),
    "optimizer={_target_:torch.optim.SGD,momentum:0.9}": (
        "optimizer.momentum",
        "~optimizer +optimizer={_target_:torch.optim.SGD,momentum:0.9}",
    ),
}


@cache
def default() -> DictConfig:
    """The config without overrides, which most mistakes need for their remedy: composed once for all."""
    with opened(REPOSITORY / "conf", "config") as composer:
        return composer.compose([])


def mistake(line: str, extra_folder: Path | None = None) -> UserError:
    """Return the error that a command line raises.

    Args:
        extra_folder: more config files, as of --config-dir.
    """
    args = arguments.read(line.split())
    composed = default()  # the same with more files, which it does not select
    with opened(REPOSITORY / "conf", "config", extra_folder) as composer:
        composer._last = {(): composed}
        with pytest.raises(UserError) as caught:
            launch_checks.check(check_command(args, composer).cfg)
    return caught.value


ALL = MISTAKES | MORE_MISTAKES | BUILDING


@pytest.mark.parametrize(
    "line",
    [*MISTAKES, *map(nightly, MORE_MISTAKES), *(slow(line) if "torchmetrics" in line else line for line in BUILDING)],
)
def test_a_mistake_names_key_and_fix(line: str, tmp_path: Path) -> None:
    key, remedy = ALL[line]
    error = mistake_in_building(line, tmp_path) if line in BUILDING else mistake(line)
    assert str(error).startswith((f"{key}: ", f"{key} "))
    assert remedy in str(error)


def mistake_in_building(line: str, run_dir: Path) -> UserError:
    """Return the error of a run whose config passes all checks that need no torch."""
    cfg = hydraloop.compose(line.split(), folder=REPOSITORY)
    with pytest.raises(UserError) as caught:
        hydraloop.build(cfg, run_dir=run_dir).train()
    return caught.value


@pytest.mark.parametrize("line", NEW_ENTRIES)
def test_what_a_mapping_does_not_have_is_named_with_the_command_that_adds_it(line: str) -> None:
    key, works = NEW_ENTRIES[line]
    error = mistake(line)
    assert error.key == key
    assert "no such key" in error.problem
    pasted = [word for word in shlex.split(str(error.remedy)) if word.startswith(("+", "~")) or word.endswith("=null")]
    kept = line.split()[:-1]  # the last one is the mistake
    assert [*kept, *(word for word in pasted if word != "+:")] == works.split()
    with opened(REPOSITORY / "conf", "config") as composer:
        check_command(arguments.read(works.split()), composer)


FILES: dict[str, tuple[str, str, str, str]] = {
    # the file: (key, problem, remedy, the file after it)
    "task: {model: {_target_: my_project.model.Net, depth: 3}}": (
        "task.model.depth",
        "experiment/mine.yaml is merged into the selected option, which has no depth",
        "To replace the option, write in the defaults of experiment/mine.yaml: - override /model: null",
        "defaults:\n  - override /model: null\ntask: {model: {_target_: my_project.model.Net, depth: 3}}",
    ),
    "task: {_target_: my_project.task.Own, model: {_target_: my_project.model.Net}, depth: 3}": (
        "task.depth",
        "which has no depth",
        "- override /task: null",
        "defaults:\n  - override /task: null\n"
        "task: {_target_: my_project.task.Own, model: {_target_: my_project.model.Net}, depth: 3}",
    ),
    "optimizer: sgd": (
        "optimizer",
        "experiment/mine.yaml selects sgd outside of the list",
        "Remove it there, and write in the defaults of experiment/mine.yaml: - override /optimizer: sgd",
        "defaults:\n  - override /optimizer: sgd",
    ),
    "hooks: [ema]": (
        "hooks",
        "experiment/mine.yaml selects [ema] outside of the list",
        "- override /hooks: [ema]",
        "defaults:\n  - override /hooks: [ema]",
    ),
    "scheduler: cosine": (
        "scheduler",
        "experiment/mine.yaml selects [cosine] outside of the list",
        "- override /scheduler: [cosine]",
        "defaults:\n  - override /scheduler: [cosine]",
    ),
    "hooks: {ema: {momentum: 0.1}}": (
        "hooks.ema",
        "is not a hook",
        "Select it: hooks=[ema]. Its options are then changed without a +.\n"
        "  In a config file, write in its defaults: - override /hooks: [ema]",
        "defaults:\n  - override /hooks: [ema]\nhooks: {ema: {momentum: 0.1}}",
    ),
    "defaults: [/precision: bf16]": (
        "precision",
        "the option is selected twice",
        "Write override in the defaults list: - override /precision: bf16",
        "defaults:\n  - override /precision: bf16",
    ),
    "defaults: [override /data: digits, /hooks: [ema]]": (
        "defaults",
        "a list without override is after an override",
        "- override /hooks: […]",
        "defaults: [override /data: digits, override /hooks: [ema]]",
    ),
    "sed: 3": (
        "sed",
        "experiment/mine.yaml is merged into the options, which have no sed",
        "Did you mean seed? To keep a key of your own with this name, use it: ${sed}.",
        "sed: 3\nseed: ${sed}",
    ),
    "lr: 3": ("lr", "which have no lr", "Did you mean optimizer.lr?", "optimizer: {lr: 3}"),
    "model: {width: 3}": ("model", "which have no model", "Did you mean task.model?", "task: {model: {width: 3}}"),
    "task: {model: {widht: 3}}": (
        "task.model.widht",
        "which has no widht",
        "Did you mean width? To replace the option, write",
        "task: {model: {width: 3}}",
    ),
    "optimizer: {_target_: torch.optim.Adagrad, lr_decay: 0.1}": (
        "optimizer.lr_decay",
        "which has no lr_decay",
        "- override /optimizer: null",
        "defaults:\n  - override /optimizer: null\noptimizer: {_target_: torch.optim.Adagrad, lr_decay: 0.1}",
    ),
    "data: {train: {_target_: my_project.data.Spirals, samples: 5}}": (
        "data.train.samples",
        "which has no samples",
        "- override /data: base",
        "defaults:\n  - override /data: base\ndata: {train: {_target_: my_project.data.Spirals, samples: 5}}",
    ),
    "data: {fold: 0}": (
        "data.fold",
        "which has no fold",
        "A key of your own belongs to the top of experiment/mine.yaml: fold: …, used as ${fold}.",
        "fold: 0\ndata: {train: {split_seed: '${fold}'}}",
    ),
    "task: {metrics: {accuracy: {_target_: torchmetrics.F1Score, average: micro}}}": (
        "task.metrics.accuracy.average",
        "which has no average",
        "To replace accuracy, write in experiment/mine.yaml accuracy: null and the new one under another name.",
        "task: {metrics: {accuracy: null, f1: {_target_: torchmetrics.F1Score, average: micro}}}",
    ),
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_merged_into_an_option_is_named_with_what_replaces_the_option(text: str, tmp_path: Path) -> None:
    key, problem, remedy, works = FILES[text]
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{text}\n")
    error = mistake("experiment=mine", tmp_path)
    assert error.key == key
    assert problem in error.problem
    assert remedy in str(error.remedy)
    file.write_text(f"# @package _global_\n{works}\n")
    with opened(REPOSITORY / "conf", "config", tmp_path) as composer:
        check_command(arguments.read(["experiment=mine"]), composer)


PRIMARY: dict[str, tuple[str, str, str]] = {
    # the body of config.yaml: (key, problem, remedy)
    "engine: {fold: 3}": ("engine.fold", "which has no fold", "belongs to the top of config.yaml: fold: …"),
    "engine: {max_epoch: 3}": ("engine.max_epoch", "which has no max_epoch", "Did you mean max_epochs?"),
    "optimizer: sgd": (
        "optimizer",
        "config.yaml selects sgd outside of the list",
        "config.yaml: override /optimizer: sgd",
    ),
    "engine: {max_epochs: ten}": (
        "engine.max_epochs",
        "'ten' of type 'str' could not be converted to Integer (config.yaml)",
        "It takes a whole number: engine.max_epochs=20",
    ),
    "default_hooks: {checkpont: {interval: 1}}": ("default_hooks.checkpont", "no _target_", "Did you mean checkpoint?"),
    "seed: 1\nseed: 2": ("config.yaml", "line 3: found duplicate key seed", "each key once"),
    "seed 1\nexperiment_name: x": ("config.yaml", "line 3: could not find expected ':'", "or the one before it"),
    "engine:\n\tthreads: 1": ("config.yaml", "line 3: found character", "no tabs"),
    "x: [a, - b: c]": ("config.yaml", "line 2: expected the node content, but found '-'", "has no dashes"),
}
"""Without a config of the project that is right, the keys of the default one are suggested."""


@pytest.mark.parametrize("body", PRIMARY)
def test_a_mistake_in_the_config_file_of_a_project(body: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"defaults: [hydraloop/project, _self_]\n{body}\n")
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read(["data=digits", "model=mlp"]), composer)
    key, problem, remedy = PRIMARY[body]
    assert str(caught.value.key).endswith(key)
    assert problem in caught.value.problem
    assert remedy in str(caught.value.remedy)


def test_a_file_may_set_an_entry_that_another_option_does_not_have(tmp_path: Path) -> None:
    defaults = "[hydraloop, data: digits, model: small_cnn, optimizer@optimizer.g: sgd, _self_]"
    (tmp_path / "config.yaml").write_text(f"defaults: {defaults}\noptimizer: {{g: {{momentum: 0.5}}}}\n")
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read(["optimizer@optimizer.g=lbfgs"]), composer)
    assert str(caught.value).startswith("optimizer.g.momentum: config.yaml is merged into the selected option, which")
    assert caught.value.remedy == "Remove it from config.yaml, or select an option that has it."


def test_a_group_that_is_not_in_the_defaults_list_needs_a_plus(tmp_path: Path) -> None:
    text = "defaults: [hydraloop, data: digits, model: small_cnn, optimizer: adamw]\n"
    (tmp_path / "config.yaml").write_text(text, "utf-8-sig")  # a byte-order mark does not hide the brackets
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read(["hooks=[ema]"]), composer)
    assert str(caught.value) == (
        "hooks: it is not in the defaults list\n  To add it, write a +: '+hooks=[ema]'\n"
        "  For all runs, add to the defaults of config.yaml, before _self_: hooks: [ema]"
    )


@pytest.mark.parametrize(
    ("entries", "body", "key", "line"),
    [
        ("", "hooks: [ema]", "hooks", "config.yaml: hooks: [ema]"),
        ("", "optimizer: sgd", "optimizer", "config.yaml: optimizer: sgd instead of adamw"),
        ("override hooks: [ema], ", "", "hooks", "- /hooks: …"),
    ],
)
def test_a_selection_beside_a_defaults_list_of_its_own(
    entries: str, body: str, key: str, line: str, tmp_path: Path
) -> None:
    defaults = f"[hydraloop, data: digits, model: small_cnn, optimizer: adamw, {entries}_self_]"
    (tmp_path / "config.yaml").write_text(f"defaults: {defaults}\n{body}\n")
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read([]), composer)
    assert caught.value.key == key
    assert str(caught.value.remedy).endswith(line)


def test_a_group_that_each_run_needs_is_added_to_the_defaults_list(tmp_path: Path) -> None:
    text = "defaults: [hydraloop, data: digits, task: classification, model: small_cnn, optimizer: adamw, _self_]\n"
    (tmp_path / "config.yaml").write_text(text)
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read([]), composer)
    assert caught.value.key == "precision"
    line = str(caught.value.remedy).partition("before _self_: - ")[2]
    (tmp_path / "config.yaml").write_text(text.replace("_self_", f"{line}, _self_"))
    with opened(tmp_path, "config") as composer:
        check_command(arguments.read([]), composer)


@pytest.mark.parametrize("line", ["", "seed=1 optimizer.lr=1", "hooks=ema", "-m seed=0,1"])
@pytest.mark.parametrize("text", ["engine: {max_epochs: 1}", "defaults: [_self_]\nmodel: {width: 3}", ""])
def test_a_config_file_without_hydraloop_in_its_defaults(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with opened(tmp_path, "config") as composer, pytest.raises(UserError) as caught:
        check_command(arguments.read(line.split()), composer)
    assert caught.value.key == "defaults"
    assert caught.value.remedy == "Write at the top of the file: defaults: [hydraloop/project, _self_]"


def test_a_config_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "broken.yaml").write_text("a: [1\nb: 2\n")
    assert "broken.yaml: line 2" in str(mistake("experiment=broken", tmp_path))


@pytest.mark.parametrize("header", ["", "# A comment, which ends the header of the file.\n# @package hooks.plain\n"])
def test_a_hook_file_that_does_not_begin_with_its_package(header: str, tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "plain.yaml").write_text(f"{header}_target_: my_project.hooks.MyHook\n")
    error = mistake("hooks=plain", tmp_path)
    assert error.key == "hooks._target_"
    assert "begins with the line, before any comment: # @package hooks.<name>" in str(error.remedy)
