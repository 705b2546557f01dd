"""The loader and the bare loop as a user gets them: a data set in a folder of its own, `compose` and `build`.

    python scripts/benchmarks/user_data.py [--rounds 25]

The folder has a config and a file with data sets: 6,400 samples `[32]` with a class each, in batches of 64, one thread.
Each loader is compared with torch's DataLoader over the same data set, and the bare loop (no hooks; a 32-64-10 MLP,
AdamW) with a loop by hand over that DataLoader.

Each round times both sides for one epoch, in turn.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from loop_overhead import Clock, bare_by_hand
from measure import differences, interleaved, parser, ratios, row, spread, table
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


def main() -> None:
    """Run the benchmark and print the tables."""
    rounds = parser(__doc__, rounds=25).parse_args().rounds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    avoid_dynamo_import()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "conf").mkdir()
        (project / "conf" / "config.yaml").write_text(CONFIG, encoding="utf-8")
        (project / "sets.py").write_text(SETS, encoding="utf-8")
        sys.path.insert(0, folder)  # as for a script in this folder
        print(f"torch {torch.__version__}, one thread, {rounds} rounds; µs for a batch of {BATCH}\n")
        table("loader of", "hydraloop", "torch", "difference")
        for name in ("Plain", "DrawsFromTorch", "DrawsFromNumPy", "DrawsFromPython", "DrawsFromAll", "WholeBatches"):
            compare_loaders(name, engine_of(project, f"data.train._target_=sets.{name}"), rounds)
        slow = engine_of(project, "data.train._target_=sets.Slow", "data.loader.num_workers=2")
        compare_loaders("Slow, two workers", slow, max(5, rounds // 5))
        print()
        table("bare loop over", "hydraloop", "by hand", "ratio")
        for name in ("Plain", "DrawsFromTorch", "WholeBatches"):
            compare_loops(name, project, rounds)


def engine_of(project: Path, *options: str, **given: Any) -> hydraloop.Engine:
    """Return an engine of the project, as a user builds it."""
    cfg = hydraloop.compose(options, folder=project)
    return hydraloop.build(cfg, run_dir=Path(tempfile.mkdtemp(dir=project)), folder=project, **given)


def by_torch(loader: Any) -> DataLoader[Any]:
    """Return what a user writes without hydraloop, for the data set of a loader."""
    dataset, workers = loader.dataset, loader.num_workers
    collate = (lambda batch: batch) if hasattr(dataset, "__getitems__") else None
    return DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate
    )


def compare_loaders(name: str, engine: hydraloop.Engine, rounds: int) -> None:
    """Time an epoch of hydraloop's loader and of torch's, and print a row."""
    loader: Any = engine.loaders.train
    torchs, epochs = by_torch(loader), iter(range(10**9))

    def ours() -> float:
        loader.set_epoch(next(epochs))
        return microseconds(loader)

    times = interleaved({"ours": ours, "torch": lambda: microseconds(torchs)}, rounds, warm_up=2)
    row(name, *(spread(values, 0) for values in (*times.values(), differences(*times.values()))))


def microseconds(batches: Iterable[Any]) -> float:
    """Return the time of a batch."""
    start, number = perf_counter(), 0
    for _ in batches:
        number += 1
    return (perf_counter() - start) / number * 1e6


def compare_loops(name: str, project: Path, rounds: int) -> None:
    """Time an epoch of training by hydraloop and by hand, and print a row."""
    option = f"data.train._target_=sets.{name}"
    loader: Any = engine_of(project, option).loaders.train

    def ours() -> float:
        clock = Clock()
        engine = engine_of(project, option, hooks={"clock": clock})
        engine.train()
        return clock.seconds / engine.progress.iteration * 1e6

    def by_hand() -> float:
        batches = by_torch(loader)
        return bare_by_hand(batches) / len(batches) * 1e6

    times = interleaved({"ours": ours, "by hand": by_hand}, rounds, warm_up=2)
    row(name, *(spread(values, 0) for values in times.values()), spread(ratios(*times.values())))


if __name__ == "__main__":
    main()
