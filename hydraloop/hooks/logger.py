"""LoggerHook: makes a record every few iterations, prints it, and writes the records of all hooks to a file."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.messages import check_names, position
from hydraloop.engine.record_table import RecordTable, terminal_width
from hydraloop.files.record_log import FILENAME, is_after
from hydraloop.files.record_writer import RecordLog, cut_after
from hydraloop.files.run_directory import checkpoint_folders
from hydraloop.schemas.option_checks import check_at_least

log = logging.getLogger(__name__)


class LoggerHook(Hook):
    """Makes the records of training, validation and test, and writes the records of all hooks to a file.

    In training, every `interval` iterations: `{"mode": "train", "epoch", "iteration", "lr", "momentum", "eta" [s],
    "time" [s], "data_time" [s], "samples_per_second", "memory" [MiB], "grad_norm", "loss", …}`, as far as available.
    Scalars are means over the iterations since the last record and over all ranks. The task's count by samples, and a
    loss `(sum, count)` by its counts, as in validation. `lr` and `momentum` are those of the first parameter group.
    Each further group adds `lr/<group>`; with several optimizers, the first group of each adds `lr/<optimizer>`. After
    each validation and test: `{"mode": "val" or "test", "epoch", "iteration", …metrics}`. `epoch` counts from 1 and
    includes the current one; `iteration` counts the completed ones. `samples_per_second` is the number of samples of
    all ranks in the iterations since the last record, divided by the time that these iterations took (`time` times
    their number). `memory` is the peak on rank 0 until now: memory allocated by torch on an accelerator, otherwise
    memory of the process. `skipped` is the number of optimizer steps that fp16 or `grad_clip` has skipped, if any.

    Each of these records is a line of a table in the terminal. The header is repeated every 20 lines and when there is
    a new column. Columns that do not fit into the terminal are left out, and the header then ends with `…`. A
    validation that is the best until now (`best` of `runtime_info`) ends with `best`.

    Every record that any hook passes to `engine.log_record` is written to `<run_dir>/metrics.jsonl`: one line of JSON,
    flushed, with a `timestamp` [s since 1970] at the end. This file is the source of truth; trackers are copies. JSON
    has no NaN and no infinity: such a value is null, and `"nonfinite": {"loss": "nan"}` (or "inf", "-inf") names it. If
    the file cannot be written, because the disk is full, a warning is printed once. The records are kept in memory,
    and written with the next record, in order. The end of the run reports the records that are missing. A
    resumed run first removes the records after its checkpoint, because it makes them again. A
    warning says how many of the earlier records are missing or damaged.

    A record is flat: numbers, strings and None. A record without a position gets the current one. No scalar and no
    metric may have the name `mode`, `epoch`, `iteration`, `objects`, `nonfinite` or `timestamp`.

    Priority BELOW_NORMAL, as in MMEngine: after `runtime_info`, `timer` and `grad_clip`, whose numbers it reads, and
    before `param_scheduler`, so that `lr` is the one of this iteration. Later hooks find the record in the file when
    their `on_log` is called. One host sync and one exchange between the hosts per record, none in between. No state.
    Options: `LoggerHookConf`.

    Raises:
        UserError: an interval below 1; a metric or a scalar has a reserved name; the loss of a record is NaN or
            infinite, unless `engine.allow_nan`.
    """

    priority = Priority.BELOW_NORMAL
    runs_after = ("runtime_info", "timer", "grad_clip")
    collective = True

    def __init__(self, *, interval: int | None = 10, ignore_last: bool = True) -> None:
        check_at_least(1, "Use 1 or more, or null to switch it off.", interval=interval)
        self._fires_at = Every(interval).fires_at
        self._at_epoch_end = not ignore_last and interval is not None
        self._file: RecordLog | None = None
        """None before the first record, and where a resume has cut the file."""
        self._again: list[tuple[int, str, int]] = []
        """Line, mode and iteration of records that a run may make again if it continues from the next checkpoint."""
        self._written: int | None = None
        """Number of records at the checkpoint from which the run continues, if it is known."""
        self._table: RecordTable | None = None
        self._running = self._training = self._resumed = False
        self._iterations_at_record = self._samples_at_record = 0
        """The progress at the last record of training, or where training began."""

    def before_run(self, engine: Engine) -> None:
        """Check the names of the metrics, and provide the path of the file to trackers.

        Raises:
            UserError: a metric has a reserved name.
        """
        check_names(engine.evaluator.metric_names, key="task.metrics", remedy="Give the metric another name.")
        self._running, self._training, self._table = True, False, None
        path = engine.run_dir / FILENAME
        engine.messages.provide("record_log", lambda: path)

    def at_position(self, engine: Engine) -> None:
        """Remove the records after the checkpoint of a resume from the file, because the run makes them again."""
        resume, progress = engine.settings.resume, engine.progress
        if engine.distributed.is_main and resume is not None and not self._resumed:
            self._close()
            self._file, self._again = None, []
            cut_after(
                engine.run_dir / FILENAME,
                iteration=progress.iteration,
                last_validation=progress.last_validation,
                written=self._written if _is_own(resume, engine.run_dir) else None,
            )
        self._resumed = self._training = True
        self._begin_record(engine)

    def _begin_record(self, engine: Engine) -> None:
        self._iterations_at_record, self._samples_at_record = engine.progress.iteration, engine.progress.samples

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Make a record every `interval` iterations.

        Raises:
            UserError: its loss is not finite.
        """
        if self._fires_at(engine.progress.iteration) or (self._at_epoch_end and self.end_of_epoch(engine, batch_idx)):
            means = engine.messages.means(engine.distributed)
            check_names(means, remedy="A hook or the task adds it to engine.messages: use another name there.")
            if engine.distributed.is_main:
                progress = engine.progress
                iterations = progress.iteration - self._iterations_at_record
                samples = (progress.samples - self._samples_at_record) / iterations
                self._put(engine, _train_record(engine, means, samples))
            self._begin_record(engine)
            engine.loss_check.check_record(means)

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Save how many records a run that continues from here must find."""
        if engine.distributed.is_main:
            at, last_validation = engine.progress.iteration, engine.progress.last_validation
            self._again = [one for one in self._again if one[2] >= at]
            again = (
                line
                for line, mode, of in self._again
                if is_after(mode, of, iteration=at, last_validation=last_validation)
            )
            checkpoint["meta"]["records"] = next(again, self._log(engine).written)

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Keep the number of records that the run had."""
        self._written = (checkpoint.get("meta") or {}).get("records")

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Write a record of any hook.

        Raises:
            TypeError: the record contains a value that is not a plain number or string.
        """
        if "iteration" not in record:  # readers of the file need it
            record = {**position(engine.progress, engine.progress.mode), **record}
        file = self._log(engine)
        file.append(record)
        mode, at = record.get("mode", "train"), record["iteration"]
        if isinstance(at, int) and (mode in ("val", "test") or at > engine.progress.iteration):
            self._again.append((file.written - 1, mode, at))
        if not self._running:
            self._close()

    def _log(self, engine: Engine) -> RecordLog:
        """Return the file of the records."""
        if self._file is None:
            self._file = RecordLog(engine.run_dir / FILENAME)
        return self._file

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._put(engine, {**position(engine.progress, "val"), **metrics})

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._put(engine, {**position(engine.progress, "test"), **metrics})

    def after_run(self, engine: Engine) -> None:
        """Close the file. A later record opens it for that record only."""
        self._running = False
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _put(self, engine: Engine, record: dict[str, Any]) -> None:
        """Print and log a record, on rank 0."""
        if not engine.distributed.is_main:
            return
        if log.isEnabledFor(logging.INFO):
            self._print(engine, record)
        engine.log_record(record)

    def _print(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Print a record as a line of the table. `style` is for the colours of `ConsoleHandler`."""
        if self._table is None:
            evaluated = engine.loaders.val is not None or engine.loaders.test is not None
            metrics = engine.evaluator.metric_names if evaluated else ()
            self._table = RecordTable(engine.max_epochs, engine.max_iters, metrics, width=terminal_width())
        note = self._best_note(engine) if record["mode"] == "val" else ""
        header = self._table.header(record)
        if header is not None:
            log.info("%s", header, extra={"style": "header"})
        log.info("%s", self._table.line(record, note), extra={"style": "best" if note else record["mode"]})

    def _best_note(self, engine: Engine) -> str:
        """Return `best` if the last validation is the best one until now, otherwise nothing."""
        best = engine.messages.read("best")
        if not self._training or best is None or best.iteration != engine.progress.iteration:
            return ""
        # Without `save_best`, a resumed run does not know its earlier validations.
        unknown = engine.progress.began_at > 0 and engine.best is None
        return "best since the resume" if unknown else "best"


