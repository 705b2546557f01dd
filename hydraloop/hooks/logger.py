"""LoggerHook: makes a record every few iterations, prints it, and writes the records of all hooks to a file."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.messages import check_names, position
from hydraloop.engine.record_table import RecordTable, terminal_width
from hydraloop.files.metrics_log import FILENAME, is_after
from hydraloop.files.metrics_writer import RecordLog, cut_after
from hydraloop.files.run_directory import checkpoint_folders
from hydraloop.schemas.option_checks import check_at_least

log = logging.getLogger(__name__)


class _WrittenRecord(NamedTuple):
    """A record in the file."""

    line: int
    """From 0."""
    mode: str
    iteration: int


class LoggerHook(Hook):
    """Makes the records of training, validation and test, and writes the records of all hooks to `metrics.jsonl`.

    The file is the source of truth; trackers are copies. Each record of this hook is also a line in the terminal.

    Priority BELOW_NORMAL, as in MMEngine: after `runtime_info`, `timer` and `grad_clip`, whose numbers it reads, and
    before `param_scheduler`, so that `lr` is the one of this iteration. One host sync and one exchange between the
    hosts per record, none in between. No state. Options: `LoggerHookConf`.
    """

    priority = Priority.BELOW_NORMAL
    runs_after = ("runtime_info", "timer", "grad_clip")
    collective = True

    def __init__(self, *, interval: int | None = 10) -> None:
        check_at_least(1, "Use 1 or more, or null to switch it off.", interval=interval)
        self._every = Every(interval)
        if interval is None:
            self.idle_points = ("after_train_iter", "after_train_epoch", "after_train")
        self._file: RecordLog | None = None
        """None before the first record, and after a resume has cut the file."""
        self._to_repeat: list[_WrittenRecord] = []
        """Records that a run makes a second time if it continues from the next checkpoint."""
        self._records_at_checkpoint: int | None = None
        """Number of records at the checkpoint from which the run continues, if it is known."""
        self._table: RecordTable | None = None
        self._running = False
        self._training = False
        self._resumed = False
        self._iterations_at_record = 0
        """The iterations at the last record of training, or where training began."""
        self._samples_at_record = 0
        self._rates: dict[str, float | None] = {}
        """`lr`, `lr/<group>` and `momentum` of the last iteration of an epoch."""

    # Making records. -----------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Check the names of the metrics, and provide the path of the file to trackers.

        Raises:
            UserError: a metric has a reserved name.
        """
        check_names(engine.validations.metric_names)
        self._running = True
        self._training = False
        self._table = None
        path = engine.run_dir / FILENAME
        engine.messages.provide("record_log", lambda: path)

    def at_position(self, engine: Engine) -> None:
        """Count the iterations of the next record from here; after a resume, remove the records that will be repeated.

        These are the records after the checkpoint. A warning says how many of the earlier ones are missing or damaged.
        """
        resume = engine.settings.resume
        if engine.distributed.is_main and resume is not None and not self._resumed:
            self._close()
            self._file = None
            self._to_repeat = []
            cut_after(
                engine.run_dir / FILENAME,
                iteration=engine.progress.iteration,
                last_validation=engine.progress.last_validation,
                written=self._records_at_checkpoint if _is_own(resume, engine.run_dir) else None,
            )
        self._resumed = True
        self._training = True
        self._begin_record(engine)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Make a record every `interval` iterations, and at the last iteration of training.

        Raises:
            UserError: its loss is not finite, unless `engine.allow_nan`.
        """
        if self.end_of_epoch(engine, batch_idx):  # the record follows in after_train_epoch
            self._rates = _rates(engine)  # now, because `param_scheduler` is called next, and changes them
        elif self._every.fires_at(engine.progress.iteration) or self.is_last_train_iter(engine):
            self._log_training(engine, _rates(engine))

    def after_train_epoch(self, engine: Engine) -> None:
        """Make the record that closes the epoch. It has the values that hooks before this one add here."""
        self._log_training(engine, self._rates)

    def after_train(self, engine: Engine) -> None:
        """Make the last record if training was stopped inside an epoch, unless a resumed run continues it."""
        is_open = engine.progress.iteration > self._iterations_at_record
        if is_open and engine.requests.stopping_for_good and engine.error is None:
            self._log_training(engine, {})  # `param_scheduler` has already changed the lr

    def _log_training(self, engine: Engine, rates: Mapping[str, float | None]) -> None:
        """Make a record of the iterations since the last record; called on every rank."""
        means = engine.messages.means(engine.distributed)
        check_names(means)
        if engine.distributed.is_main:
            iterations = engine.progress.iteration - self._iterations_at_record
            samples = (engine.progress.samples - self._samples_at_record) / iterations
            self._print_and_log(engine, _train_record(engine, rates, means, samples))
        self._begin_record(engine)
        engine.loss_check.check_record(means)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._print_and_log(engine, {**position(engine.progress, "val"), **metrics})

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._print_and_log(engine, {**position(engine.progress, "test"), **metrics})

    def _begin_record(self, engine: Engine) -> None:
        self._iterations_at_record = engine.progress.iteration
        self._samples_at_record = engine.progress.samples

    def _print_and_log(self, engine: Engine, record: dict[str, Any]) -> None:
        """Print a record, and pass it to `on_log` of all hooks; on rank 0."""
        if not engine.distributed.is_main:
            return
        if log.isEnabledFor(logging.INFO):
            self._print(engine, record)
        engine.log_record(record)

    # The file. -----------------------------------------------------------------------------------------------------

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Write a record of any hook. A record without a position gets the current one, because readers need it.

        Later hooks find the record in the file when their `on_log` is called.

        Raises:
            TypeError: the record contains a value that is not a plain number or string.
        """
        if "iteration" not in record:
            record = {**position(engine.progress, engine.progress.mode), **record}
        file = self._open(engine)
        file.append(record)
        mode = record.get("mode", "train")
        iteration = record["iteration"]
        if isinstance(iteration, int) and (mode in ("val", "test") or iteration > engine.progress.iteration):
            self._to_repeat.append(_WrittenRecord(file.written - 1, mode, iteration))
        if not self._running:
            self._close()

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Save the number of records that precede this checkpoint. A resumed run warns if some are missing."""
        if not engine.distributed.is_main:
            return
        iteration = engine.progress.iteration
        last_validation = engine.progress.last_validation
        self._to_repeat = [record for record in self._to_repeat if record.iteration >= iteration]
        repeated = (
            record.line
            for record in self._to_repeat
            if is_after(record.mode, record.iteration, iteration=iteration, last_validation=last_validation)
        )
        checkpoint["meta"]["records"] = next(repeated, self._open(engine).written)

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Keep the number of records that the run had."""
        self._records_at_checkpoint = (checkpoint.get("meta") or {}).get("records")

    def after_run(self, engine: Engine) -> None:
        """Close the file. A later record opens it for that record only."""
        self._running = False
        self._close()

    def _open(self, engine: Engine) -> RecordLog:
        if self._file is None:
            self._file = RecordLog(engine.run_dir / FILENAME)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    # The terminal. -------------------------------------------------------------------------------------------------

    def _print(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Print a record as a line of a table. A validation that is the best until now ends with `best`.

        `style` is for the colours of `ConsoleHandler`.
        """
        if self._table is None:
            evaluated = engine.loaders.val is not None or engine.loaders.test is not None
            metrics = engine.validations.metric_names if evaluated else ()
            self._table = RecordTable(engine.max_epochs, engine.max_iters, metrics, width=terminal_width())
        note = self._best_note(engine) if record["mode"] == "val" else ""
        header = self._table.header(record)
        if header is not None:
            log.info("%s", header, extra={"style": "header"})
        log.info("%s", self._table.line(record, note), extra={"style": "best" if note else record["mode"]})

    def _best_note(self, engine: Engine) -> str:
        """Return `best` if the last validation is the best one until now, otherwise an empty text."""
        best = engine.best
        return "best" if self._training and best and best.iteration == engine.progress.iteration else ""


def _is_own(checkpoint: Path, run_dir: Path) -> bool:
    """Return whether a checkpoint belongs to the run of a directory. Elsewhere, there are no earlier records."""
    folder = checkpoint.resolve().parent
    return folder.is_relative_to(run_dir.resolve()) or folder in map(Path.resolve, checkpoint_folders(run_dir))


def _rates(engine: Engine) -> dict[str, float | None]:
    """Return `lr` and `momentum` of the first parameter group, and `lr/<group>` of each further group.

    With several optimizers, the first group of each is `lr/<optimizer>`.
    """
    read = engine.messages.read
    return {"lr": read("lr"), **read("lrs", {}), "momentum": read("momentum")}


def _train_record(
    engine: Engine, rates: Mapping[str, float | None], means: dict[str, float], samples: float
) -> dict[str, Any]:
    """Return a record of training, without the values that are None.

    `eta`, `time` and `data_time` are in seconds. `memory` is `peak_memory`. `skipped` is the number of optimizer steps
    that fp16 or `grad_clip` has skipped. The losses come last.

    Args:
        engine: of the run.
        rates: the learning rates and the momentum.
        means: the scalars, as means over the iterations since the last record and over all ranks.
        samples: of all ranks in an iteration, the mean.
    """
    time = means.pop("time", None)
    record: dict[str, Any] = {**position(engine.progress, "train"), **rates}
    record["eta"] = engine.messages.read("eta")
    record["time"] = time
    record["data_time"] = means.pop("data_time", None)
    record["samples_per_second"] = None if time is None else samples / time
    record["memory"] = peak_memory(engine.device)
    record["skipped"] = engine.run.precision.skipped or None
    losses = {name: value for name, value in means.items() if "loss" in name}
    others = {name: value for name, value in means.items() if name not in losses}
    return {name: value for name, value in {**record, **others, **losses}.items() if value is not None}


def peak_memory(device: torch.device) -> float:
    """Return the peak in MiB: memory allocated by torch on an accelerator, resident memory of the process on a CPU.

    On mps, which does not keep a peak, it is the memory allocated now. No host sync.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    if device.type == "cuda":  # max_memory_allocated would also flatten and sort all statistics
        return float(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]) / 2**20
    return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**20


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes: `ru_maxrss` is in bytes on macOS, in KiB on Linux."""
