"""Each mistake is one message with key and remedy, an exit code that is not 0, and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.projects import Project, Run

COMPOSING: dict[str, tuple[str, str]] = {
    # command line: (key, remedy)
    "-cn nope": ("--config-name", "Known: config, hydraloop."),
    "-cp nope": ("--config-path", "Did you mean "),
    "-cd nope": ("--config-dir", "Create it"),
    "hydra.run.dir=/proc/nope": ("hydra.run.dir", "Name another directory"),
    "hydra.run.dir=train.py": ("hydra.run.dir", "Name another directory"),
    "resume=auto": ("resume", "Leave resume out. That starts a new run."),
    "resume=outputs/none": ("resume", "Use auto for the newest run"),
    "resume=conf": ("resume", "Name another run"),
    "--cfg jb": ("--cfg/-c", "choose from"),
    "--cfg job -m seed=1,2": ("--cfg", "Leave one of the flags out."),
}
"""Those of the command line as a whole, before a run directory exists. Others are in tests/cli/test_mistakes.py."""
BUILDING: dict[str, tuple[str, str]] = {
    "~model +task.model._target_=misspelt.Net": ("misspelt.Misspelt.after_trian_iter", "Did you mean after_train_iter"),
    "~model +task.model._target_=needing.Net": (
        "task.model._target_",
        "(needing.py, line 1)\n  Check the spelling, or install the package.",
    ),
    "+hooks.mine._target_=options.Mine +hooks.mine.every=abc": ("hooks.mine", "Change hooks.mine.every."),
    "experiment=own": ("task.loss", "In a config file, write in its defaults list: - override /task: null"),
    "task.model={_target_:lossless.Lossless} task={_target_:lossless.NoLoss}": ("task", "loss"),
}
"""The mistakes for which a run directory exists. Others are in tests/cli/test_mistakes.py."""
MISSPELT = "from hydraloop import Hook\nclass Misspelt(Hook):\n    def after_trian_iter(self, engine): ...\n"
OPTIONS = "from hydraloop import Hook\nclass Mine(Hook):\n    def __init__(self, every=1): int(every)\n"
OWN_TASK = "# @package _global_\ntask: {_target_: lossless.NoLoss, model: {_target_: lossless.Lossless}}\n"
NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), {})
        {}
    def forward(self, images):
        return self.layers(images)
"""
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


def check_message(text: str, key: str, remedy: str) -> None:
    assert key in text
    assert remedy in text
    assert "Traceback" not in text
    assert "HYDRA_FULL_ERROR" not in text


def test_a_mistake_before_there_is_a_run_leaves_nothing_behind(project: Project) -> None:
    before = project.files
    for line, (key, remedy) in COMPOSING.items():
        done = project.train(*line.split())
        assert (done.code, done.out) == (2, ""), line
        assert done.err.startswith(f"error: {key}"), line
        check_message(done.text, key, remedy)
        assert len(re.findall("^error: ", done.err, re.MULTILINE)) == 1, line
    assert project.files == before


def test_a_mistake_of_a_run_is_in_its_log_and_its_result(project: Project) -> None:
    project.write("misspelt.py", MISSPELT)
    project.write("lossless.py", LOSSLESS)
    project.write("conf/experiment/own.yaml", OWN_TASK)
    project.write("needing.py", "import timm\n")
    project.write("options.py", OPTIONS)
    for number, (line, (key, remedy)) in enumerate(BUILDING.items()):
        done = project.train("engine.max_epochs=1", *line.split(), f"hydra.run.dir=runs/{number}")
        run = Run(project.path / "runs" / str(number))
        assert done.code == 1, line
        check_message(done.text, key, remedy)
        assert done.err.startswith(f"error: {key}"), line
        message = done.err.removeprefix("error: ").strip()
        assert len(re.findall("^error: ", done.text, re.MULTILINE)) == 1, line
        assert message in run.log
        assert (run.result["status"], run.result["error"]) == ("failed", message)


# Through a real process each. ----------------------------------------------------------------------------------------


