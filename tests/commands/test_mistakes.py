"""Each mistake in the command line of a command is one message with the fix, and changes no file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.marks import slow
from tests.sweeps import written

MISTAKES: dict[str, tuple[str, str]] = {
    # command line: (problem, remedy)
    "train.py evaluate nope": ("run: nope is not a run directory", "Name one, outputs/<date>/<run>, or a"),
    "train.py evaluate split=val": ("run: split=val is not a run directory", "Name one"),
    "train.py evaluate": ("evaluate: it needs a run directory", "Write python train.py evaluate outputs/<date>/<run>."),
    "train.py evalute run": ("there is no command evalute", "Did you mean evaluate?"),
    "train.py seed=1 evalute run": ("there is no command evalute", "Did you mean evaluate?"),
    "train.py -m seed=randint(1,5)": ("seed: Unknown function 'randint'", "tag(log,interval(1e-4,1e-1))"),
    "train.py export run --format=onnx": (
        "--format=onnx: there is no such flag",
        "Write it without dashes: format=onnx",
    ),
    "train.py evaluate run run": ("run: 'run' is not key=value", "Write key=value"),
    "train.py evaluate empty": ("checkpoint: empty has no complete checkpoint", "Train with default_hooks.checkpoint"),
    "train.py evaluate run checkpoint=nope.pth": ("checkpoint: there is no checkpoint file nope.pth", "Name a file"),
    "train.py evaluate run checkpoint=": ("checkpoint: it has no value", "Write checkpoint=best|last|FILE, or leave"),
    "train.py evaluate run task.model.width=8": ("checkpoint: the weights do not fit the model SmallCNN", "Use the"),
    "train.py evaluate run task.model._target_=no_module.Net": (
        "task.model._target_: no_module.Net does not exist: there is no module 'no_module'",
        "Check the spelling, or install the package.",
    ),
    "train.py evaluate run split=tset": ("split: there is no split 'tset'", "Did you mean test?"),
    "train.py evaluate run data.test=null": ("data.test: there is no data set", "Use split=val."),
    "train.py evaluate run data.tests=null": ("data.tests: there is no such key", "Did you mean data.test"),
    "train.py evaluate run splt=val": ("splt: there is no such argument", "Did you mean split=val?"),
    "train.py evaluate run -m": ("--multirun: evaluate continues in this terminal", "Leave it out."),
    "train.py evaluate run --config-name=x": ("--config-name=x: evaluate continues in this terminal", "Leave it out."),
    "train.py evaluate run detach=true": ("detach: evaluate continues in this terminal", "Leave it out."),
    "train.py evaluate run --trusted": ("--trusted: evaluate continues in this terminal", "Leave it out."),
    "train.py predict run output=x.csv": ("output: x.csv is neither JSON lines", "Use x.jsonl or .npz."),
    "train.py predict run output=nope/x.npz": ("output: there is no folder nope", "Create it"),
    "train.py predict run output=run": ("output: run exists", "Name another file: output=…"),
    "train.py predict run output=run/metrics.jsonl": ("output: run/metrics.jsonl exists", "Name another file"),
    "train.py export run": ("format: it needs a format", "Use format=safetensors, format=pt2 or format=onnx."),
    "train.py export run format=pt3": ("format: 'pt3' is not a format", "format=pt2"),
    "train.py export run format=pt2 output=train.py": ("output: train.py exists", "Name another file: output=…"),
    "train.py export run format=onnx": ("format: onnx needs onnx and onnxscript", "pip install onnx onnxscript"),
    "train.py export branching format=pt2": ("format: Branching cannot be exported", "format=safetensors"),
    "train.py resume": ("resume: it needs a run directory", "Write python train.py resume outputs/<date>/<run>."),
    "train.py resume -m run": ("--multirun: resume continues in this terminal", "Leave it out."),
    "train.py resume run -cn mine": ("--config-name=mine: resume continues in this terminal", "Leave it out."),
    "train.py resume gone": ("resume: gone is neither a run directory nor a checkpoint of one", "outputs/<date>/<run>"),
    "train.py resume sweep": ("resume: sweep is neither a run directory", "its command with sweep.resume=sweep"),
    "train.py evaluate run/checkpoints": ("run: run/checkpoints is not a run directory", "checkpoint=FILE selects"),
    "train.py resume run engine.max_epoch=1": (
        "engine.max_epoch: there is no such key",
        "Did you mean engine.max_epochs",
    ),
    "train.py resume run hooks=[profiler]": ("hooks: an option of a group cannot be selected", "+hooks=[profiler]"),
    "train.py resume run engine.max_epochs=0": ("engine.max_epochs: ", "Use 1 or more."),
    "train.py resume run +hooks.ema.password=***": ("hooks.ema.password: its value is a secret", "Write its value"),
    "train.py resume unreadable": ("unreadable/.hydra/config.yaml cannot be read: could not", "Restore the file, or"),
    "train.py -cp run/.hydra -cn config": (
        "--config-path: PROJECT/run/.hydra has the config of a run",
        "resume PROJECT/run",
    ),
    "-m hydraloop": ("hydraloop trains nothing itself", "python train.py"),
    "-m hydraloop seed=1": ("hydraloop trains nothing itself", "python train.py"),
    "-m hydraloop check seed=1": ("check: it runs the code of a project", "python train.py check seed=1"),
    "-m hydraloop status": ("the following arguments are required: directory", ""),
    "-m hydraloop status conf": (
        "directory: conf holds no sweep and no run",
        "Name one: ls -d multirun/*/* outputs/*/*",
    ),
    "-m hydraloop stop conf": ("directory: conf holds no sweep and no run", "Name one"),
    "-m hydraloop results conf": ("directory: conf is not the directory of a sweep", ""),
    "-m hydraloop attach sweep": (
        "directory: sweep has no log: it was not detached",
        "hydraloop status sweep",
    ),
    "-m hydraloop sync conf": ("conf has no run with a tracker", ""),
}
LINES = [slow(line) if "branching" in line else line for line in MISTAKES]
BRANCHING = """
from hydraloop.models import SmallCNN
class Branching(SmallCNN):
    def forward(self, images):
        return super().forward(images * (2 if images.sum() > 0 else 1))
