"""Hooks that make records of ten values and time the calls in the training thread, by the engine and by hand.

`python tracker_hooks.py TimedRecords|ByHand INTERVAL AT_ONCE [override …]` trains with one of them in a project folder,
and writes what it has measured to `measured.json` there.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import hydraloop

VALUES = 10
IN_A_ROW = 50
"""Number of calls one after the other, after training."""
USUAL = (
    "engine.val_interval=null",
    "engine.test=false",
    "data.loader.batch_size=64",
    "default_hooks.logger.interval=null",
    "default_hooks.checkpoint.interval=null",
)
Way = Callable[[int, dict[str, float]], object]


class TimedRecords(hydraloop.Hook):
    """Makes records at an interval. Stores the duration of each call and the time at which each iteration ended.

    Args:
        interval: iterations between two records.
        at_once: number of records at each interval. Each one has the number of the next iteration.
    """

    def __init__(self, *, interval: int, at_once: int = 1) -> None:
        self.interval, self.at_once = interval, at_once
        self.made = 0
        self.took: dict[str, list[float]] = {}
        """Seconds of each call between iterations, by name of the call."""
        self.took_in_a_row: dict[str, list[float]] = {}
        """Seconds of each call directly after another one, by name of the call."""
        self.ended: list[float] = []
        """Time at which each iteration ended, in seconds."""

    def ways(self, engine: hydraloop.Engine) -> dict[str, Way]:
        """Functions that make a record from an iteration and its values, by name."""
        return {"hydraloop": lambda at, values: engine.log_record({"mode": "train", "iteration": at, **values})}

    def before_train(self, engine: hydraloop.Engine) -> None:
        """Set the order of the functions."""
        self._turns = list(self.ways(engine).items())

    def after_train_iter(
        self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]
    ) -> None:
        """Make records at the interval."""
        self.ended.append(perf_counter())
        if engine.progress.iteration % self.interval == 0:
            for _ in range(self.at_once):
                name, way = self._turns[self.made % len(self._turns)]
                iteration = engine.progress.iteration if self.at_once == 1 else self.made + 1
                self._call(way, iteration, self.took.setdefault(name, []))

    def after_train(self, engine: hydraloop.Engine) -> None:
        """Make more records, one after the other."""
        for name, way in self._turns:
            for number in range(IN_A_ROW):
                self._call(way, engine.progress.iteration + number + 1, self.took_in_a_row.setdefault(name, []))

    def _call(self, way: Way, iteration: int, took: list[float]) -> None:
        self.made += 1
        values = {f"value_{number}": self.made / (number + 7) for number in range(VALUES)}
        start = perf_counter()
        way(iteration, values)
        took.append(perf_counter() - start)


class ByHand(TimedRecords):
    """Does the same with each library's functions in the training thread. Each record uses the next function."""

    def before_train(self, engine: hydraloop.Engine) -> None:
        """Import the libraries and open their outputs."""
        import mlflow
        import torch.utils.tensorboard
        import wandb

        here = Path.cwd()
        self._mlflow = mlflow.MlflowClient(tracking_uri=f"sqlite:///{here}/mlflow.db")
        self._run_id = self._mlflow.create_run(self._mlflow.create_experiment("by hand")).info.run_id
        self._wandb = wandb.init(mode="offline", dir=str(here), settings=wandb.Settings(console="off", silent=True))
        self._board = torch.utils.tensorboard.SummaryWriter(str(here / "board"))
        self._file = (here / "by_hand.jsonl").open("a", encoding="utf-8")
        self._waiting: list[Any] = []
        super().before_train(engine)

    def after_train(self, engine: hydraloop.Engine) -> None:
        """Make the remaining records, and close the outputs."""
        super().after_train(engine)
        while self._waiting:
            self._waiting.pop().wait()
        self._wandb.finish()
        self._board.close()
        self._file.close()

    def ways(self, engine: hydraloop.Engine) -> dict[str, Way]:
        """Functions by name. The one that leaves work to threads comes last."""
        return {
            "one line of JSON, flushed": self._write,
            "MLflow's log_metric, one value": self._log_metric,
            "ten TensorBoard scalars": self._add_scalars,
            "wandb.log": lambda at, values: self._wandb.log(values, step=at),
            "MLflow's log_metric, one value, asynchronous": self._log_metric_later,
        }

    def _log_metric(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metric(self._run_id, "value", values["value_0"], step=step)

    def _log_metric_later(self, step: int, values: dict[str, float]) -> None:
        sent = self._mlflow.log_metric(self._run_id, "later", values["value_0"], step=step, synchronous=False)
        self._waiting.append(sent)

    def _add_scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"iteration": step, **values}) + "\n")
        self._file.flush()


def main(hook: str, interval: str, at_once: str, *overrides: str) -> None:
    """Train, and write what was measured."""
    logging.disable(logging.INFO)  # no lines in the terminal
    added = [f"+hooks.timed={{_target_: tracker_hooks.{hook}, interval: {interval}, at_once: {at_once}}}"]
    cfg = hydraloop.compose([*USUAL, *overrides, *added], folder=Path.cwd(), trusted=["tracker_hooks"])
    engine = hydraloop.build(cfg, run_dir=Path("run"))
    engine.train()
    timed: Any = engine.hooks["timed"]
    measured = {"took": timed.took, "took_in_a_row": timed.took_in_a_row, "ended": timed.ended}
    Path("measured.json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
