"""The loader and the bare loop as a user gets them: a data set in a folder of its own, `compose` and `build`.

    python scripts/benchmarks/user_data.py [--rounds 25]

The folder has a config and a file with data sets: 6,400 samples `[32]` with a class each, in batches of 64, one thread.
Each loader is compared with torch's DataLoader over the same data set, and the bare loop (no hooks; a 32-64-10 MLP,
AdamW) with a loop by hand over that DataLoader.

Each round times both sides for one epoch, in turn; torch's side first in every other round. A figure is the median over
the rounds with minimum and maximum. Differences and ratios are computed for each round, so changes in the machine's
speed have little effect.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import hydraloop
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import

BATCH = 64
CONFIG = """
defaults:
  - hydraloop
  - data: base
  - task: classification
  - optimizer: adamw
  - scheduler: []
  - precision: fp32
  - default_hooks: []
  - hooks: []
  - _self_
data:
  train: {_target_: sets.Plain}
  loader: {batch_size: 64}
task:
  model:
    _target_: torch.nn.Sequential
    _args_:
      - {_target_: torch.nn.Linear, in_features: 32, out_features: 64}
      - {_target_: torch.nn.ReLU}
      - {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
  metrics: {}
engine: {threads: 1, max_epochs: 1, test: false}
"""
SETS = '''
import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset


class Plain(Dataset):
    """Samples that draw nothing."""

    def __init__(self, samples=6400):
        self.inputs, self.targets = torch.randn(samples, 32), torch.randint(10, (samples,))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class DrawsFromTorch(Plain):
    def __getitem__(self, index):
        return self.inputs[index] + torch.rand(()), self.targets[index]


class DrawsFromNumPy(Plain):
    def __getitem__(self, index):
        return self.inputs[index] + np.random.rand(), self.targets[index]


class DrawsFromPython(Plain):
    def __getitem__(self, index):
        return self.inputs[index] + random.random(), self.targets[index]


class DrawsFromAll(Plain):
    def __getitem__(self, index):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return self.inputs[index] + noise, self.targets[index]


class WholeBatches(Plain):
    """Returns stacked batches, as a data set of Hugging Face in torch's format."""

    def __getitems__(self, indices):
        chosen = torch.tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


class Slow(Plain):
    """Samples that take 1 ms, as small pictures do."""

    def __init__(self):
        super().__init__(1280)

    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)
'''


class Clock(hydraloop.Hook):
    """Measures the epochs from before the first batch to after the last one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def before_train_epoch(self, engine: Any) -> None:
        """Start."""
        self.seconds = -perf_counter()

    def after_train_epoch(self, engine: Any) -> None:
        """Stop."""
        self.seconds += perf_counter()


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    avoid_dynamo_import()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "conf").mkdir()
        (project / "conf" / "config.yaml").write_text(CONFIG, encoding="utf-8")
        (project / "sets.py").write_text(SETS, encoding="utf-8")
        sys.path.insert(0, folder)  # as for a script in this folder
        print(f"torch {torch.__version__}, one thread, {rounds} rounds; µs for a batch of {BATCH}, median (min to max)")
        print(f"{'loader of':<24}{'hydraloop':>24}{'torch':>24}{'difference':>24}{'a sample':>10}")
        for name in ("Plain", "DrawsFromTorch", "DrawsFromNumPy", "DrawsFromPython", "DrawsFromAll", "WholeBatches"):
            compare(name, *loaders(project, f"data.train._target_=sets.{name}"), rounds)
        workers = ("data.train._target_=sets.Slow", "data.loader.num_workers=2")
        compare("Slow, two workers", *loaders(project, *workers), max(5, rounds // 5))
        print(f"{'bare loop over':<24}{'hydraloop':>24}{'by hand':>24}{'difference':>24}{'ratio':>10}")
        for name in ("Plain", "DrawsFromTorch", "WholeBatches"):
            ours, theirs = loops(project, f"data.train._target_=sets.{name}")
            compare(name, ours, theirs, rounds, per_sample=False)


def engine_of(project: Path, *options: str, **given: Any) -> hydraloop.Engine:
    """Return an engine of the project, as a user builds it."""
    cfg = hydraloop.compose(options, folder=project)
    return hydraloop.build(cfg, run_dir=Path(tempfile.mkdtemp(dir=project)), folder=project, **given)


def by_torch(dataset: Any, workers: int = 0) -> DataLoader[Any]:
    """Return what a user writes without hydraloop."""
    collate = (lambda batch: batch) if hasattr(dataset, "__getitems__") else None
    return DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate
    )


def loaders(project: Path, *options: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return functions that time one epoch [µs a batch]: of hydraloop's loader and of torch's."""
    loader: Any = engine_of(project, *options).loaders.train
    torchs = by_torch(loader.dataset, loader.num_workers)
    epochs = iter(range(10**9))

    def ours() -> float:
        loader.set_epoch(next(epochs))
        return seconds_of(loader)

    return ours, lambda: seconds_of(torchs)


def seconds_of(batches: Iterable[Any]) -> float:
    """Return the time of a batch [µs]."""
    start, number = perf_counter(), 0
    for _ in batches:
        number += 1
    return (perf_counter() - start) / number * 1e6


def loops(project: Path, *options: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return functions that time one epoch of training [µs an iteration]: by hydraloop and by hand."""
    dataset: Any = engine_of(project, *options).loaders.train.dataset  # type: ignore[union-attr]

    def ours() -> float:
        clock = Clock()
        engine = engine_of(project, *options, hooks={"clock": clock})
        engine.train()
        return clock.seconds / engine.progress.iteration * 1e6

    def theirs() -> float:
        loader = by_torch(dataset)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())
        start = perf_counter()
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (perf_counter() - start) / len(loader) * 1e6

    return ours, theirs


def compare(
    name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int, *, per_sample: bool = True
) -> None:
    """Print a row: both sides, their difference, and the difference for each sample or the ratio."""
    mine: list[float] = []
    others: list[float] = []
    for round_ in range(-2, rounds):  # two rounds are not counted
        sides = [(mine, ours), (others, theirs)]
        for times, side in sides if round_ % 2 else sides[::-1]:
            taken = side()
            if round_ >= 0:
                times.append(taken)
    differences = [a - b for a, b in zip(mine, others, strict=True)]
    last = (
        f"{statistics.median(differences) / BATCH:10.2f}"
        if per_sample
        else f"{statistics.median(a / b for a, b in zip(mine, others, strict=True)):10.2f}"
    )
    print(f"{name:<24}{_spread(mine)}{_spread(others)}{_spread(differences)}{last}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):10.0f} ({min(values):.0f} to {max(values):.0f})".rjust(24)


if __name__ == "__main__":
    main()