"""


@pytest.fixture(scope="module")
def project(trained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with runs and a sweep.

    `run` is a finished run, `empty` one without checkpoints and logs, `branching` one whose model torch.export does not
    take, and `unreadable` one with a damaged config.
    """
    folder = tmp_path_factory.mktemp("mistakes") / "project"
    made = Project(Path(shutil.copytree(trained.path, folder)))
    shutil.copytree(folder / "run", folder / "empty", ignore=shutil.ignore_patterns("checkpoints", "*.json", "*.log"))
    for name in ("branching", "unreadable"):
        shutil.copytree(folder / "run", folder / name)
    made.write("my_project/branching.py", BRANCHING)
    config = (folder / "run" / ".hydra" / "config.yaml").read_text(encoding="utf-8")
    other = config.replace("hydraloop.models.SmallCNN", "my_project.branching.Branching")
    made.write("branching/.hydra/config.yaml", other)
    made.write("unreadable/.hydra/config.yaml", "seed: !unknown 1")
    written.write(written.sweep(folder / "sweep", "seed=0,1"), {0: {"state": "running"}})
    return made


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_one_message(line: str, project: Project) -> None:
    before = project.files
    done = project.python(*line.split())
    problem, remedy = MISTAKES[line]
    assert (done.code, done.out) == (2, ""), done.err
    assert f"error: {problem.replace('PROJECT', str(project.path))}" in done.err
    assert remedy.replace("PROJECT", str(project.path)) in done.err
    assert len(re.findall("error:", done.err)) == 1
    assert "Traceback" not in done.err
    assert project.files == before
