"""Each mistake in the command line of a command is one message with the fix, and changes no file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.marks import slow
from tests.sweeps import written

MISTAKES: dict[str, tuple[int, str, str]] = {
    # command line: (exit code, problem, remedy)
    "evaluate nope": (1, "run: nope is not a run directory", "Name one, outputs/<date>/<run>."),
    "evaluate conf": (1, "run: conf is not a run directory", "Name one"),
    "evaluate": (2, "the following arguments are required: run", ""),
    "evaluate empty": (1, "checkpoint: empty has no complete checkpoint", "Train with default_hooks.checkpoint"),
    "evaluate run checkpoint=nope.pth": (1, "checkpoint: there is no checkpoint file nope.pth", "Name a file"),
    "evaluate run checkpoint=": (1, "checkpoint: it has no value", "Write checkpoint=best|last|FILE, or leave it out."),
    "evaluate run task.model.width=8": (1, "checkpoint: the weights do not fit the model SmallCNN", "Use the model of"),
    "evaluate run task.model._target_=no_module.Net": (
        1,
        "task.model._target_: no_module.Net does not exist: there is no module 'no_module'",
        "Run the command in the folder of the project that trained the run, or install the package.",
    ),
    "evaluate run split=tset": (1, "split: there is no split 'tset'", "Did you mean test?"),
    "evaluate run data.test=null": (1, "data.test: there is no data set", "Use split=val."),
    "evaluate run data.tset=null": (1, "data.tset: there is no such option", "Did you mean test?"),
    "predict run output=x.csv": (1, "output: x.csv is neither JSON lines", "Use x.jsonl or .npz."),
    "predict run output=nope/x.npz": (1, "output: there is no folder nope", "Create it"),
    "predict run output=run": (1, "output: run is a folder", "Name a file in it"),
    "predict run output=run/metrics.jsonl": (1, "output: run/metrics.jsonl exists", "output=run/metrics_2.jsonl\n"),
    "export run": (2, "the following arguments are required: --format", ""),
    "export run --format pt2 output=train.py": (1, "output: train.py exists", "another file: output=train_2.py\n"),
    "export run --format onnx": (1, "--format: onnx needs onnx and onnxscript", "pip install onnx onnxscript"),
    "export branching --format pt2 --trusted .": (
        1,
        "--format: Branching cannot be exported as a graph",
        "--format safetensors",
    ),
    "resume": (2, "resume: it takes a run directory", "Write resume outputs/<date>/<run> engine.max_epochs=4."),
    "resume -m run": (2, "resume: it takes a run directory", ""),
    "resume run --config-name=mine": (2, "resume: it takes a run directory", ""),
    "resume gone": (2, "resume: gone is neither a run directory nor a checkpoint of one", "outputs/<date>/<run>"),
    "resume run engine.max_epoch=1": (2, "engine.max_epoch: there is no such option", "Did you mean max_epochs"),
    "resume run hooks=[profiler]": (2, "hooks: an option of a group cannot be selected", "Change its keys"),
    "resume run engine.max_epochs=0": (2, "engine.max_epochs: ", "Use 1 or more."),
    "resume run +hooks.ema.password=***": (2, "hooks.ema.password: its value is a secret", "Write its value"),
    "resume unreadable": (2, "unreadable/.hydra/config.yaml cannot be read: could not", "Restore the file, or name"),
    "status conf": (2, "directory: conf holds no sweep and no run", "Name one: ls -d multirun/*/* outputs/*/*"),
    "stop conf": (2, "directory: conf holds no sweep and no run", "Name one"),
    "results conf": (2, "directory: conf is not the directory of a sweep", ""),
    "attach sweep": (2, "directory: sweep has no log: it was not detached", "python -m hydraloop status sweep"),
    "sync conf": (2, "conf has no run with a tracker", ""),
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
    done = project.python("-m", "hydraloop", *line.split())
    code, problem, remedy = MISTAKES[line]
    assert (done.code, done.out) == (code, ""), done.err
    assert f"error: {problem.replace('PROJECT', str(project.path))}" in done.err
    assert remedy in done.err
    assert len(re.findall("error:", done.err)) == 1
    assert "Traceback" not in done.err
    assert project.files == before


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("", 2, "error: there is no folder conf here"),
        ("evalute run", 2, "python -m hydraloop evaluate <run>"),
        ("--help", 0, "python -m hydraloop predict <run>"),
    ],
)
def test_outside_of_a_project_the_commands_are_listed(line: str, code: int, text: str, tmp_path: Path) -> None:
    done = Project(tmp_path).python("-m", "hydraloop", *line.split())
    assert done.code == code
    assert text in done.text
