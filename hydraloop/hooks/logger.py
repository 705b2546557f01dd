"""LoggerHook: every few iterations one record; to a file those of every hook, as trackers see them."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.device.gpu_peak import peak_tflops
from hydraloop.engine.hook import Hook, Mode, Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.report.summary import clock, duration, number
from hydraloop.errors import UserError
from hydraloop.hooks.shared.record_entries import check_names, position
from hydraloop.run.record_log import FILENAME, RecordLog
from hydraloop.tracking.follower.cutting import cut_behind

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_HIDDEN = frozenset({"mode", "epoch", "iteration", "momentum"})
"""In the record, not repeated in the terminal's line."""


class LoggerHook(Hook):
    """Makes the records of a run, and keeps those of every hook.

    In training, every `interval` iterations: `{"mode": "train", "epoch", "iteration", "lr", "momentum", "eta" [s],
    "time" [s], "data_time" [s], "memory" [MiB], "grad_norm", "loss", …}`, what there is of it; scalars are means over
    the iterations since the last record and over all ranks. After each validation and test: `{"mode": "val" or
    "test", "epoch", "iteration", …metrics}`. `epoch` counts from 1, the current one included; `iteration` those
    completed. `memory` is the peak so far, on rank 0: allocated by torch on an accelerator, else of the process.
    `mfu`, 0 .. 1, is the share of the device's peak (`engine.peak_tflops`) that the model's own operations of the
    last batch, in the mean time, make use of; there where the task counts them (`Task.flops`). `skipped`: optimizer
    steps that fp16 has skipped so far, if any.

    It gives them to `engine.log_record`, as any hook does, and a line of each to the terminal. Whatever comes through
    `engine.log_record`, from whatever hook, goes to `<run_dir>/metrics.jsonl`, one line of JSON a record, flushed, with
    a `timestamp` [s since 1970] at its end: the file is the truth, and trackers are views of it. What another hook has
    to say in the terminal it says itself. JSON has no NaN and no infinity: there the value is null, and `"nonfinite":
    {"loss": "nan"}` (or "inf", "-inf") says what it was. A resumed run first takes out the records behind its
    checkpoint, which it will make again; they are kept in `metrics.cut_<n>.jsonl`.

    A record is flat: numbers, strings and None; one that does not say where in the run it belongs gets the present
    place. One that is made before this hook's before_run or behind its after_run is written, too. No scalar and no
    metric may be called `mode`, `epoch`, `iteration`, `nonfinite` or `timestamp`.

    Mount points: before_run, before_train, after_train_iter, on_log, after_val_epoch, after_test_epoch, after_run.
    Priority BELOW_NORMAL, MMEngine's: behind `runtime_info`, `timer` and `grad_clip`, whose numbers it takes, and
    before `param_scheduler`, so that `lr` is the one this iteration used; a hook behind it finds a record in the file
    when its own `on_log` is called. One host sync and one exchange among the hosts a record, none in between. No state.

    Args:
        interval: iterations between two records of training; None makes none.
        ignore_last: whether to leave the rest of an epoch, shorter than `interval`, for the next record.

    Raises:
        UserError: an interval below 1; a metric or a scalar with the name of an entry at the front of each record.
    """

    priority = Priority.BELOW_NORMAL
    runs_after = ("runtime_info", "timer", "grad_clip")
    collective = True

    def __init__(self, *, interval: int | None = 10, ignore_last: bool = True) -> None:
        if interval is not None and interval < 1:
            raise UserError(
                f"interval {interval} is below 1", key="interval", remedy="Use 1 or more, or null for none."
            )
        self._due = Every(interval).due
        self._at_epoch_end = not ignore_last and interval is not None
        self._file: RecordLog | None = None
        self._running = self._warned = self._resumed = False

    def before_run(self, engine: Engine) -> None:
        """Check the names of the metrics, and tell the trackers that there is a record log.

        Raises:
            UserError: a metric has the name of an entry at the front of each record.
        """
        check_names(engine.metric_names, key="task.metrics", remedy="Give the metric another name.")
        self._running = True
        path = engine.run_dir / FILENAME
        engine.messages.provide("record_log", lambda: path)

    def before_train(self, engine: Engine) -> None:
        """Where a run is resumed, bring the file back to where its checkpoint was written."""
        if engine.settings.resume is not None and not self._resumed and engine.distributed.is_main:
            progress = engine.progress
            cut_behind(
                engine.run_dir / FILENAME,
                iteration=progress.iteration,
                last_validation=progress.last_validation,
            )
        self._resumed = True

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Make a record where one is due."""
        if self._due(engine.progress.iteration) or (self._at_epoch_end and self.end_of_epoch(engine, batch_idx)):
            means = engine.messages.means(engine.distributed)
            check_names(means, remedy="A hook or task adds it to engine.messages: let it use another name.")
            if engine.distributed.is_main:
                self._warn_of_nonfinite(engine, means)
                self._put(engine, _train_record(engine, means, batch))

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Write a record, whoever made it.

        Raises:
            TypeError: there is something in it that is no plain number or string.
        """
        if "iteration" not in record:  # whoever reads the file later cannot know
            record = {**position(engine, "train"), **record}
        if self._file is None:
            self._file = RecordLog(engine.run_dir / FILENAME)
        self._file.append(record)
        if not self._running:
            self._close()

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Make the record of a validation."""
        self._evaluated(engine, "val", metrics)

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Make the record of a test."""
        self._evaluated(engine, "test", metrics)

    def after_run(self, engine: Engine) -> None:
        """Close the file; a record that comes later opens it for itself alone."""
        self._running = False
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _warn_of_nonfinite(self, engine: Engine, means: Mapping[str, float]) -> None:
        """Once a run: everything after a loss that is not finite is usually lost time."""
        loss = means.get("loss", 0.0)
        if self._warned or math.isfinite(loss):
            return
        self._warned = True
        log.warning("the loss is %s since iteration %d or a little earlier", loss, engine.progress.iteration)

    def _evaluated(self, engine: Engine, mode: Mode, metrics: Mapping[str, float]) -> None:
        if engine.distributed.is_main:
            self._put(engine, {**position(engine, mode), **metrics})

    def _put(self, engine: Engine, record: dict[str, Any]) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("%s", format_record(record, engine.max_epochs, engine.max_iters))
        engine.log_record(record)


