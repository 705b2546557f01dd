"""Each mistake is one message with key and remedy, an exit code that is not 0, and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.projects import Done, Project, Run

COMPOSING: dict[str, tuple[str, str]] = {
    # command line: (key, remedy)
    "hooks=emaa": ("hooks", "Did you mean ema?"),
    "hooks=profiler +hooks.profiler.on_trace_ready._target_=my_project.hooks.MyHook": (
        "hooks.profiler.on_trace_ready",
        "Write all of it",
    ),
    "hooks=[ema,profilr]": ("hooks", "Did you mean profiler or"),
    "hooks=ema,profilr": ("hooks", "Did you mean profiler or"),
    "hoks=ema": ("hoks", "Did you mean hooks?"),
    "optimiser=adamw": ("optimiser", "Did you mean optimizer?"),
    "optimizer=adam": ("optimizer", "Did you mean adamw?"),
    "precision=bf17": ("precision", "Did you mean bf16"),
    "distributed.strategy=dpp": ("distributed.strategy", "ddp"),
    "distributed.strategy=fsdp2": ("distributed.strategy", "distributed.nproc_per_node=2"),
    "distributed.nproc_per_node=0": ("distributed.nproc_per_node", "1"),
    "distributed.backend=nccl": ("distributed.backend", "gloo"),
    "distributed.nproc_per_node=2 engine.device=cpu:0": ("engine.device", "each process"),
    "experiment=diabets": ("experiment", "Did you mean diabetes?"),
    "hydra/launcher=joblib": ("hydra/launcher", "basic"),
    "optimizer.lrr=1": ("optimizer.lrr", "Did you mean optimizer.lr"),
    "optimizer.foo.bar=1": ("optimizer.foo.bar", "optimizer.lr"),
    "engine.max_epoch=3": ("engine.max_epoch", "Did you mean engine.max_epochs"),
    "+engine.max_epoch=3": ("engine.max_epoch", "Did you mean max_epochs"),
    "++data.loader.workers=3": ("data.loader.workers", "num_workers"),
    "model.width=32": ("model.width", "Did you mean task.model.width?"),
    "task.model.widht=32": ("task.model.widht", "task.model.width"),
    "hydra.run.foo=1": ("hydra.run.foo", "hydra.run.dir"),
    "optimizer.lr=fast": ("optimizer.lr", "a number: optimizer.lr=0.001"),
    "engine.accumulate=1.5": ("engine.accumulate", "a whole number: engine.accumulate=1"),
    "engine.deterministic=maybe": ("engine.deterministic", "true or false"),
    "data.train.split_seed=x": ("data.train.split_seed", "a whole number"),
    "optimizer.betas=[a,b]": ("optimizer.betas[0]", "a number"),
    "engine=5": ("engine", "engine.max_epochs"),
    "~engine": ("engine", "Leave ~engine out"),
    "~optimizer": ("optimizer", "Leave ~optimizer out"),
    "~data": ("data", "Leave ~data out"),
    "~data.train": ("data.train", "write data.train=null"),
    "~default_hooks.loger": ("default_hooks.loger", "Did you mean default_hooks.logger"),
    "~hooks": ("hooks", "hooks=[]"),
    "hooks={ema:{}}": ("hooks", "hooks=[]"),
    "hooks=null": ("hooks", "For none: hooks=[]"),
    "hooks=": ("hooks", "For none: hooks=[]"),
    "default_hooks=null": ("default_hooks", "For none: default_hooks=[]"),
    "hooks=[null]": ("hooks", "Options: anomaly_detection, "),
    "hooks=[5]": ("hooks", "Options: anomaly_detection, "),
    "experiment=null": ("experiment", "take the group out: ~experiment"),
    "optimizer=null": ("optimizer", "Options: adamw, sgd."),
    "+experiment=diabetes": ("experiment", "Leave the + out"),
    "hooks.profiler.priority=30": ("hooks.profiler", "This works: 'hooks=[profiler]' hooks.profiler.priority=30"),
    "hooks=[ema] hooks.profiler.priority=30": ("hooks.profiler", "'hooks=[ema,profiler]' hooks.profiler.priority=30"),
    "+hooks.profiler.priority=30": ("hooks.profiler", "Select it: hooks=[…,profiler]"),
    "default_hooks.logger.filename=log.jsonl": ("default_hooks.logger.filename", "default_hooks.logger.interval"),
    "hooks.mine.priority=30": ("hooks.mine", "+hooks.mine._target_=package.Class"),
    "hooks.mine._target_=my_project.hooks.MyHook": ("hooks.mine", "+hooks.mine._target_=my_project.hooks.MyHook"),
    "+hooks.mine.priority=30": ("hooks.mine", "Add +hooks.mine._target_=package.Class"),
    "+hooks.mine=5": ("hooks.mine", "# @package hooks.<name>"),
    "hooks.logger.interval=3": ("hooks.logger", "Write default_hooks.logger.interval=…"),
    "hooks=[ema] default_hooks.ema.momentum=0.1": ("default_hooks.ema", "Write hooks.ema.momentum=…"),
    "~default_hooks.logger default_hooks.logger.interval=3": ("default_hooks.logger", "Leave one of the two out."),
    "default_hooks.logger.interval=3 ~default_hooks.logger": ("default_hooks.logger", "Leave one of the two out."),
    "default_hooks.logger=null default_hooks.logger.interval=3": ("default_hooks.logger", "Leave one of the two out."),
    "+hooks.checkpoint._target_=my_project.hooks.MyHook": ("hooks.checkpoint", "Give it another name."),
    "hooks=[ema] hooks.ema.moment=0.1": ("hooks.ema.moment", "Did you mean hooks.ema.momentum"),
    "hooks=[ema] hooks.ema.momentum=high": ("hooks.ema.momentum", "hooks.ema.momentum=0.0002"),
    "hooks=[profiler] hooks.profiler.priority=HIHG": ("hooks.profiler.priority", "Did you mean HIGH"),
    "hooks=[profiler] hooks.profiler.priority=101": ("hooks.profiler.priority", "from 0 (first) to 100 (last)"),
    "hooks=[profiler] hooks.profiler.priority=-1": ("hooks.profiler.priority", "from 0 (first) to 100 (last)"),
    "hooks=weight_norm hooks.weight_norm.priority=HGH": ("hooks.weight_norm.priority", "Did you mean HIGH"),
    "hooks=[ema] hooks.ema.on_error=explode": ("hooks.ema.on_error", "raise, warn"),
    "default_hooks.logger.priority=5": ("default_hooks.logger.priority", "engine.check_order=false"),
    "default_hooks.checkpoint.priority=20": ("default_hooks.checkpoint.priority", "a number above 70"),
    "optimizer.lr=1e-3,1e-2": ("optimizer.lr", "For a sweep add -m"),
    "optimizer.lr=choice(1,2)": ("optimizer.lr", "Add -m to run it."),
    "hooks=[ema],[profiler]": ("hooks", "For a sweep add -m"),
    "hooks=choice(ema,profiler)": ("hooks", "Add -m to run it."),
    "seed=1,2": ("seed", "For a sweep add -m"),
    "optimizer.lr=${nope}": ("optimizer.lr", "Name a key that is there"),
    "foo": ("'foo'", "Write key=value"),
    "=1": ("'=1'", "Write key=value"),
    "-cn nope": ("--config-name", "config search path"),
    "-cp nope": ("--config-path", "Make it, with a config.yaml in it."),
    "-cd nope": ("--config-dir", "Make it"),
    "--experimental-rerun x": ("--experimental-rerun", "Use resume="),
    "-m hooks=[profiler],[] hooks.profiler.priority=10,20": ("hooks.profiler", "hooks=[profiler]"),
    "-m hooks=ema,profiler hooks.ema.momentum=0.1,0.2": ("hooks.ema", "This works"),
    "-m hooks=[ema],[emaa]": ("hooks", "Did you mean ema?"),
    "-m hooks=[ema],null": ("hooks", "For none: hooks=[]"),
    "-m hooks=[ema] hooks.ema.priority=HIGH,HIHG": ("hooks.ema.priority", "Did you mean HIGH"),
    "-m hooks=[ema] hooks.ema.priority=50,100": ("default_hooks.checkpoint.priority", "engine.check_order=false"),
    "-m optimizer.lr=1,x": ("optimizer.lr", "a number"),
    "-m optimizer.lr=interval(0,1)": ("optimizer.lr", "List its values"),
    "-m optimizer.lr=glob(*)": ("optimizer.lr", "list its values"),
    "-m resume=auto seed=1,2": ("resume", "Use load_from="),
    "task.metrics.accuracy=5": ("task.metrics.accuracy", "_target_"),
    "+scheduler.foo=1": ("scheduler.foo", "_target_"),
    "engine.max_iters=0": ("engine.max_iters", "Use 1 or more, or null for max_epochs."),
    "engine.max_epochs=0": ("engine.max_epochs", "Use 1 or more."),
    "engine.peak_tflops=0": ("engine.peak_tflops", "null"),
    "seed=-1": ("seed", "Use 0"),
    "weights=rw": ("weights", "Use averaged or raw."),
    "hydra.run.dir=/proc/nope": ("hydra.run.dir", "Name another directory."),
    "hydra.run.dir=train.py": ("hydra.run.dir", "Name another directory."),
    "resume=auto": ("resume", "Leave resume out to start a new run"),
    "resume=outputs/none": ("resume", "Use auto for the newest run"),
    "resume=conf": ("resume", "Name another run"),
}
BUILDING: dict[str, tuple[str, str]] = {
    "+hooks.mine._target_=my_project.hooks.MyHok": ("hooks.mine._target_", "Did you mean MyHook"),
    "+hooks.mine._target_=my_project.hoks.MyHook": ("hooks.mine._target_", "Did you mean hooks?"),
    "+hooks.mine._target_=my_projct.hooks.MyHook": ("hooks.mine._target_", "Check the spelling, or install"),
    "+hooks.mine._target_=MyHook": ("hooks.mine._target_", "Write package.module.Class."),
    "+hooks.mine._target_=os.system": ("hooks.mine._target_", 'hydraloop.main(trusted=["os.system"])'),
    "+hooks.mine._target_=torch.hub.load": ("hooks.mine._target_", "trusted=["),
    "+hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.digts=3": ("hooks.mine.digts", "Did you mean digits?"),
    "+hooks.mine._target_=my_project.model.SpiralNet": (
        "hooks.mine._target_",
        "Inherit from hydraloop.Hook; hydraloop.compat",
    ),
    "+hooks.mine._target_=misspelt.Misspelt": ("hooks.mine", "Did you mean after_train_iter"),
    "hooks=weight_norm +hooks.weight_norm.digts=3": ("hooks.weight_norm.digts", "Did you mean digits?"),
    "data.train.root=/nonexistent": ("data.train.root", "Name the folder with digits.csv.gz"),
    "data.train._target_=hydraloop.data.Digit": ("data.train._target_", "Did you mean Digits?"),
    "data.train.split=trian": ("data.train.split", "Use train, val, test."),
    "+data.train.foo=1": ("data.train.foo", "root"),
    "experiment=spirals data.train.samples=0": ("data.train", ""),
    "data.loader.batch_size=0": ("data.loader.batch_size", "Use 1 or more."),
    "data.loader.num_workers=-1": ("data.loader.num_workers", "Use 0 for none."),
    "task.loss._target_=torch.nn.CrossEntropyLos": ("task.loss._target_", "Did you mean CrossEntropyLoss"),
    "task.metrics.accuracy.top_k=0": ("task.metrics.accuracy", "top_k must be at least 1"),
    "task.model.width=???": ("task.model.width", "Give it one: task.model.width=…"),
    "task=regression": ("task.model", "one value for each target"),
    "optimizer.lr=-1": ("optimizer", "Invalid learning rate"),
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
    "engine.channels_last=maybe": ("engine.channels_last", "Use auto, true or false."),
    "load_from=/nonexistent.pth": ("load_from", "Name a file"),
    "load_from=train.py": ("load_from", "earlier"),
    "init.checkpoint=/nonexistent.pth": ("init.checkpoint", "Name a file"),
    "task.model={_target_:lossless.Lossless} task={_target_:lossless.NoLoss}": ("task", "loss"),
}
MISSPELT = "from hydraloop import Hook\nclass Misspelt(Hook):\n    def after_trian_iter(self, engine): ...\n"
LOSSLESS = """
from torch import nn
from hydraloop import Task
class Lossless(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
class NoLoss(Task):
    def __init__(self, model):
        super().__init__(model, nn.CrossEntropyLoss(), {})
    def forward(self, batch):
        return {"output": self.model(batch[0].flatten(1))}
"""


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Done], set[str]]:
    """What came of each line of COMPOSING, and the files they left behind."""
    project = Project.make(tmp_path_factory.mktemp("composing") / "project")
    before = project.files
    done = project.many([line.split() for line in COMPOSING])
    return dict(zip(COMPOSING, done, strict=True)), project.files - before


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Run]]:
    """What came of each line of BUILDING, and its run directory."""
    project = Project.make(tmp_path_factory.mktemp("building") / "project")
    project.write("misspelt.py", MISSPELT)
    project.write("lossless.py", LOSSLESS)
    fast = ["engine.max_epochs=1"]
    done = project.many(
        [[*fast, *line.split(), f"hydra.run.dir=runs/{number}"] for number, line in enumerate(BUILDING)]
    )
    runs = [Run(project.path / "runs" / str(number)) for number in range(len(BUILDING))]
    return dict(zip(BUILDING, zip(done, runs, strict=True), strict=True))


def check_message(text: str, key: str, remedy: str) -> None:
    assert key in text
    assert remedy in text
    assert "Traceback" not in text
    assert "HYDRA_FULL_ERROR" not in text


@pytest.mark.parametrize("line", COMPOSING)
def test_composing(line: str, composing: tuple[dict[str, Done], set[str]]) -> None:
    key, remedy = COMPOSING[line]
    done = composing[0][line]
    assert done.code == 2
    first = next(text for text in done.err.splitlines() if not text.startswith("read as a list"))
    assert first.startswith(f"error: {key}")
    check_message(done.text, key, remedy)
    assert len(re.findall("^error: ", done.err, re.MULTILINE)) == 1
    assert done.out == ""


def test_mistakes_in_composing_leave_nothing_behind(composing: tuple[dict[str, Done], set[str]]) -> None:
    assert composing[1] == {"many.json"}


@pytest.mark.parametrize("line", BUILDING)
def test_building(line: str, building: dict[str, tuple[Done, Run]]) -> None:
    key, remedy = BUILDING[line]
    done, run = building[line]
    assert done.code == 1
    assert done.err.startswith("error: ")
    message = done.err.removeprefix("error: ").strip()
    check_message(done.text, key, remedy)
    assert message.startswith(key)
    assert len(re.findall("^error: ", done.text, re.MULTILINE)) == 1
    assert message in run.log
    assert "Traceback" not in run.log
    assert run.result["status"] == "failed"
    assert run.result["error"] == message


# Through a real process each. ----------------------------------------------------------------------------------------


def test_a_mistake_in_composing_in_a_real_process(project: Project) -> None:
    before = project.files
    done = project.train("hooks=emaa")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: hooks: hooks has no option 'emaa'\n  Did you mean ema?\n"
    assert project.files == before


def test_a_later_mistake_in_a_real_process(project: Project) -> None:
    done = project.train("+hooks.mine._target_=my_project.hooks.MyHok")
    assert done.code == 1
    expected = (
        "hooks.mine._target_: my_project.hooks.MyHok does not exist: my_project.hooks has no 'MyHok'\n"
        "  Did you mean MyHook or Hook?"
    )
    assert done.text == f"error: {expected}\n"
    assert expected in project.run.log
    assert (project.run.result["status"], project.run.result["error"]) == ("failed", expected)


def test_the_full_error_is_there_for_who_asks(project: Project) -> None:
    done = project.train("hooks=emaa", HYDRA_FULL_ERROR="1")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "hydraloop.errors.UserError: hooks: hooks has no option 'emaa'" in done.err
    done = project.train("+hooks.mine._target_=my_project.hooks.MyHok", HYDRA_FULL_ERROR="1")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.text
    assert "my_project.hooks has no 'MyHok'" in done.text


BUGS = {
    "in a method": (
        "from hydraloop import Hook\n"
        "class Buggy(Hook):\n"
        "    def after_train_iter(self, engine, batch_idx, batch, outputs):\n"
        "        1 / 0  # the user's line\n"
    ),
    "in the constructor": (
        "from hydraloop import Hook\n"
        "class Buggy(Hook):\n"
        "    def __init__(self):\n"
        "        1 / 0  # the user's line\n"
    ),
    "at import": "from hydraloop import Hook\n1 / 0  # the user's line\nclass Buggy(Hook): ...\n",
}  # fmt: skip


@pytest.mark.parametrize("where", BUGS)
def test_a_bug_in_the_users_own_hook_keeps_its_whole_traceback(where: str, project: Project) -> None:
    project.write("buggy.py", BUGS[where])
    done = project.train("+hooks.mine._target_=buggy.Buggy", "engine.max_epochs=1")
    assert done.code == 1
    for text in (done.text, project.run.log):
        assert text.count("Traceback (most recent call last)") >= 1
        assert "1 / 0  # the user's line" in text
        assert "ZeroDivisionError: division by zero" in text
    assert done.text.count("1 / 0  # the user's line") == 1
    assert "Error executing job" not in done.text
    assert project.run.result["status"] == "failed"
    assert "ZeroDivisionError" in project.run.result["error"]


def test_a_bug_in_the_users_own_model(project: Project) -> None:
    project.write("net.py", "def make():\n    return [][3]  # the user's line\n")
    project.write("conf/model/made.yaml", "# @package task.model\n_target_: net.make\n")
    done = project.train("model=made")
    assert done.code == 1
    assert "# the user's line" in done.text
    assert "IndexError" in done.text


def test_one_failing_job_does_not_stop_the_others(project: Project) -> None:
    done = project.train("-m", "optimizer.lr=1e-3,-1,1e-2", "engine.max_epochs=1")
    assert done.code == 1
    assert [job.result["status"] for job in project.jobs] == ["finished", "failed", "finished"]
    assert "Traceback" not in done.text
    assert done.err.count("error: optimizer: AdamW refuses its options: Invalid learning rate: -1.0") == 1
    assert "Invalid learning rate" in project.jobs[1].log


def test_a_directory_that_holds_a_run_is_refused_before_anything_is_written(project: Project) -> None:
    assert project.train("engine.max_epochs=1", "hydra.run.dir=runs/one").code == 0
    before = {path: path.stat().st_mtime_ns for path in (project.path / "runs").rglob("*") if path.is_file()}
    done = project.train("engine.max_epochs=1", "hydra.run.dir=runs/one")
    assert done.code == 2
    check_message(done.err, "hydra.run.dir: runs/one holds a run already", "resume=runs/one")
    assert before == {path: path.stat().st_mtime_ns for path in (project.path / "runs").rglob("*") if path.is_file()}


def test_hydras_own_flags_are_checked_by_argparse(project: Project) -> None:
    done = project.train("--foo")
    assert done.code == 2
    assert "unrecognized arguments: --foo" in done.err
    assert "Traceback" not in done.text


def test_a_config_file_that_is_no_yaml(project: Project) -> None:
    project.write("conf/experiment/broken.yaml", "a: [1\nb: 2\n")
    done = project.train("experiment=broken", "--dry-run")
    assert done.code == 2
    assert "Traceback" not in done.text
    assert "broken.yaml" in done.err


def test_a_hook_file_without_its_package_line(project: Project) -> None:
    project.write("conf/hooks/plain.yaml", "_target_: my_project.hooks.MyHook\n")
    done = project.train("hooks=plain", "--dry-run")
    assert done.code == 2
    check_message(done.err, "hooks._target_", "# @package hooks.<name>")


def test_an_unwritable_directory_for_outputs(project: Project) -> None:
    (project.path / "outputs").write_text("a file where the folder should be")
    done = project.train()
    assert done.code == 2
    assert done.err.startswith("error: hydra.run.dir: outputs/")
    assert "Traceback" not in done.text


def test_a_data_set_that_is_empty(project: Project) -> None:
    project.write("nothing.py", "def empty():\n    return []\n")
    done = project.train("data.train={_target_:nothing.empty}")
    assert done.code == 1
    check_message(done.text, "data.train", "")
    assert Path(project.run.path, "result.json").exists()
