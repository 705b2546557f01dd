"""Plants mistakes in small projects, and counts how many `python train.py check` finds.

    python -m tests.faults.planted [seed] [kind …]

Each project has one mistake. It classifies points: a data set, a model and a task in `parts.py`. The seed draws the
number of classes, the sizes, the learning rate, and the form of each mistake. A mistake is *found* if one of the checks
that are listed for it reports a problem. The project of the kind `none` has no mistake, and any problem there is a
false alarm.

Prints a Markdown table. The exit code is 1 if there is a false alarm, or fewer than 10 of 12 mistakes are found.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.projects import REPOSITORY
from tests.faults import tables

PARTS = """
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hydraloop import Hook, Task


class Points(Dataset):
    def __init__(self, begin, end):
        generator = torch.Generator().manual_seed({seed})
        centers = 2 * torch.randn({classes}, {features}, generator=generator)
        self.targets = torch.arange(2000) % {classes}
        self.inputs = centers[self.targets] + {noise} * torch.randn(2000, {features}, generator=generator)
        self.begin, self.end = begin, end

    def __len__(self):
        return self.end - self.begin

    def __getitem__(self, index):
        return self.inputs[self.begin + index], self.targets[self.begin + index]


class Noisy(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        point, target = self.dataset[index]
        return point + 0.1 * torch.randn_like(point), target


class Net(nn.Module):
    def __init__(self, outputs={classes}):
        super().__init__()
        self.stem = nn.Linear({features}, {width})
        self.blocks = nn.ModuleList(nn.Linear({width}, {width}) for _ in range({depth}))
        self.dropout = nn.Dropout({dropout})
        self.head = nn.Linear({width}, outputs)

    def forward(self, points):
        hidden = torch.relu(self.stem(points))
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.head(self.dropout(hidden))


class Classify(Task):
    def forward(self, batch):
        points, targets = batch
        outputs = self.model(points)
        loss = cross_entropy(outputs, targets)
        return {{"loss": loss, "outputs": outputs, "targets": targets}}
"""
CONFIG = """
defaults:
  - hydraloop
  - data: base
  - optimizer: adamw
  - scheduler: cosine
  - precision: fp32
  - default_hooks: [runtime_info, timer, sampler_seed, grad_clip, logger, param_scheduler, checkpoint, progress]
  - hooks: []
  - _self_
experiment_name: planted
data:
  train: {{_target_: parts.Noisy, dataset: {{_target_: parts.Points, begin: 0, end: {train}}}}}
  val: {{_target_: parts.Points, begin: {train}, end: {val}}}
  test: {{_target_: parts.Points, begin: {val}, end: 2000}}
  loader: {{batch_size: {batch}}}
task: {{_target_: {task}, model: {{_target_: parts.Net}}{loss}}}
optimizer: {{lr: {lr}}}
engine: {{max_epochs: 2, threads: 1}}
"""
TRAIN = "import hydraloop\n\nif __name__ == '__main__':\n    hydraloop.main()\n"


@dataclass
class Draft:
    """A project that is being written."""

    draws: random.Random
    parts: str
    config: str
    sizes: dict[str, object]

    def change(self, old: str, new: str) -> None:
        """Replace a text in the Python or the config."""
        assert old in self.parts + self.config, old
        self.parts, self.config = self.parts.replace(old, new), self.config.replace(old, new)

    def either(self, old: str, *news: str) -> None:
        """Replace a text by one of several."""
        self.change(old, self.draws.choice(news))


def overlapping(draft: Draft) -> None:
    begin = int(draft.sizes["train"]) - draft.draws.randint(20, 400)  # type: ignore[call-overload]  # a number
    draft.change(
        f"val: {{_target_: parts.Points, begin: {draft.sizes['train']}",
        f"val: {{_target_: parts.Points, begin: {begin}",
    )


def tested_on_training_data(draft: Draft) -> None:
    draft.change(f"begin: {draft.sizes['val']}, end: 2000", f"begin: 0, end: {draft.draws.randint(50, 500)}")


def labels_from_one(draft: Draft) -> None:
    draft.change(
        f"torch.arange(2000) % {draft.sizes['classes']}\n",
        f"torch.arange(2000) % {draft.sizes['classes']}\n        self.labels = self.targets + 1\n",
    )
    draft.change("self.targets[self.begin + index]", "self.labels[self.begin + index]")


def wrong_number_of_classes(draft: Draft) -> None:
    classes = int(draft.sizes["classes"])  # type: ignore[call-overload]  # a number
    draft.either(
        "model: {_target_: parts.Net}",
        *(f"model: {{_target_: parts.Net, outputs: {classes + by}}}" for by in (-2, -1, 1, 3)),
    )


def detached(draft: Draft) -> None:
    draft.either("block(hidden))", "block(hidden)).detach()")
    draft.change("hidden = hidden + ", "hidden = hidden.detach() + ")


def detached_stem(draft: Draft) -> None:
    draft.either(
        "torch.relu(self.stem(points))", "torch.relu(self.stem(points)).detach()", "torch.relu(self.stem(points).data)"
    )


def under_no_grad(draft: Draft) -> None:
    draft.change(
        "        hidden = torch.relu(self.stem(points))\n",
        "        with torch.no_grad():\n            hidden = torch.relu(self.stem(points))\n",
    )


def list_of_modules(draft: Draft) -> None:
    made = f"nn.Linear({draft.sizes['width']}, {draft.sizes['width']}) for _ in range({draft.sizes['depth']})"
    draft.either(f"nn.ModuleList({made})", f"[{made}]", f"tuple({made})")


def tensor_instead_of_parameter(draft: Draft) -> None:
    draft.change(
        "        self.dropout =",
        f"        self.scale = torch.ones({draft.sizes['width']}, requires_grad=True)\n        self.dropout =",
    )
    draft.change("self.head(self.dropout(hidden))", "self.head(self.dropout(hidden * self.scale))")


def unused_layer(draft: Draft) -> None:
    draft.change(
        "        self.dropout =",
        f"        self.gate = nn.Linear({draft.sizes['width']}, {draft.sizes['width']})\n        self.dropout =",
    )


def frozen_by_accident(draft: Draft) -> None:
    draft.either(
        "        self.dropout =",
        *(
            f"        {what}.requires_grad_(False)\n        self.dropout ="
            for what in ("self.stem", "self.blocks", "self")
        ),
    )


def no_learning_rate(draft: Draft) -> None:
    draft.either(f"lr: {draft.sizes['lr']}", "lr: 0.0", "lr: 1e-9")


def much_too_high_learning_rate(draft: Draft) -> None:
    draft.either(f"lr: {draft.sizes['lr']}", "lr: 50.0", "lr: 1000.0")


def detached_loss(draft: Draft) -> None:
    draft.either(
        "cross_entropy(outputs, targets)",
        "cross_entropy(outputs.detach(), targets)",
        "torch.tensor(cross_entropy(outputs, targets).item(), requires_grad=True)",
        "cross_entropy(outputs, targets).detach().requires_grad_()",
    )


def shuffled_labels(draft: Draft) -> None:
    draft.parts += """

def stack(samples):
    points, targets = zip(*samples)
    order = torch.randperm(len(targets))
    return torch.stack(points), torch.stack(targets)[order]
"""
    draft.change("loader: {", "loader: {collate_fn: {_target_: parts.stack, _partial_: true}, ")


def unseeded_data(draft: Draft) -> None:
    draft.change("        self.dataset = dataset\n", "        self.dataset = dataset\n        self.draws = DRAWS\n")
    draft.either("DRAWS", "torch.Generator().manual_seed(0)", "torch.Generator()")
    draft.change("torch.randn_like(point)", "torch.randn(point.shape, generator=self.draws)")


def numpy_generator(draft: Draft) -> None:
    draft.either(
        "torch.randn_like(point)", "torch.from_numpy(np.random.default_rng().normal(size=point.shape)).float()"
    )


def state_that_is_not_saved(draft: Draft) -> None:
    counting = """
        if self.training:
            self.done = getattr(self, 'done', 0) + 1
            loss = loss / FORM
"""
    line = "        loss = cross_entropy(outputs, targets)"
    draft.change(f"{line}\n", f"{line}{counting}")
    draft.either("FORM", "self.done", "(1 + 0.1 * self.done)")


def hook_without_state(draft: Draft) -> None:
    draft.parts += """

class Decay(Hook):
    def __init__(self):
        self.factor = 1.0

    def before_optimizer_step(self, engine, batch_idx, batch, outputs):
        self.factor *= 0.9
        for parameter in engine.task.parameters():
            parameter.grad.mul_(self.factor)
            parameter.data.mul_(1 - 0.01 * self.factor)
"""
    draft.config += "hooks: {decay: {_target_: parts.Decay}}\n"


def sum_instead_of_mean(draft: Draft) -> None:
    draft.either(
        "cross_entropy(outputs, targets)",
        "cross_entropy(outputs, targets, reduction='sum')",
        "cross_entropy(outputs, targets) * len(targets)",
    )


def normalized_over_the_batch(draft: Draft) -> None:
    draft.change("outputs = self.model(points)", "outputs = self.model(points - points.mean(0))")


KINDS: dict[str, tuple[Callable[[Draft], None], str]] = {
    "validation data overlap the training data": (overlapping, "splits"),
    "the test set is a part of the training data": (tested_on_training_data, "splits"),
    "labels begin at 1": (labels_from_one, "labels loss"),
    "a wrong number of classes": (wrong_number_of_classes, "labels loss"),
    "a layer whose input is detached": (detached, "parameters"),
    "a stem whose output is detached": (detached_stem, "parameters"),
    "a stem under no_grad": (under_no_grad, "parameters"),
    "layers in a plain list": (list_of_modules, "parameters"),
    "a tensor instead of a parameter": (tensor_instead_of_parameter, "parameters"),
    "a layer that forward does not use": (unused_layer, "parameters"),
    "layers that are frozen by accident": (frozen_by_accident, "parameters"),
    "no learning rate": (no_learning_rate, "loss"),
    "a learning rate that is much too high": (much_too_high_learning_rate, "loss"),
    "a loss that is detached": (detached_loss, "loss parameters"),
    "labels that are shuffled in a batch": (shuffled_labels, "loss"),
    "a data set with its own generator": (unseeded_data, "resume"),
    "a data set with NumPy's new generator": (numpy_generator, "resume"),
    "state that is not saved": (state_that_is_not_saved, "resume"),
    "a hook without state_dict": (hook_without_state, "resume"),
    "a loss that is a sum": (sum_instead_of_mean, "ranks"),
    "statistics of the batch of a rank": (normalized_over_the_batch, "ranks"),
}
"""For each kind of mistake, what plants it, and the checks that may find it."""
BUILT_IN_TASK = ("labels begin at 1", "a wrong number of classes")
"""Kinds that are planted in a project with the built-in task. The others have a task in `parts.py`."""


def write(folder: Path, kind: str, seed: int, *others: str) -> None:
    """Write a project with one mistake, or without one if the kind is `none`.

    Args:
        others: kinds of mistakes that are planted, too.
    """
    draws = random.Random(f"{seed} {kind}")
    train = draws.randint(900, 1200)
    sizes: dict[str, object] = {
        "seed": draws.randint(0, 10**6), "classes": draws.randint(4, 9), "features": draws.randint(6, 20),
        "width": draws.choice((16, 24, 32)), "depth": draws.randint(1, 3), "dropout": draws.choice((0.0, 0.1)),
        "noise": draws.choice((0.3, 0.5)), "train": train, "val": train + draws.randint(200, 400),
        "batch": draws.choice((16, 25, 32, 48)), "lr": draws.choice(("1e-3", "3e-3", "1e-2")),
    }  # fmt: skip
    built_in = kind in BUILT_IN_TASK or (kind == "none" and draws.random() < 0.5)
    task = "hydraloop.tasks.Classification" if built_in else "parts.Classify"
    loss = ", loss: {_target_: torch.nn.CrossEntropyLoss}" if built_in else ""
    draft = Draft(draws, PARTS.format(**sizes), CONFIG.format(**sizes, task=task, loss=loss), sizes)
    for one in (kind, *others):
        if one != "none":
            KINDS[one][0](draft)
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "config.yaml").write_text(draft.config, encoding="utf-8")
    (folder / "parts.py").write_text(draft.parts, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")


def problems(folder: Path) -> tuple[list[str], str]:
    """Return the checks that report a problem in a project, and the output."""
    done = subprocess.run(
        [sys.executable, "train.py", "check"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = re.findall(r"^(\w+) +problem ", done.stdout, re.MULTILINE)
    assert done.returncode == int(bool(found)), done.stdout + done.stderr
    return found, done.stdout


def main(seed: int = 0, *chosen: str) -> int:
    """Check a project of each kind."""
    tables.head("mistake", "found", "by", "message")
    caught, alarms = 0, 0
    kinds = [kind for kind in ("none", *KINDS) if not chosen or any(part in kind for part in chosen)]
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name) / "project", kind, seed)
            found, text = problems(Path(name) / "project")
        message = next(iter(re.findall(r"^\w+ +problem +(.*)$", text, re.MULTILINE)), "")
        by = [check for check in found if kind != "none" and check in KINDS[kind][1].split()]
        alarms += kind == "none" and bool(found)
        caught += bool(by)
        tables.row(kind, "yes" if by else "no" if kind != "none" else "—", ", ".join(found), message)
    planted = len(kinds) - ("none" in kinds)
    print(f"\nseed {seed}: {caught} of {planted} mistakes found, {alarms} false alarms")
    return int(alarms > 0 or caught < planted * 10 / 12)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, *sys.argv[2:]))
