"""Each example is run as its README says, and killed and resumed to the same weights."""

from __future__ import annotations

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

NEEDED = {"lora": "peft", "streaming": "datasets", "text": "transformers", "vision": "timm"}
"""The package that an example needs; scripts/lowest.sh does not install them."""
VISION = Path(sys.prefix) / "vision"
"""Where scripts/example_packages.sh puts timm and torchvision."""
DYING = """
import os
import signal

import hydraloop


class Dying(hydraloop.Hook):
    def __init__(self, at):
        self.at = at

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if engine.progress.iteration == self.at:
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
def test_the_readme_is_true_and_a_killed_run_ends_with_the_same_weights(example: Project) -> None:
    (command, *others), printed = read(example.path / "README.md")
    done = run(example, command)
    assert "warning" not in done.text.lower()
    assert numbers(done.out).keys() >= numbers(printed).keys()
    for name, expected in numbers(printed).items():
        assert numbers(done.out)[name] == pytest.approx(expected, abs=0.1), f"{name}\n{done.text}"
    uninterrupted = example.run
    for picture in re.findall(r"`(media/[\w/.]+)`", (example.path / "README.md").read_text(encoding="utf-8")):
        assert (uninterrupted.path / picture).is_file()
    for other in others:
        if "resume=auto" not in other:  # below
            run(example, other)

    last = uninterrupted.result["progress"]["iteration"]
    example.write("dying.py", DYING)
    by_iteration = f"default_hooks.checkpoint.by_epoch=false default_hooks.checkpoint.interval={last * 2 // 5}"
    command += f" hydra.run.dir=outputs/killed/run {by_iteration}"
    dying = f"+hooks.dying={{_target_:dying.Dying,at:{last // 2}}}"
    killed = example.train(*arguments(command), dying, **environment(example))
    assert killed.code == -9, killed.text
    run(example, f"{command} resume=auto")
    resumed = Run(example.path / "outputs/killed/run")
    assert "resumed" in resumed.log
    torch.testing.assert_close(weights(resumed), weights(uninterrupted), rtol=0, atol=0)


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
    return {name: checkpoint[name] for name in ("state_dict", "optimizer")} | {"ema": checkpoint["hooks"].get("ema")}
