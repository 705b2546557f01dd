"""What `evaluate`, `predict` and `export` do with a finished run: they find its weights, and load it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from hydraloop.cli.loading import find, load_found
from hydraloop.commands.on_ranks import RankCommand
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loader, sets_of
from hydraloop.errors import UserError, suggestion

_SPLITS = ("test", "val")


class FinishedRunCommand(RankCommand):
    """A command for a finished run.

    Args:
        args: of the command line, with the directory `run`.
        given: the command's own `key=value` arguments.
        overrides: changes of the run's config.

    Raises:
        UserError: a wrong argument, no run directory, or no checkpoint.
    """

    def __init__(self, args: argparse.Namespace, given: Mapping[str, str], overrides: Sequence[str]) -> None:
        self.split = given.get("split", "test")
        if self.split not in _SPLITS:
            remedy = suggestion(self.split, _SPLITS)
            raise UserError(f"there is no split {self.split!r} to evaluate", key="split", remedy=remedy)
        self.found = find(args.run, given.get("checkpoint", "best"), overrides)
        self.source = f"weights: {self.found.file}"
        super().__init__(self.found.cfg, self.found.saved.get("meta") or {}, overrides)

    def engine(self, ranks: Distributed, *splits: str) -> Engine:
        """Return the engine of the run, with its weights and the data of some splits."""
        return load_found(self.found, splits, distributed=ranks)

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
