"""Hooks that make records of ten values and time the calls in the training thread, by the engine and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.records.entries import position

VALUES = 10
IN_A_ROW = 50
"""Number of calls one after the other, after training."""


Way = Callable[[int, dict[str, float]], object]


class TimedRecords(Hook):
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

    def ways(self, engine: Engine) -> dict[str, Way]:
        """Functions that make a record from an iteration and its values, by name."""
        return {
            "hydraloop": lambda at, values: engine.log_record(
                {**position(engine.progress, "train"), "iteration": at, **values}
            )
        }

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Make records at the interval."""
        self.ended.append(perf_counter())
        if engine.progress.iteration % self.interval == 0:
            for _ in range(self.at_once):
                name, way = self._turns[self.made % len(self._turns)]
                iteration = engine.progress.iteration if self.at_once == 1 else self.made + 1
                self._call(way, iteration, self.took.setdefault(name, []))

    def before_train(self, engine: Engine) -> None:
        """Set the order of the functions."""
        self._turns = list(self.ways(engine).items())

    def after_train(self, engine: Engine) -> None:
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

    def before_train(self, engine: Engine) -> None:
        """Import the libraries and open their outputs."""
        import mlflow
        import torch.utils.tensorboard
        import wandb
        from mlflow.entities import Metric

        self._metric, here = Metric, Path.cwd()
        self._mlflow = mlflow.MlflowClient(tracking_uri=f"sqlite:///{here}/mlflow.db")
        self._run_id = self._mlflow.create_run(self._mlflow.create_experiment("by hand")).info.run_id
        self._wandb = wandb.init(mode="offline", dir=str(here), settings=wandb.Settings(console="off", silent=True))
        self._board = torch.utils.tensorboard.SummaryWriter(str(here / "board"))
        self._file = (here / "by_hand.jsonl").open("a", encoding="utf-8")
        self._waiting: list[Any] = []
        super().before_train(engine)

    def after_train(self, engine: Engine) -> None:
        """Make the remaining records, and close the outputs."""
        self._wait()
        super().after_train(engine)
        self._wait()
        self._wandb.finish()
        self._board.close()
        self._file.close()

    def ways(self, engine: Engine) -> dict[str, Way]:
        """Functions by name. Those that leave work to threads come last."""
        return {
            "a line of JSON, flushed": self._write,
            "mlflow, log_metric, one value": self._log_metric,
            "mlflow, log_batch, ten values": self._log_batch,
            "TensorBoard, ten add_scalar": self._add_scalars,
            "wandb.log": lambda at, values: self._wandb.log(values, step=at),
            "mlflow, log_metric, one value, asynchronous": self._log_metric_later,
            "mlflow, log_batch, ten values, asynchronous": self._log_batch_later,
        }

    def _wait(self) -> None:
        while self._waiting:
            self._waiting.pop().wait()

    def _log_metric(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metric(self._run_id, "value", values["value_0"], step=step)

    def _log_metric_later(self, step: int, values: dict[str, float]) -> None:
        sent = self._mlflow.log_metric(self._run_id, "later", values["value_0"], step=step, synchronous=False)
        self._waiting.append(sent)

    def _log_batch(self, step: int, values: dict[str, float]) -> None:
        metrics = [self._metric(name, value, step, step) for name, value in values.items()]
        self._mlflow.log_batch(self._run_id, metrics)

    def _log_batch_later(self, step: int, values: dict[str, float]) -> None:
        metrics = [self._metric(name, value, step, step) for name, value in values.items()]
        self._waiting.append(self._mlflow.log_batch(self._run_id, metrics, synchronous=False))

    def _add_scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"iteration": step, **values}) + "\n")
        self._file.flush()