def _is_own(checkpoint: Path, run_dir: Path) -> bool:
    """Return whether a checkpoint belongs to the run of a directory. Elsewhere, there are no earlier records."""
    folder = checkpoint.resolve().parent
    return folder.is_relative_to(run_dir.resolve()) or folder in map(Path.resolve, checkpoint_folders(run_dir))


def _train_record(engine: Engine, means: dict[str, float], samples: float) -> dict[str, Any]:
    """Return a record of training.

    Args:
        means: the scalars of the record.
        samples: of all ranks in an iteration, the mean.
    """
    read = engine.messages.read
    facts = {"lr": read("lr"), **read("lrs", {}), "momentum": read("momentum"), "eta": read("eta")}
    record = {
        **position(engine.progress, "train"),
        **{name: value for name, value in facts.items() if value is not None},
    }
    record.update((name, means.pop(name)) for name in ("time", "data_time") if name in means)
    if "time" in record:
        record["samples_per_second"] = samples / record["time"]
    record["memory"] = peak_memory(engine.device)
    if engine.run.precision.skipped:
        record["skipped"] = engine.run.precision.skipped
    losses = {name: value for name, value in means.items() if "loss" in name}
    others = {name: value for name, value in means.items() if name not in losses}
    return {**record, **others, **losses}


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
