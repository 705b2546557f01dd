"""What `python -m hydraloop evaluate|predict|export` do with a finished run, on each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraloop.cli import exports, predictions
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.loading import find, load_found
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loader, sets_of
from hydraloop.errors import UserError, suggestion
from hydraloop.run.config_yaml import plain

_SPLITS = ("test", "val")


@dataclass
class Request:
    """What a command line asks for."""

    command: str
    """`evaluate`, `predict` or `export`."""
    run: Path
    format: str = ""
    """Of an export."""
    split: str = "test"
    checkpoint: str = "best"
    output: str = ""
    overrides: list[str] = field(default_factory=list)


class Command:
    """A command whose arguments have been checked as far as that needs no data and no model.

    Raises:
        UserError: a wrong argument, no run directory, or no checkpoint.
    """

    def __init__(self, request: Request) -> None:
        if request.split not in _SPLITS:
            remedy = suggestion(request.split, _SPLITS)
            raise UserError(f"there is no split {request.split!r} to evaluate", key="split", remedy=remedy)
        self._request, self._output = request, Path(request.output)
        if request.command == "export":
            exports.check_format(request.format)
        if request.command != "evaluate":
            predictions.check_output(self._output)
        if request.command == "predict":
            predictions.check_suffix(self._output)
        self._found = find(request.run, request.checkpoint, request.overrides)
        self.cfg = self._found.cfg
        self.source = f"weights: {self._found.file}"
        """What is used, for the terminal."""
        self.differs = False
        """Whether the command found a difference."""
        meta = self._found.saved.get("meta") or {}
        options = self.cfg.distributed
        if "distributed.nproc_per_node" not in typed_keys(request.overrides):  # of a run of torchrun, the config says 1
            options.nproc_per_node = meta.get("ranks_per_node", options.nproc_per_node)
        if request.command == "export":
            options.nproc_per_node = 1
            self.cfg.engine.compile = False
        self.processes: int = options.nproc_per_node
        """How many processes have to be started for it, if no launcher has."""
        self.trained_by: int | None = meta.get("ranks")
        """How many ranks have trained; None if the checkpoint does not say so."""

    def run(self, ranks: Distributed) -> str:
        """Do it; called on each rank. Returns what to print on rank 0: the metrics as JSON, or the file written."""
        if self._request.command == "evaluate":
            return self._evaluate(self._engine(ranks, self._request.split))
        if self._request.command == "predict":
            self._predict(self._engine(ranks, self._request.split))
        else:
            self._export(ranks)
        return str(self._output)

    def _engine(self, ranks: Distributed, *splits: str) -> Engine:
        return load_found(self._found, splits, distributed=ranks)

    def _evaluate(self, engine: Engine) -> str:
        self._data(engine)
        metrics = engine.test() if self._request.split == "test" else engine.validate()
        return json.dumps(plain(metrics))

    def _predict(self, engine: Engine) -> None:
        parts = self._predictions(engine)
        if engine.distributed.is_main:
            predictions.write(self._output, parts)
        else:
            for _ in parts:  # takes part in collectives
                pass

    def _predictions(self, engine: Engine) -> Iterator[tuple[str, Any]]:
        for name, loader in self._data(engine).items():
            for part in engine.predict(loader):
                yield name, part

    def _data(self, engine: Engine) -> dict[str, Loader]:
        """Return the data sets of the split."""
        split = self._request.split
        found = sets_of(getattr(engine.loaders, split))
        if not found:
            others = [f"Use split={other}." for other in _SPLITS if self.cfg.data.get(other) is not None]
            remedy = others[0] if others else f"Give it one: 'data.{split}={{_target_: my_project.data.Images}}'"
            raise UserError("there is no data set", key=f"data.{split}", remedy=remedy)
        return found

    def _export(self, ranks: Distributed) -> None:
        name = self._request.format
        found = [split for split in ("val", "test", "train") if self.cfg.data.get(split) is not None]
        engine = self._engine(ranks, *(found[:1] if name != "safetensors" else ()))
        exports.write(engine, self._found.file, name, self._output)
