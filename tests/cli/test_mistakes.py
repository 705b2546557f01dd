"""Mistakes in a command line or a config file: each is one error with the key and the fix.

Tables of what a user types and the message. The commands for finished runs have their own, and so has the allowlist.
"""

from __future__ import annotations

import gc
import re
import shlex
import sys
from pathlib import Path

import pytest

import hydraloop
from hydraloop.commands.train import check_command
from hydraloop.config import arguments
from hydraloop.config.compose import Composer, opened
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.launch import torchrun
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY, job
from tests.marks import slow

MISTAKES: dict[str, tuple[str, str]] = {
    # command line: (key, part of the problem or the remedy)
    "default_hooks.timr.priority=3": ("default_hooks.timr", "Did you mean timer?"),
    "deafult_hooks.logger.priority=61": (
        "deafult_hooks.logger.priority",
        "Did you mean default_hooks.logger.priority?",
    ),
    "-m sweep.gpus_per_job=0.5,1 seed=1,2": ("sweep.gpus_per_job", "Give it one value"),
    "hooks=ema,profilr": ("hooks", "Did you mean profiler, "),
    "~scheduler={}": ("scheduler", "To select none, use scheduler=[]."),
    "scheduler={}": ("scheduler", "To select none, use scheduler=[]."),
    "-m scheduler={},cosine": ("scheduler", "To select none, use scheduler=[]."),
    "data.loader.batch_size=0": ("data.loader.batch_size", "Use 1 or more."),
    "data.loader.batch_size=???": ("data.loader.batch_size", "Give it one: data.loader.batch_size=…"),
    "precision=[???]": ("precision", "Options: bf16, fp16, fp32, tf32."),
    "hoks=ema": ("hoks", "Did you mean hooks?"),
    "optimizer=[adamw,muon]": ("optimizer", "--help optimizer lists"),
    "+optimizer@optimizer.hidden=sgd": ("optimizer.hidden", "no such key (optimizer/sgd.yaml)"),
    "~optimizer optimizer@optimizer.hidden=sgd": ("optimizer", "To add it, write a +: +optimizer@optimizer.hidden=sgd"),
    "~optimizer +optimizer@optimizer.a=adam optimizer.lr=1": ("optimizer.lr", "Did you mean optimizer.a.lr?"),
    "~optimizer +optimizer@optimizer.a=adam +optimizer@optimizer.b=sgd": ("optimizer.b.match", "names, globs"),
    "~optimizer +optimizer@optimizer.a=adam scheduler.cosine.optimizer=b": (
        "scheduler.cosine.optimizer",
        "Known: a.",
    ),
    "distributed.strategy=dpp": ("distributed.strategy", "ddp"),
    "distributed.strategy=fsdp2": ("distributed.strategy", "distributed.nproc_per_node=2"),
    "lr=1": ("lr", "Did you mean optimizer.lr?"),
    "epochs=3": ("epochs", "Did you mean engine.max_epochs?"),
    "workers=2": ("workers", "Did you mean data.loader.num_workers?"),
    "name=x": ("name", "Did you mean experiment_name?"),
    "run_name=x": ("run_name", "Groups: data, debug"),
    "cuda=true": ("cuda", "Groups: data, debug"),
    "foo=ema": ("foo", "Groups: data, debug"),
    "val_every=2": ("val_every", "Groups: data, debug"),
    "optimizer.learning_rate=0.1": ("optimizer.learning_rate", "Keys of optimizer: lr, "),
    "engine.foo=1": ("engine.foo", "--help engine lists the options"),
    "+engine.max_epoch=3": ("engine.max_epoch", "Did you mean engine.max_epochs"),
    "++data.loader.workers=3": ("data.loader.workers", "num_workers"),
    "model.width=32": ("model.width", "Did you mean task.model.width?"),
    "optimizer.lr=fast": ("optimizer.lr", "a number: optimizer.lr=0.001"),
    "engine.deterministic=maybe": ("engine.deterministic", "true or false"),
    "optimizer.betas=[a,b]": ("optimizer.betas[0]", "a number"),
    "hooks=[mlflow] hooks.mlflow.experiment=x": ("hooks.mlflow.experiment", "--help hooks.mlflow lists the options"),
    "~engine": ("engine", "Leave ~engine out"),
    "~optimizer.betas": ("optimizer.betas", "null: optimizer.betas=null"),
    "data.val_loader=5": ("data.val_loader", "Set each of them: data.val_loader.batch_size=8."),
    "~default_hooks.loger": ("default_hooks.loger", "Did you mean default_hooks.logger"),
    "default_hooks.param_scheduler=null": ("default_hooks.param_scheduler", "scheduler=[]"),
    "~hooks": ("hooks", "Write hooks=[]"),
    "~default_hooks=[]": ("default_hooks", "To select none, use default_hooks=[]"),
    "~hooks=ema,profiler": ("hooks", "To select none, use hooks=[]"),
    "hooks=": ("hooks", "To select none, use hooks=[]"),
    "hooks=[null]": ("hooks", "Options: anomaly_detection, "),
    "experiment=null": ("experiment", "To select none, use ~experiment"),
    "optimizer=null": ("optimizer", "Options: adafactor, adagrad, adam, "),
    "+experiment=diabetes": ("experiment", "Leave the + out"),
    "hooks=[ema] hooks.profiler.priority=30": ("hooks.profiler", "'hooks=[ema,profiler]' hooks.profiler.priority=30"),
    "+hooks.profiler.priority=30": ("hooks.profiler", "Select it: hooks=[profiler]"),
    "hooks.mine.priority=30": ("hooks.mine", "+hooks.mine._target_=package.Class"),
    "+hooks.mine.priority=30": ("hooks.mine", "Add +hooks.mine._target_=package.Class"),
    "+hooks.mine=my_project.hooks.MyHook": ("hooks.mine", "To add a custom hook: +hooks.mine._target_="),
    "hooks=ema hooks.ema={priority:30,momentm:0.1}": ("hooks.ema.momentm", "Did you mean hooks.ema.momentum"),
    "hooks.logger.interval=3": ("hooks.logger", "Use default_hooks.logger.interval=3"),
    "hooks=[ema] default_hooks.ema.momentum=0.1": ("default_hooks.ema", "Use hooks.ema.momentum=0.1"),
    "~default_hooks.logger default_hooks.logger.interval=3": ("default_hooks.logger", "Use 'default_hooks=["),
    "+hooks.checkpoint._target_=my_project.hooks.MyHook": ("hooks.checkpoint", "Give it another name."),
    "hooks=[profiler] hooks.profiler.priority=HIHG": ("hooks.profiler.priority", "Did you mean HIGH"),
    "hooks=[profiler] hooks.profiler.priority=101": ("hooks.profiler.priority", "from 0 (first) to 100 (last)"),
    "hooks=[ema] hooks.ema.on_error=explode": ("hooks.ema.on_error", "raise, warn"),
    "default_hooks.logger.priority=5": ("default_hooks.logger.priority", "Give it a number above 10."),
    "hooks=choice(ema,profiler)": ("hooks", "For a sweep add -m"),
    "optimizer.lr=${nope}": ("optimizer.lr", "Name a key that exists"),
    "foo": ("foo", "Write key=value"),
    "hooks=[ema, profiler]": ("hooks", "Write key=value without spaces"),
    "+optimizer.lr=0.1": ("optimizer.lr", "Leave the + out: optimizer.lr=0.1"),
    "=1": ("'=1'", "Write key=value"),
    "-m hooks=ema,profiler hooks.ema.momentum=0.1,0.2": ("hooks.ema", "Use 'hooks="),
    "-m hooks=[ema] hooks.ema.priority=50,100": ("default_hooks.checkpoint.priority", "Give ema a number below 90."),
    "-m optimizer.lr=1,x": ("optimizer.lr", "a number"),
    "-m optimizer.lr=interval(0,1)": ("optimizer.lr", "list its values"),
    "-m optimizer.lr=glob(*)": ("optimizer.lr", "List its values"),
    "-m resume=auto seed=1,2": ("resume", "use load_from="),
    "+scheduler.foo=1": ("scheduler.foo", "_target_"),
    "engine.max_iters=0": ("engine.max_iters", "Use 1 or more, or null for max_epochs."),
    "seed=-1": ("seed", "Use 0"),
    "engine.max_epochs=null": ("engine.max_epochs", "It takes a whole number: engine.max_epochs=20"),
    "~load_from": ("load_from", "Leave ~load_from out."),
    "~seed ++seed=[]": ("seed", "Use 0"),
    "hydra.verbose=[a,5]": ("hydra.verbose", "true, false or names of loggers"),
    "hydra.searchpath=5": ("hydra.searchpath", "It takes a list"),
    "-m hydra.sweeper.params=5": ("hydra.sweeper.params", "Write keys with their values"),
    "hydra.run.dir=${nope}": ("hydra.run.dir", "Name a key that exists"),
    "-m seed=1,2 hydra.sweep.dir=${nope}": ("hydra.sweep.dir", "Name a key that exists"),
    "hydra/launcher=joblib": ("hydra/launcher", "Leave it out."),
    "weights=rw": ("weights", "Use averaged or raw."),
    "engine.limit_val_batches=1.5": ("engine.limit_val_batches", "a share up to 1.0"),
    "engine.max_time=soon": ("engine.max_time", "0:30:00"),
    "resume=auto load_from=x.pth": ("load_from", "Leave one of the two out."),
    "distributed.timeout=nan": ("distributed.timeout", "above 0"),
    "task.model=null": ("task.model", "model=small_cnn"),
    "optimizer.every=0": ("optimizer.every", "from 1"),
    "optimizer.layer_decay=1.5": ("optimizer.layer_decay", "above 0, up to 1"),
    "optimizer.match='head.*'": ("optimizer.match", "Leave it out"),
    "scheduler=cosine,linear": ("scheduler", "For a list write 'scheduler=[cosine,linear]'; for a sweep add -m"),
    "hooks=freeze hooks.freeze.modules=head": (
        "hooks.freeze.modules",
        "It takes a list: 'hooks.freeze.modules=[head]'",
    ),
    "seed:1": ("seed", "Write key=value"),
    "data=base": ("data.train", "Select some: data=digits."),
    "-m hooks=[ema],[emaa]": ("hooks", "Did you mean ema?"),
    "--experimental-rerun=x": ("--experimental-rerun", "--help lists the flags"),
    "--lr 0.1": ("--lr", "Write it without dashes: optimizer.lr=0.1"),
    "--hydra.run.dir=outputs/my-run": ("--hydra.run.dir", "Write it without dashes: hydra.run.dir=outputs/my-run"),
    "--lr=1e-3": ("--lr", "Write it without dashes: optimizer.lr=1e-3"),
    "--dryrun": ("--dryrun", "Write --dry-run"),
    "--foo": ("--foo", "Options are written without dashes"),
    "--gpus 1": ("--gpus", "Its key is sweep.gpus, without dashes: --help sweep.gpus says what it takes."),
    "--sweep": ("--sweep", "Its key is sweep, without dashes: --help sweep says what it takes."),
    "--hooks ema": ("--hooks", "Write it without dashes: hooks=ema"),
    "data.val_loader.btch_size=3": ("data.val_loader.btch_size", "Did you mean"),
    "data.train_loader.batch_size=many": ("data.train_loader.batch_size", "many"),
    "data.test_loader.batch_size=0": ("data.test_loader.batch_size", "Use 1 or more"),
    "data.loader.multiprocessing_context=thread": ("data.loader.multiprocessing_context", "spawn"),
    "data.loader.pin_memory=atuo": ("data.loader.pin_memory", "auto"),
}
DIGITS = "{_target_:hydraloop.data.Digits,split:train}"
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
    "data.train._target_=hydraloop.data.Digit": ("data.train._target_", "Did you mean Digits"),
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
    "task=regression": ("task.model", "one value for each target"),
    "optimizer.lr=-1": ("optimizer", "Invalid learning rate"),
    "~optimizer +optimizer={_target_:torch.optim.NAdam,_partial_:true,betas:0.9}": ("optimizer", "optimizer.betas"),
    "+optimizer.foo=1": ("optimizer.foo", "lr, maximize"),
    "default_hooks.checkpoint.save_best=acc": ("default_hooks.checkpoint.save_best", "Did you mean accuracy?"),
    "default_hooks.checkpoint.interval=0": ("default_hooks.checkpoint.interval", "Use 1 or more, or null"),
    "scheduler=plateau scheduler.plateau.monitor=acuracy": ("scheduler.plateau.monitor", "Did you mean accuracy?"),
    "hooks=[ema] hooks.ema.momentum=2": ("hooks.ema.momentum", "0.0002"),
    "hooks=[profiler] hooks.profiler.on_trace_ready=foo": ("hooks.profiler.on_trace_ready", "tb_trace"),
    "engine.device=foo": ("engine.device", "Use auto, cpu"),
    "engine.compile=yes": ("engine.compile", "options of torch.compile"),
    "engine.compile={mod:default}": ("engine.compile", "unexpected keyword argument 'mod'"),
    "engine.activation_checkpointing=[Block]": ("engine.activation_checkpointing", "Conv2d"),
    "engine.channels_last=maybe": ("engine.channels_last", "auto, true or false"),
    "load_from=/nonexistent.pth": ("load_from", "Name a file"),
    "load_from=train.py": ("load_from", "Name another checkpoint"),
    "init.checkpoint=/nonexistent.pth": ("init.checkpoint", "Name a file"),
    "data.loader.collate_fn=pad": ("data.loader.collate_fn", "_target_"),
    "data.loader.collate_fn={_target_:os.system}": ("data.loader.collate_fn._target_", "may not instantiate"),
    "data.val_loader.sampler={_target_:shutil.rmtree}": ("data.val_loader.sampler._target_", "may not instantiate"),
    "data.loader.batch_sampler={_target_:builtins.eval}": ("data.loader.batch_sampler._target_", "may not instantiate"),
    "data.loader.worker_init_fn={_target_:os.kill}": ("data.loader.worker_init_fn._target_", "may not instantiate"),
    "data.loader.collate_fn={_target_:tests.data.loader_parts.pad,vlaue:3}": ("data.loader.collate_fn.vlaue", "value"),
    "task.model=null +task.model._target_=torch.nn.Flatten": ("task.model", "no parameter to train"),
    "task.model=null +task.model={_target_:torch.nn.LazyLinear,out_features:10}": ("task.model", "nn.Linear(64, 10)"),
    "~task.loss.label_smoothing task.loss._target_=torch.nn.LazyBatchNorm1d +task.loss.affine=false": (
        "task",
        "loss is a lazy layer",
    ),
}
TORCHMETRICS = {
    "+task.metrics.fid={_target_:torchmetrics.image.fid.FrechetInceptionDistance}": ("task.metrics.fid", "pip install"),
}

