"""CheckpointHook: writes checkpoints at an interval, at the end of training, and for the best validation.

Files in `out_dir`::

    epoch_5.pth                 regular: every `interval` epochs and at the end; iter_500.pth: by iteration
    best_<metric>_epoch_5.pth   the best validation by a metric; the best one before it is deleted
    last_checkpoint             a text file: the name of the checkpoint from which `resume=auto` and restarts continue
    epoch_5_published.pth       only with `published_keys`; also `epoch_5_published.safetensors`

At every moment, `last_checkpoint` names a complete file. A checkpoint is written under another name, flushed and
renamed. Only then `last_checkpoint` names it, and only after that the files that it replaces are deleted. The
checkpoint contains the list of these files, so that a resumed run deletes what a killed run could not.

A checkpoint contains state dicts and plain values, never the model as an object. That would need pickle, which runs
code when a file is opened and breaks when the model's source file moves.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.files.atomic import file_name
from hydraloop.files.checkpoint_files import BEST, SUFFIX
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.result import is_better
from hydraloop.files.run_directory import CHECKPOINTS
from hydraloop.hooks.checkpoint_copies import check_keys, publish_all, published_files
from hydraloop.hooks.checkpoint_folder import BestFile, CheckpointFolder, KeptFiles
from hydraloop.hooks.monitoring import MonitoredMetrics, check_validated
from hydraloop.schemas.option_checks import check_at_least, seconds_of

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_SPECIAL = r"[^\w.@=+-]"
"""Characters that are special in paths, globs or the command line: `val/acc` becomes `val_acc`."""


class CheckpointHook(Hook):
    """Writes checkpoints: every `interval` epochs (or iterations), at the end, and for the best validations.

    The `after_…` methods request a checkpoint. The engine calls the `_write_…` method of the request when the
    accumulation window is closed; a thread of rank 0 writes the file, with FSDP2 a thread of each rank its shard.

    Priority VERY_LOW, MMEngine's: after the hooks whose state it saves, such as `ema`. Cost: a copy of the state to
    host memory, which is kept for the next save; with `asynchronous=false`, also the writing, a host sync. State: the
    files, and the values of the best ones. Options: `CheckpointHookConf`, those of MMEngine with null instead of -1.
    """

    priority = Priority.VERY_LOW
    collective = True  # all ranks gather the state
    runs_after = ("param_scheduler", "ema", "sync_buffers")

    def __init__(
        self,
        *,
        interval: int | None = 1,
        by_epoch: bool = True,
        min_time: str | float | None = None,
        max_keep_ckpts: int | None = None,
        save_best: str | bool | Sequence[str] | None = None,
        rule: str | Sequence[str | None] | None = None,
        greater_keys: Sequence[str] | None = None,
        less_keys: Sequence[str] | None = None,
        out_dir: str | os.PathLike[str] | None = None,
        published_keys: Sequence[str] | None = None,
        save_last: bool = True,
        save_begin: int = 0,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        asynchronous: bool = True,
    ) -> None:
        """Check the options.

        Raises:
            UserError: an option is out of range or unknown, or there is not one rule for each metric.
        """
        check_at_least(1, "Use 1 or more, or null to switch it off.", interval=interval, max_keep_ckpts=max_keep_ckpts)
        check_at_least(0, save_begin=save_begin)
        self._every = Every(interval, save_begin)
        self.by_epoch = by_epoch
        self._min_seconds = None if min_time is None else seconds_of(min_time, key="min_time")
        self._last_regular_at = -math.inf
        """When the last regular save began, by `perf_counter`.

        -inf before the first and after a failed save: `min_time` does not delay the next one. A new run shows a full
        disk early, and after a full disk the next epoch is saved."""
        self.max_keep_ckpts = max_keep_ckpts
        self.save_last = save_last
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.asynchronous = asynchronous
        self.out_dir = None if out_dir is None else Path(os.path.expanduser(out_dir))
        self.published_keys = [str(entry) for entry in published_keys or ()]
        check_keys(self.published_keys)

        self._monitored = MonitoredMetrics(save_best, rule, greater_keys, less_keys)
        self._higher: dict[str, bool] = {}
        """By monitored metric, in the order of `save_best`: whether its high values are good."""
        self._files_on_disk = KeptFiles()
        self._files_if_written: KeptFiles | None = None
        """While a save runs, and in its checkpoint: the files once it is written. None: no save runs."""
        self._folder: CheckpointFolder | None = None
        self._resumed_from: Path | None = None
        """The file that the run was resumed from, until the first optimizer step."""
        self._resumes_foreign_file = False
        """Whether that file belongs to another run; known on rank 0, which deletes files."""
        self._training = False

    # Before training. ----------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Determine the metrics and the folder.

        Raises:
            UserError: a metric is unknown, no rule applies to it, or the folder cannot be used.
        """
        self._higher = self._monitored.directions(engine, key=self.key)
        if self._higher:
            metric, higher = next(iter(self._higher.items()))
            engine.validations.set_objective(metric, higher=higher)
        if self._folder is None:
            self._folder = CheckpointFolder(self.out_dir or engine.run_dir / CHECKPOINTS)
            if engine.distributed.is_main:
                resume = engine.settings.resume
                resumed = None if resume is None else resume.parent
                key = f"{self.key}.out_dir"
                self._resumes_foreign_file = self._folder.open(engine.run_dir, resumed, key=key)

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Report the best checkpoint of the earlier part of the run to the engine, if its file exists on rank 0."""
        best = self._files_on_disk.best.get(next(iter(self._higher), ""))
        if engine.distributed.from_main(best is not None and best.path.is_file()):
            self._report_best(engine)
        self._resumed_from = engine.checkpoints.resumed_from
        if self._resumed_from is not None and self._resumes_foreign_file:
            foreign = (*self._files_on_disk.foreign, self._resumed_from.resolve())
            self._files_on_disk = replace(self._files_on_disk, foreign=foreign)

    def before_train(self, engine: Engine) -> None:
        """Start to compare validations; remove unfinished files of a run that was killed."""
        if self._higher:
            check_validated(engine, key=f"{self.key}.save_best")
        if engine.distributed.is_main:
            self.folder.remove_unfinished()
        self._files_if_written = None  # of a save that an error has ended
        self._training = True

    # When a checkpoint is requested. At most one regular checkpoint in six hours: `min_time=6h`. Another rule: change
    # `_may_save`. Which files are kept: `KeptFiles.with_regular`. --------------------------------------------------

    def before_train_epoch(self, engine: Engine) -> None:
        """In a resumed run, request `_point_to_resumed` after the first optimizer step.

        An attempt to resume from an older file changes nothing if it fails before.
        """
        if self._resumed_from is not None:
            self._request(engine, "resumed", self._point_to_resumed)

    def after_train_epoch(self, engine: Engine) -> None:
        """Request the epoch's checkpoint, at the interval. Its validation comes later."""
        if self.by_epoch:
            self._request_regular(engine, engine.progress.epoch, is_last=self.is_last_train_epoch(engine))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Request the iteration's checkpoint, at the interval."""
        if not self.by_epoch:
            self._request_regular(engine, engine.progress.iteration, is_last=self.is_last_train_iter(engine))

    def _request_regular(self, engine: Engine, n: int, *, is_last: bool) -> None:
        """Request a checkpoint if epoch or iteration `n` is the last one, or if interval and `min_time` allow it."""
        if is_last and self.save_last:
            self._request(engine, "regular", self._write_regular)
        elif self._every.fires_at(n) and self._may_save(engine):
            # The clocks of ranks differ, so with `min_time` some ranks may request it earlier than others. It is
            # written when all ranks have requested it.
            self._request(engine, "regular", self._write_regular, on_all_ranks=self._min_seconds is None)

    def _may_save(self, engine: Engine) -> bool:
        """Return whether `min_time` has passed since the last regular save began, and no save is being written."""
        if self._min_seconds is None:
            return True
        return perf_counter() >= self._last_regular_at + self._min_seconds and not engine.checkpoints.is_writing

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Request one checkpoint for all metrics with a new best value."""
        if not self._training:
            return
        new_best: dict[str, float] = {}
        for metric, higher in self._higher.items():
            best = self._expected_files.best.get(metric)
            value = engine.validations.comparable.get(metric)
            if value is None:
                log.warning("%s: the validation did not report %s, so it cannot be the best", self.key, metric)
            elif is_better(value, None if best is None else best.value, higher=higher):
                new_best[metric] = value
        if new_best:
            self._request(engine, "best", partial(self._write_best, values=new_best))

    def after_train(self, engine: Engine) -> None:
        """Request the last checkpoint if training ended early, and the published files. After an error: nothing."""
        self._training = False
        if engine.error is not None:
            return
        is_unsaved = engine.progress.iteration > self._files_on_disk.last_saved
        if engine.requests.preempted_by is None:
            needs_save = is_unsaved and self.save_last
        else:
            needs_save = is_unsaved or self._validated_since_last_step(engine)
        if needs_save:
            self._request(engine, "regular", self._write_regular)
        if self.published_keys:
            self._request(engine, "published", self._publish)

    def _validated_since_last_step(self, engine: Engine) -> bool:
        """Return whether a preempted run must save again, so that the resumed run does not repeat a validation."""
        progress = engine.progress
        has_trained = progress.iteration > progress.began_at
        return has_trained and progress.last_validation == progress.iteration

    def _request(
        self, engine: Engine, what: str, write: Callable[[Engine], object], *, on_all_ranks: bool = True
    ) -> None:
        engine.request_checkpoint(f"{self.name}: {what}", write, self, agreed=on_all_ranks)

    # How it is written. The engine calls these on every rank, between two accumulation windows. --------------------

    def _write_regular(self, engine: Engine) -> None:
        engine.checkpoints.wait_for_save()  # whether it was written decides which files there are
        path = self.folder.path / f"{self._stem(engine)}{SUFFIX}"
        files = self._files_on_disk.with_regular(path, engine.progress.iteration, self.max_keep_ckpts)
        self._last_regular_at = perf_counter()
        self._save(engine, [path], files)

    def _write_best(self, engine: Engine, values: Mapping[str, float]) -> None:
        engine.checkpoints.wait_for_save()
        iteration = engine.progress.iteration
        new = {metric: BestFile(value, iteration, self._best_path(engine, metric)) for metric, value in values.items()}
        paths = list(dict.fromkeys(best.path for best in new.values()))
        self._save(engine, paths, self._files_on_disk.with_best(new))

    def _save(self, engine: Engine, paths: Sequence[Path], files: KeptFiles) -> None:
        """Write a checkpoint, from which later starts resume, then delete the obsolete files.

        Args:
            paths: the file, and other names for it: hard links, or copies if the file system has no links.
            files: all files, once it is written.
        """
        self._point_to_resumed(engine)  # before this checkpoint, which is newer
        # The checkpoint stores this list, including `obsolete`. If the process dies before it deletes these files, the
        # first save of the resumed run deletes them.
        self._files_if_written = files

        def after_writing(written: bool) -> None:
            self._files_if_written = None
            on_disk = self._files_on_disk
            if not written:
                self._last_regular_at = -math.inf
                # One of the names may be complete.
                self._files_on_disk = replace(on_disk, obsolete=(*on_disk.obsolete, *paths))
                return
            has_new_best = on_disk.best != files.best
            # What could not be deleted is tried again.
            self._files_on_disk = replace(files, obsolete=tuple(filter(os.path.exists, files.to_delete())))
            if has_new_best:
                self._report_best(engine)

        engine.checkpoints.save(
            paths[0],
            links=paths[1:],
            optimizer=self.save_optimizer,
            schedulers=self.save_param_scheduler,
            resume_from_it=True,
            asynchronous=self.asynchronous,
            delete=[file for path in files.to_delete() for file in (*published_files(path), path)],
            at_end=after_writing,
        )

    def _point_to_resumed(self, engine: Engine) -> None:
        """Point `last_checkpoint` back to the file that this run was resumed from, in case the run is killed next.

        `max_keep_ckpts` does not count files with higher numbers, which stay until a new file has the same name.
        """
        if self._resumed_from is None:
            return
        engine.checkpoints.wait_for_save()  # a thread may be writing the same file
        if engine.distributed.is_main:
            try:
                # The result of an earlier attempt: this one may be killed without a result.
                (engine.run_dir / RESULT_FILE).unlink(missing_ok=True)
                self.folder.resume_from(self._resumed_from, engine.run_dir)
            except OSError as error:
                text = "until the next checkpoint, later starts may not resume from %s: %s"
                log.warning(text, self._resumed_from, error.strerror or error)
        self._resumed_from = None

    def _publish(self, engine: Engine) -> None:
        engine.checkpoints.wait_for_save()
        if not engine.distributed.is_main:
            return
        last = self._files_on_disk.regular[-1:] if self.save_last else ()
        best = [best.path for best in self._files_on_disk.best.values()]
        publish_all(dict.fromkeys([*last, *best]), self.published_keys, engine.settings.weights)

    # State. --------------------------------------------------------------------------------------------------------

    @property
    def _expected_files(self) -> KeptFiles:
        """The files once the current save is written; without a save, those on the disk."""
        return self._files_on_disk if self._files_if_written is None else self._files_if_written

    def state_dict(self) -> dict[str, Any]:
        """Return the best values and files, and the regular files; paths inside `out_dir` are relative to it."""
        return self._expected_files.state(self.folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the best values and the files of the resumed run."""
        self._files_on_disk = KeptFiles.of(state, self.folder.path, self._higher)

    # Names and metrics. --------------------------------------------------------------------------------------------

    @property
    def folder(self) -> CheckpointFolder:
        """The folder of the checkpoints, from before_run on."""
        assert self._folder is not None, "set in before_run"
        return self._folder

    def _stem(self, engine: Engine) -> str:
        """Return `epoch_5`, or `iter_500` by iteration and if an epoch was cut off."""
        progress = engine.progress
        if self.by_epoch and progress.batch_in_epoch == 0:
            return f"epoch_{progress.epoch}"
        return f"iter_{progress.iteration}"

    def _best_path(self, engine: Engine, metric: str) -> Path:
        return self.folder.path / f"{BEST}{file_name(metric, _SPECIAL)}_{self._stem(engine)}{SUFFIX}"

    def _report_best(self, engine: Engine) -> None:
        """Report the best file by the first metric, the objective: for the test, and for `result.json`."""
        first = next(iter(self._higher), "")
        best = self._files_on_disk.best.get(first)
        if best is not None:
            engine.validations.set_best_checkpoint(best.iteration, best.path)
