"""`python train.py evaluate`: the metrics of a finished run; and what `predict` and `export` share with it.

These commands do not change the run. They start as many processes as the run had, so that results have the same bits.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydraloop.commands.parser import OnRun
from hydraloop.config.arguments import typed_keys
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loader, sets_of
from hydraloop.errors import UserError, printable, suggestion
from hydraloop.files import environment
from hydraloop.files.config_yaml import plain
from hydraloop.files.console import PrintableFormatter
from hydraloop.launch import start_ranks, torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.load_run import find_run, load_run
from hydraloop.launch.other_ranks import Peers

_SPLITS = ("test", "val")


def run(typed: OnRun, argv: Sequence[str], peers: Peers) -> None:
    """Print the metrics of one split as JSON. Errors: as of `run_on_ranks`."""
    run_on_ranks(typed, evaluate, argv, peers)


def evaluate(finished: FinishedRun, ranks: Distributed) -> str:
    """Return the metrics as JSON."""
    engine = finished.engine(ranks, finished.split)
    finished.data(engine)
    return json.dumps(plain(engine.test() if finished.split == "test" else engine.validate()))


class FinishedRun:
    """The run that a command names, with its config, its checkpoint and a split of its data.

    Raises:
        UserError: a wrong argument, no run directory, or no checkpoint.
    """

    def __init__(self, typed: OnRun) -> None:
        self.split = typed.own.get("split", "test")
        if self.split not in _SPLITS:
            remedy = suggestion(self.split, _SPLITS)
            raise UserError(f"there is no split {self.split!r} to evaluate", key="split", remedy=remedy)
        self.found = find_run(typed.run, typed.own.get("checkpoint", "best"), typed.overrides)
        self.cfg = self.found.cfg
        meta = self.found.saved.get("meta") or {}
        self.trained_by: int | None = meta.get("ranks")
        """How many ranks have trained; None if the checkpoint does not say it."""
        options = self.cfg.distributed
        if "distributed.nproc_per_node" not in typed_keys(typed.overrides):
            # torchrun does not write the number of ranks into the config, but the checkpoint has it.
            options.nproc_per_node = meta.get("ranks_per_node", options.nproc_per_node)
        options.nnodes = 1
        options.max_restarts = 0
        self.processes = int(options.nproc_per_node)
        """How many processes have trained the run on each machine, unless an override says otherwise."""

    def engine(self, ranks: Distributed, *splits: str) -> Engine:
        """Return the engine of the run, with its weights and the data of these splits."""
        return load_run(self.found, splits, distributed=ranks)

    def data(self, engine: Engine) -> dict[str, Loader]:
        """Return the data sets of the split by name; the name of a single one is empty.

        Raises:
            UserError: there is no data set.
        """
        loaders = sets_of(getattr(engine.loaders, self.split))
        if not loaders:
            others = [f"Use split={other}." for other in _SPLITS if self.cfg.data.get(other) is not None]
            give = f"Give it one: 'data.{self.split}={{_target_: my_project.data.Images}}'"
            raise UserError("there is no data set", key=f"data.{self.split}", remedy=[*others, give][0])
        return loaders


def new_file(typed: OnRun, default: str) -> Path:
    """Return the path of the file that a command writes.

    Raises:
        UserError: the path exists, or its folder does not exist.
    """
    path = Path(typed.own.get("output", default))
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", key="output", remedy="Create it, or name another file.")
    if path.exists():
        raise UserError(f"{path} exists", key="output", remedy="Name another file: output=…")
    return path


def run_on_ranks(
    typed: OnRun,
    command: Callable[[FinishedRun, Distributed], str],
    argv: Sequence[str],
    peers: Peers,
    *,
    processes: int | None = None,
) -> None:
    """Load a run, and call a command on each rank. Rank 0 prints what the command returns.

    Args:
        argv: all arguments of this process.
        peers: the other ranks, if this process is one of several.
        processes: how many load the run; None: as many as have trained it.

    Raises:
        UserError: as of `FinishedRun`.
        BaseException: the error of this rank, or of the rank that has failed first.
    """
    _log_warnings()
    finished = FinishedRun(typed)
    if (processes or finished.processes) > 1 and not torchrun.is_several():
        ended, _ = start_ranks.launch(finished.cfg.distributed, environment.script()[1:], argv, {})
        if ended.error is not None:
            raise ended.error
        return
    peers.skip_plan()
    ranks = connect(finished.cfg.distributed, finished.cfg.engine.device)
    try:
        text = command(finished, ranks)
    except BaseException as error:
        ranks.abandon(error)
        first = ranks.first_failure()
        if ranks.world_size == 1 or first is None:
            raise
        raise Failure.of(error, ranks.rank, first=first).error() from error
    if ranks.is_main:
        differs = finished.trained_by not in (None, ranks.world_size)
        note = f" (trained by {finished.trained_by} ranks: the last digits can differ)" if differs else ""
        print(printable(f"weights: {finished.found.file}{note}"), file=sys.stderr)  # standard output has the result
        print(text)
    ranks.close()


def _log_warnings() -> None:
    """Write warnings to standard error, on rank 0. Standard output has only the result."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING if torchrun.rank() == 0 else logging.CRITICAL, handlers=[handler])