NEW_ENTRIES: dict[str, tuple[str, str]] = {
    # command line: (key, the command that the remedy gives)
    "task.loss.reduction=sum": ("task.loss.reduction", "+task.loss.reduction=sum"),
    "task.model={_target_:my_project.model.Net,depth:3,heads:2}": (
        "task.model.depth",
        "task.model=null +task.model={_target_:my_project.model.Net,depth:3,heads:2}",
    ),
}


def mistake(line: str, composer: Composer) -> UserError:
    """Return the error that a command line raises."""
    with pytest.raises(UserError) as caught:
        torchrun.check_options(check_command(arguments.read(line.split()), composer).cfg)
    return caught.value


def test_a_mistake_in_composing_names_key_and_fix() -> None:
    with opened(REPOSITORY / "conf", "config") as composer:
        messages = {line: str(mistake(line, composer)) for line in MISTAKES}
    assert not wrong(messages, MISTAKES)


@pytest.mark.parametrize("table", [BUILDING, slow(TORCHMETRICS)], ids=["building", "torchmetrics"])
def test_a_mistake_in_building_names_key_and_fix(table: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    ALLOWLIST.trust_folder(REPOSITORY)
    messages = {}
    with opened(REPOSITORY / "conf", "config") as composer:
        for number, line in enumerate(table):
            cfg = job(arguments.with_hook_lists(line.split())[0], composer)
            with pytest.raises(UserError) as caught:
                hydraloop.build(cfg, run_dir=tmp_path / str(number)).train()
            messages[line] = str(caught.value)
    assert not wrong(messages, table)


def wrong(messages: dict[str, str], table: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the messages that do not begin with their key, or lack their remedy."""
    return {
        line: messages[line]
        for line, (key, remedy) in table.items()
        if not messages[line].startswith((f"{key}: ", f"{key} ")) or remedy not in messages[line]
    }


def test_what_a_mapping_does_not_have_is_named_with_the_command_that_adds_it() -> None:
    with opened(REPOSITORY / "conf", "config") as composer:
        for line, (key, works) in NEW_ENTRIES.items():
            error = mistake(line, composer)
            assert error.key == key
            assert "no such key" in error.problem
            words = shlex.split(str(error.remedy))
            pasted = [word for word in words if word.startswith(("+", "~")) or word.endswith("=null")]
            kept = line.split()[:-1]  # the last one is the mistake
            assert [*kept, *pasted] == works.split()
            check_command(arguments.read(works.split()), composer)


@pytest.mark.parametrize("line", ["+hooks.{}._target_=my_project.hooks.MyHook", "-cn {}", "evaluate {}", "resume {}"])
def test_a_name_that_is_too_long_for_a_file(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *line.format("x" * 300).split()])
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of a command; here, memory would grow
    monkeypatch.setattr(environment, "set_command", lambda words: None)  # for the whole process
    with pytest.raises(SystemExit) as end:
        hydraloop.main(folder=REPOSITORY)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: \S*: File name too long\n  Type a shorter name\.\n", error)


FILES: dict[str, tuple[str, str, str, str]] = {
    # the file: (key, problem, remedy, the file after it)
    "task: {model: {_target_: my_project.model.Net, depth: 3}}": (
        "task.model.depth",
        "there is no such key (experiment/mine.yaml)",
        "To replace the option, write in the defaults list of experiment/mine.yaml: - override /model: null",
        "defaults:\n  - override /model: null\ntask: {model: {_target_: my_project.model.Net, depth: 3}}",
    ),
    "data: {train: {_target_: my_project.data.Spirals, samples: 5}}": (
        "data.train.samples",
        "no such key",
        "- override /data: base",
        "defaults:\n  - override /data: base\ndata: {train: {_target_: my_project.data.Spirals, samples: 5}}",
    ),
    "optimizer: sgd": (
        "optimizer",
        "an option is selected outside of a defaults list (experiment/mine.yaml)",
        "Write in the defaults list of experiment/mine.yaml: - override /optimizer: sgd",
        "defaults:\n  - override /optimizer: sgd",
    ),
    "hooks: [ema]": (
        "hooks",
        "an option is selected outside of a defaults list",
        "- override /hooks: [ema]",
        "defaults:\n  - override /hooks: [ema]",
    ),
    "scheduler: cosine": (
        "scheduler",
        "an option is selected outside of a defaults list",
        "- override /scheduler: cosine",
        "defaults:\n  - override /scheduler: cosine",
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
        "Multiple values for precision. To override a value use 'override precision: bf16'",
        "--help precision lists the options.",
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
        "there is no such key (experiment/mine.yaml)",
        "Did you mean seed? A key of your own stands under my: my: {sed: …}, used as ${my.sed}",
        "my: {sed: 3}\nseed: ${my.sed}",
    ),
    "lr: 3": ("lr", "no such key", "Did you mean optimizer.lr?", "optimizer: {lr: 3}"),
    "model: {width: 3}": ("model", "no such key", "Did you mean task.model?", "task: {model: {width: 3}}"),
    "task: {model: {widht: 3}}": (
        "task.model.widht",
        "no such key",
        "Did you mean task.model.width?",
        "task: {model: {width: 3}}",
    ),
    "data: {fold: 0}": ("data.fold", "no such key", "Keys of data: train, val", ""),
    "seed: abc": ("seed", "'abc' of type 'str' could not be converted", "It takes a whole number: seed=0", "seed: 0"),
}


def test_a_mistake_in_a_file_names_key_file_and_fix(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for number, (text, (*_, works)) in enumerate(FILES.items()):
        for name, body in ((f"mine{number}", text), (f"fixed{number}", works)):
            (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{body}\n")
    with opened(REPOSITORY / "conf", "config", tmp_path) as composer:
        for number, (key, problem, remedy, _) in enumerate(FILES.values()):
            error = mistake(f"experiment=mine{number}", composer)
            assert error.key == key
            assert problem.replace("mine.yaml", f"mine{number}.yaml") in error.problem
            assert remedy.replace("mine.yaml", f"mine{number}.yaml") in str(error.remedy)
            check_command(arguments.read([f"experiment=fixed{number}"]), composer)


PRIMARY: dict[str, tuple[str, str, str]] = {
    # the body of config.yaml: (key, problem, remedy)
    "engine: {max_epoch: 3}": ("engine.max_epoch", "no such key (config.yaml)", "Did you mean engine.max_epochs?"),
    "engine: {max_epochs: ten}": (
        "engine.max_epochs",
        "'ten' of type 'str' could not be converted to Integer (config.yaml)",
        "It takes a whole number: engine.max_epochs=20",
    ),
    "default_hooks: {checkpont: {interval: 1}}": ("default_hooks.checkpont", "no _target_", "Did you mean checkpoint?"),
    "seed: 1\nseed: 2": ("config.yaml", "line 3: found duplicate key seed", "each key once"),
    "x: [a, - b: c]": ("config.yaml", "line 2: expected the node content, but found '-'", "has no dashes"),
}
"""Without a config of the project that is right, the keys of the default one are suggested."""


@pytest.mark.parametrize("body", PRIMARY)
def test_a_mistake_in_the_config_file_of_a_project(body: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"defaults: [hydraloop/project, _self_]\n{body}\n")
    with opened(tmp_path, "config") as composer:
        error = mistake("data=digits model=mlp", composer)
    key, problem, remedy = PRIMARY[body]
    assert str(error.key).endswith(key)
    assert problem in error.problem
    assert remedy in str(error.remedy)


def test_a_key_that_only_another_option_has(tmp_path: Path) -> None:
    """`config.yaml` sets an argument of the option that it selects, and another option is typed."""
    text = "defaults: [hydraloop/project, _self_]\noptimizer: {betas: [0.9, 0.99]}\n"
    (tmp_path / "config.yaml").write_text(text)
    with opened(tmp_path, "config") as composer:
        error = mistake("optimizer=sgd", composer)
    assert (error.key, error.problem) == ("optimizer.betas", "there is no such key (config.yaml)")
    assert error.remedy == "The selected option of optimizer does not have it. Remove it from config.yaml."


def test_a_config_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes("defaults: [hydraloop/project, _self_]\n# größer\n".encode("latin-1"))
    with opened(tmp_path, "config") as composer:
        error = mistake("data=digits", composer)
    assert (error.key, error.problem) == (str(tmp_path / "config.yaml"), "line 2 is not UTF-8 text")


def test_a_group_that_is_not_in_the_defaults_list_needs_a_plus(tmp_path: Path) -> None:
    text = "defaults: [hydraloop, data: digits, model: small_cnn, optimizer: adamw]\n"
    (tmp_path / "config.yaml").write_text(text, "utf-8-sig")  # a byte-order mark does not hide the brackets
    with opened(tmp_path, "config") as composer:
        error = mistake("hooks=[ema]", composer)
    assert (error.key, error.remedy) == ("hooks", "To add it, write a +: '+hooks=[ema]'")


@pytest.mark.parametrize("line", ["", "seed=1 optimizer.lr=1", "hooks=ema", "-m seed=0,1"])
@pytest.mark.parametrize("text", ["engine: {max_epochs: 1}", "defaults: [_self_]\nmodel: {width: 3}", ""])
def test_a_config_file_without_hydraloop_in_its_defaults(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with opened(tmp_path, "config") as composer:
        error = mistake(line, composer)
    assert error.key == "defaults"
    assert error.remedy == "Write at the top of the file: defaults: [hydraloop/project, _self_]"


@pytest.mark.parametrize("header", ["", "# A comment, which ends the header of the file.\n# @package hooks.plain\n"])
def test_a_hook_file_that_does_not_begin_with_its_package(header: str, tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "plain.yaml").write_text(f"{header}_target_: my_project.hooks.MyHook\n")
    with opened(REPOSITORY / "conf", "config", tmp_path) as composer:
        error = mistake("hooks=plain", composer)
    assert error.key == "hooks._target_"
    assert "begins with the line, before any comment: # @package hooks.<name>" in str(error.remedy)