def test_a_later_mistake_in_a_real_process(project: Project) -> None:
    done = project.train("+hooks.mine._target_=my_project.hooks.MyHok")
    assert done.code == 1
    expected = "hooks.mine._target_: my_project.hooks has no 'MyHok'\n  Did you mean MyHook or Hook?"
    assert done.text == f"error: {expected}\n"
    assert expected in project.run.log
    assert (project.run.result["status"], project.run.result["error"]) == ("failed", expected)


def test_the_full_error_is_there_for_who_asks(project: Project) -> None:
    done = project.train("hooks=emaa")
    assert done.err == "error: hooks: there is no option 'emaa'\n  Did you mean ema?\n"
    done = project.train("hooks=emaa", HYDRA_FULL_ERROR="1")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "hydraloop.errors.UserError: hooks: there is no option 'emaa'" in done.err
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


def test_a_bug_in_a_custom_hook_keeps_its_whole_traceback(project: Project) -> None:
    for number, text in enumerate(BUGS.values()):
        project.write(f"buggy{number}.py", text)
        done = project.train(
            f"+hooks.mine._target_=buggy{number}.Buggy", "engine.max_epochs=1", f"hydra.run.dir=runs/{number}"
        )
        run = Run(project.path / "runs" / str(number))
        assert done.code == 1
        for written in (done.text, run.log):
            assert written.count("Traceback (most recent call last)") >= 1
            assert "1 / 0  # the user's line" in written
            assert "ZeroDivisionError: division by zero" in written
        assert done.text.count("1 / 0  # the user's line") == 1
        assert "in train_alone" in run.log
        assert "in train_alone" not in done.text, "the terminal has the frames of the user's code"
        assert "frames of hydraloop and packages" in done.text
        assert "Error executing job" not in done.text
        assert run.result["status"] == "failed"
        assert "ZeroDivisionError" in run.result["error"]


def test_a_mistake_in_the_data_leaves_the_original_error_in_the_log(project: Project) -> None:
    done = project.train("task.model.num_classes=7", "hydra.run.dir=runs/one")
    assert done.code == 1
    message = (
        "task.model: the model has 7 classes, 0 to 6, but the labels in a batch are "
        "0, 1, 2, 3, 4, 5, 6, 7, 8, 9\n  Let the model have 10 classes, usually task.model.num_classes=10."
    )
    assert done.err == f"error: {message}\n"
    run = Run(project.path / "runs" / "one")
    assert run.result["error"] == message
    assert message in run.log
    assert "Traceback (most recent call last)" in run.log
    assert "IndexError: Target 7 is out of bounds." in run.log or "IndexError: Target 8 is out" in run.log


def test_a_directory_that_holds_a_run_is_refused_before_anything_is_written(project: Project) -> None:
    assert project.train("engine.max_epochs=1", "hydra.run.dir=runs/one").code == 0
    before = {path: path.read_bytes() for path in (project.path / "runs").rglob("*") if path.is_file()}
    done = project.train("engine.max_epochs=1", "hydra.run.dir=runs/one")
    assert done.code == 2
    check_message(done.err, "hydra.run.dir: runs/one holds a run already", "resume=runs/one")
    assert before == {path: path.read_bytes() for path in (project.path / "runs").rglob("*") if path.is_file()}


def test_a_lazy_layer_is_one_message_for_every_command(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    model = "~model +task.model._target_=net.Net"
    quick = f"{model} engine.max_epochs=1 engine.limit_train_batches=2 engine.test=false"
    project.write("net.py", NET.format("nn.Linear(64, 10)", ""))
    assert project.train(*quick.split(), "hydra.run.dir=outputs/first").code == 0
    # Python compares the size of a file and the second of its change: both may be those of the text before.
    project.write("net.py", NET.format("nn.LazyLinear(10)", "pass  # changed"))
    for code, done in (
        (1, project.train(*quick.split())),
        (1, project.train(*quick.split(), "distributed.nproc_per_node=2", "engine.device=cpu")),
        (2, project.train("evaluate", "outputs/first")),
    ):
        assert done.code == code, done.err
        assert done.err.count("error: task.model: model.layers.1 is a lazy layer (LazyLinear): ") == 1, done.err
        assert "Traceback" not in done.err
    # The remedy works.
    project.write("net.py", NET.format("nn.LazyLinear(10)", "self(torch.zeros(2, 64))"))
    assert project.train(*quick.split()).code == 0
