"""Searches whose jobs are played in this process: the value of a job is a function of its overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.config import arguments
from hydraloop.files.result import Objective, Result
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps import search as searching
from hydraloop.sweeps.axes import Space
from hydraloop.sweeps.controller import Controller
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.job_directories import JobDirectories
from hydraloop.sweeps.job_source import SearchSource
from hydraloop.sweeps.overrides_to_axes import select
from hydraloop.sweeps.search import Rule
from hydraloop.sweeps.search_history import History, HistoryReader, Trial
from hydraloop.sweeps.sweep_directory import Jobs, SweepDirectory
from tests.sweeps.test_controller import NO_GRID, Played, Seen
from tests.sweeps.test_directory import DESCRIPTION

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


class KilledError(Exception):
    """Raised in a job, and ends the controller without any cleaning up."""


def distance(values: Mapping[str, str]) -> float:
    """Return how far the learning rate is from 1e-2: a loss."""
    return abs(math.log10(float(values["optimizer.lr"])) + 2)


@dataclass
class Search:
    """A search that can be continued.

    Args:
        folder: for its directory.
        overrides: with the dimensions.
        options: `sweep.*`.
    """

    folder: Path
    overrides: tuple[str, ...] = (LR,)
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Mapping[str, str]], float] = distance
    validations: float = math.inf
    """The number of validations of a whole run."""
    workers: int = 2
    kills: Callable[[], bool] = lambda: False
    """Asked before each step of a job: whether everything is killed there."""
    started: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    adopted: dict[int, Request] = field(default_factory=dict)
    """Jobs of an earlier controller that a scheduler still has."""

    def __post_init__(self) -> None:
        self.sweep = OmegaConf.merge(OmegaConf.structured(SweepConf), {"trials": 20, **self.options})
        space = select(arguments.parse(self.overrides), [], self.sweep)
        assert isinstance(space, Space)
        self.space = space
        given = self.sweep.objectives.items()
        objectives: dict[str, Rule] = {name: "greater" if how == "max" else "less" for name, how in given}
        sampler = self.sweep.sampler if isinstance(self.sweep.sampler, str) else dict(self.sweep.sampler)
        options = sampler, self.sweep.prune, self.sweep.promote, self.sweep.rung
        self.search = searching.Search(space, self.sweep.trials, 0, *options, objectives)
        path = self.folder / "sweep"
        described = replace(DESCRIPTION, jobs=Jobs.of_search(self.search))
        self.directory = SweepDirectory.load(path) if path.exists() else SweepDirectory.create(path, described)

    def run(self, **options: Any) -> Controller:
        """Run the search to its end, or until it is killed."""
        directory = SweepDirectory.load(self.directory.path)
        source = SearchSource(directory, self.search, self.sweep.enqueue)
        played = Played(directory, self._step, running=self.adopted)
        loop = Controller(
            directory, played, source, Shares(self.workers), Seen(), JobDirectories(directory, NO_GRID), **options
        )  # type: ignore[arg-type]
        loop.run()
        return loop

    def _step(self, played: Played, request: Request) -> int:
        self.started.append((request.number, request.lines))
        values = dict(line.split("=", 1) for line in request.lines)
        if self.kills():
            raise KilledError
        try:
            loss = self.loss(values)
        except ValueError as error:  # while it is built
            self._write(request, Result("failed", error=str(error)))
            return 1
        result = Result("finished", objective=Objective("loss", "less", loss, 1), progress={"iteration": 1})
        if math.isnan(loss):
            result = replace(result, status="failed", error="the loss is NaN")
        elif float(values.get("engine.pause_after", math.inf)) < self.validations:
            reason = f"preempted by engine.pause_after={values['engine.pause_after']}"
            result = replace(result, status="interrupted", reason=reason)
        self._write(request, replace(result, seconds=float(request.attempt)))
        return 0

    def _write(self, request: Request, result: Result) -> None:
        result.write(Path(request.run_dir))

    def history(self) -> History:
        """What the search knows."""
        return HistoryReader(SweepDirectory.load(self.directory.path), self.search).read()

    def best(self) -> Trial:
        """The complete trial with the lowest loss."""
        complete = (trial for trial in self.history().trials if trial.state == "complete")
        return min(complete, key=lambda trial: (trial.values or (math.inf,), trial.number))
