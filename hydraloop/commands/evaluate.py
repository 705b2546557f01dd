"""`python train.py evaluate`: the metrics of a finished run; and what `predict` and `export` share with it."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path

from hydraloop.commands.parser import OnRun
from hydraloop.config.arguments import typed_keys
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loader, sets_of
from hydraloop.errors import UserError, suggestion
from hydraloop.files.config_yaml import plain
from hydraloop.launch.loading import find_run, load_run

_SPLITS = ("test", "val")


class FinishedRunCommand(ABC):
    """A command for a finished run. Its config gets the number of processes with which the run was trained.

    Raises:
        UserError: a wrong argument, no run directory, or no checkpoint.
    """

    def __init__(self, typed: OnRun) -> None:
        self.split = typed.own.get("split", "test")
        if self.split not in _SPLITS:
            remedy = suggestion(self.split, _SPLITS)
            raise UserError(f"there is no split {self.split!r} to evaluate", key="split", remedy=remedy)
        self.found = find_run(typed.run, typed.own.get("checkpoint", "best"), typed.overrides)
        self.cfg, meta = self.found.cfg, self.found.saved.get("meta") or {}
        self.trained_by: int | None = meta.get("ranks")
        """How many ranks have trained; None if no checkpoint says so."""
        options = self.cfg.distributed
        if "distributed.nproc_per_node" not in typed_keys(typed.overrides):  # of a run of torchrun, the config says 1
            options.nproc_per_node = meta.get("ranks_per_node", options.nproc_per_node)
        options.nnodes, options.max_restarts = 1, 0

    @property
    def processes(self) -> int:
        """How many processes have to be started for it, if no launcher has. Valid until `run`."""
        return int(self.cfg.distributed.nproc_per_node)

    @abstractmethod
    def run(self, ranks: Distributed) -> str:
        """Do it; called on each rank. Returns what to print on rank 0."""

    def engine(self, ranks: Distributed, *splits: str) -> Engine:
        """Return the engine of the run, with its weights and the data of some splits."""
        return load_run(self.found, splits, distributed=ranks)

    def data(self, engine: Engine) -> dict[str, Loader]:
        """Return the data sets of the split.

        Raises:
            UserError: there is no data set.
        """
        found = sets_of(getattr(engine.loaders, self.split))
        if not found:
            others = [f"Use split={other}." for other in _SPLITS if self.cfg.data.get(other) is not None]
            give = f"Give it one: 'data.{self.split}={{_target_: my_project.data.Images}}'"
            remedy = [*others, give][0]
            raise UserError("there is no data set", key=f"data.{self.split}", remedy=remedy)
        return found


def check_output(path: Path) -> None:
    """Refuse a file in a folder that does not exist, a folder, and a file that exists."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", key="output", remedy="Create it, or name another file.")
    if path.is_dir():
        raise UserError(f"{path} is a folder", key="output", remedy="Name a file in it, or another one.")
    if path.exists():
        free = next(other for n in count(2) if not (other := path.with_stem(f"{path.stem}_{n}")).exists())
        remedy = f"Name another file: output={shlex.quote(str(free))}"
        raise UserError(f"{path} exists", key="output", remedy=remedy)


class Evaluate(FinishedRunCommand):
    """Evaluates the model on one split."""

    def run(self, ranks: Distributed) -> str:
        """Return the metrics as JSON."""
        engine = self.engine(ranks, self.split)
        self.data(engine)
        return json.dumps(plain(engine.test() if self.split == "test" else engine.validate()))