def _train_record(engine: Engine, means: dict[str, float], batch: Any) -> dict[str, Any]:
    record = position(engine, "train")
    for name in ("lr", "momentum", "eta"):
        value = engine.messages.read(name)
        if value is not None:
            record[name] = value
    for name in ("time", "data_time"):
        if name in means:
            record[name] = means.pop(name)
    record["memory"] = peak_memory(engine.device)
    peak = engine.settings.peak_tflops or peak_tflops(engine.device, engine.precision.name)
    if peak is not None and "time" in record and (flops := engine.task.flops(batch)) is not None:
        record["mfu"] = flops / (record["time"] * peak * 1e12)
    if engine.precision.skipped:
        record["skipped"] = engine.precision.skipped
    losses = {name: value for name, value in means.items() if "loss" in name}
    record.update((name, value) for name, value in means.items() if name not in losses)
    record.update(losses)
    return record


def format_record(record: Mapping[str, Any], max_epochs: int, max_iters: int) -> str:
    """One line for people: `epoch 3/20  iter 60/400  lr 9.1e-04  eta 0:00:04  time 4.2ms  …  loss 0.1234`."""
    parts = [] if record["mode"] == "train" else [record["mode"]]
    parts += [f"epoch {record['epoch']}/{max_epochs}", f"iter {record['iteration']}/{max_iters}"]
    train = record["mode"] == "train"
    for name, value in record.items():
        if name not in _HIDDEN:
            parts.append(_FORMATS[name](value) if train and name in _FORMATS else f"{name} {number(value)}")
    return "  ".join(parts)


_FORMATS = {
    "lr": lambda value: f"lr {value:.1e}",
    "eta": lambda value: f"eta {clock(value)}",
    "time": lambda value: f"time {duration(value)}",
    "data_time": lambda value: f"data {duration(value)}",
    "memory": lambda value: f"memory {value:.0f}MiB",
}


def peak_memory(device: torch.device) -> float:
    """The peak so far in MiB: allocated by torch on an accelerator, resident memory of the process on a CPU.

    No host sync. On mps, which keeps no peak, what is allocated now.
    """
    if device.type == "cpu":
        return _peak_rss() / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    if device.type == "cuda":  # Without the flattening and sorting in max_memory_allocated.
        return float(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]) / 2**20
    return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**20


if sys.platform == "win32":

    def _peak_rss() -> int:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)

else:
    import resource

    _RSS_UNIT = 1 if sys.platform == "darwin" else 1024
    """Bytes: `ru_maxrss` is in bytes on macOS, in KiB on Linux."""

    def _peak_rss() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
