"""Each example is run as its README says, and killed and resumed to the same weights."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import blocks
from tests.e2e.projects import REPOSITORY, Done, Project, Run
from tests.helpers import differences

NEEDED = {"lora": "peft", "streaming": "datasets", "text": "transformers", "vision": "timm"}
"""The package that an example needs; scripts/lowest.sh does not install them."""
WHEN_RESUMED = {"distillation": "task.weights=null"}
"""Options of a resumed run. The teacher's file is not there any more: its weights are in the checkpoint."""
VISION = Path(sys.prefix) / "vision"
"""Where scripts/example_packages.sh puts timm and torchvision."""
DYING = """
import os
import signal

import hydraloop


class Dying(hydraloop.Hook):
    def __init__(self, at, rank=0):
        self.at, self.rank = at, rank

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if engine.progress.iteration == self.at and engine.distributed.rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=sorted(path.name for path in (REPOSITORY / "examples").iterdir() if path.is_dir()))
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    """A copy of the folder of an example."""
    package = NEEDED.get(request.param, "torch")
    if not (find_spec(package) or (VISION / package).exists()):
        pytest.skip(f"{package} is not installed")
    ignored = shutil.ignore_patterns("__pycache__", "outputs")
    return Project(
        Path(shutil.copytree(REPOSITORY / "examples" / request.param, tmp_path / request.param, ignore=ignored))
    )


@pytest.mark.slow
def test_the_readme_is_true(example: Project) -> None:
    commands, printed = read(example.path / "README.md")
    command, done = trained(example, commands)
    assert "warning" not in done.text.lower()
    assert numbers(done.out).keys() >= numbers(printed).keys()
    for name, expected in numbers(printed).items():
        assert numbers(done.out)[name] == pytest.approx(expected, abs=0.1), f"{name}\n{done.text}"
    seen = set(map(without_numbers, done.out.splitlines()))
    assert not [line for line in printed.splitlines() if line != "…" and without_numbers(line) not in seen], done.out
    for picture in re.findall(r"`(media/[\w/.]+)`", (example.path / "README.md").read_text(encoding="utf-8")):
        assert (example.run.path / picture).is_file()
    for other in commands[commands.index(command) + 1 : -1]:
        run(example, other)


@pytest.mark.nightly
def test_a_killed_run_ends_with_the_same_weights(example: Project) -> None:
    command, _ = trained(example, read(example.path / "README.md")[0])
    uninterrupted = example.run
    last = uninterrupted.result["progress"]["iteration"]
    example.write("dying.py", DYING)
    by_iteration = f"default_hooks.checkpoint.by_epoch=false default_hooks.checkpoint.interval={last * 2 // 5}"
    command += f" hydra.run.dir=outputs/killed/run {by_iteration}"
    dying = f"+hooks.dying={{_target_:dying.Dying,at:{last // 2}}}"
    killed = example.train(*arguments(command), dying, **environment(example))
    assert killed.code == -9, killed.text
    shutil.rmtree(example.path / "outputs" / "teacher", ignore_errors=True)  # of the distillation
    run(example, f"{command} {WHEN_RESUMED.get(example.path.name, '')} resume=auto")
    resumed = Run(example.path / "outputs/killed/run")
    assert "resumed" in resumed.log
    torch.testing.assert_close(weights(resumed), weights(uninterrupted), rtol=0, atol=0)


def trained(example: Project, commands: list[str]) -> tuple[str, Done]:
    """Train as the README says, after what the model needs, such as a teacher. Returns the command and its outcome."""
    command = commands[-1].removesuffix(" resume=auto")
    for before in commands[: commands.index(command)]:
        run(example, before)
    return command, run(example, command)


def read(readme: Path) -> tuple[list[str], str]:
    """The commands, without the installation, and the printed output."""
    found = blocks(readme)
    commands = [command for block in found for command in block.commands if command.startswith("python train.py")]
    return commands, next(block.text for block in found if block.language == "text")


def arguments(command: str) -> list[str]:
    return shlex.split(command)[2:]


def environment(example: Project) -> dict[str, str]:
    if example.path.name != "vision":
        return {}
    folders = (Path(__file__).parent / "cpu_torchvision", VISION, REPOSITORY)
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(example: Project, command: str) -> Done:
    done = example.train(*arguments(command), **environment(example))
    assert done.code == 0, done.text
    return done


def without_numbers(line: str) -> str:
    """What other processors print, too: the words and columns, without which of the validations are the best."""
    return " ".join(re.sub(r"-?\d[\w.,:+-]*", "#", line).split()).removesuffix(" best")


def numbers(printed: str) -> dict[str, float]:
    """The metrics in the lines `validation` and `test` of the end: `test accuracy`."""
    return {
        f"{line.split()[0]} {name}": float(value)
        for line in printed.splitlines()
        if line.startswith(("validation ", "test  "))
        for name, value in re.findall(r"([\w/]+) ([\d.e-]+)(?:,| |$)", line)
        if name != "epoch"
    }


def weights(run: Run) -> dict[str, Any]:
    """What the last checkpoint contains of the model, the optimizer and the hooks."""
    folder = run.path / "checkpoints"
    checkpoint = torch.load(folder / (folder / "last_checkpoint").read_text().strip(), weights_only=True)
    assert checkpoint["meta"]["iteration"] == run.result["progress"]["iteration"]
    found = {name: checkpoint.get(name) for name in ("state_dict", "optimizer", "task")}
    return {**found, "ema": checkpoint["hooks"].get("ema")}


@pytest.mark.nightly
def test_a_gan_on_two_ranks_that_is_killed_twice_ends_with_the_same_weights(tmp_path: Path) -> None:
    example = Project(Path(shutil.copytree(REPOSITORY / "examples" / "gan", tmp_path / "gan")))
    example.write("dying.py", DYING)
    line = ["engine.max_epochs=5", "engine.val_interval=2", "default_hooks.checkpoint.interval=1"]
    line += ["distributed.nproc_per_node=2"]
    done = example.train(*line, "hydra.run.dir=outputs/whole/run")
    assert done.code == 0, done.text
    resume: list[str] = []
    for at, rank in ((13, 1), (37, 0)):  # of 10 iterations in an epoch
        dying = f"+hooks.dying={{_target_:dying.Dying,at:{at},rank:{rank}}}"
        done = example.train(*line, "hydra.run.dir=outputs/killed/run", *resume, dying)
        assert "killed by SIGKILL" in done.text, done.text
        resume = ["resume=auto"]
    done = example.train(*line, "hydra.run.dir=outputs/killed/run", *resume)
    assert done.code == 0, done.text
    whole, killed = (Run(example.path / "outputs" / name / "run") for name in ("whole", "killed"))
    assert not list(differences(weights(killed), weights(whole)))
    assert killed.result["test_metrics"] == whole.result["test_metrics"]


def test_the_python_of_the_gan_is_at_most_20_lines() -> None:
    tree = ast.parse((REPOSITORY / "examples" / "gan" / "gan.py").read_text(encoding="utf-8"))
    assert len([line for line in ast.unparse(tree.body[1:]).splitlines() if line]) <= 20
