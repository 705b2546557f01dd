"""CheckpointHook: writes the run to files, at an interval, at the end, and where a validation was the best so far."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint.folder import CheckpointFolder, expanded, in_file_name
from hydraloop.hooks.checkpoint.kept_files import BestFile, Records
from hydraloop.hooks.checkpoint.publishing import check_keys, publish, published_files
from hydraloop.hooks.checkpoint.save_best import SaveBest
from hydraloop.hooks.shared.monitoring import is_better
from hydraloop.run.checkpoint_files import SUFFIX
from hydraloop.run.result import Best

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class CheckpointHook(Hook):
    """Writes checkpoints: every `interval` epochs (or iterations), at the end, and one for the best of each metric.

    Files in `out_dir`: `epoch_5.pth`, `iter_500.pth` (by iteration, or where an epoch was cut off), the best so far as
    `best_<metric>_epoch_5.pth` (the one before it is deleted), `<stem>_published.pth` and `.safetensors`, deleted with
    the file they are made of. A checkpoint that falls inside an accumulation window is written at the end of the window
    and has that iteration's number. The epoch's checkpoint is written before its validation, the best one after it.
    Nothing is written after an error: the run did not end where `save_last` would say it did.

    The text file `last_checkpoint` names the file that `resume=auto` and restarts continue from. That is the newest
    regular file, or a best one of a later iteration. After `resume=…/epoch_2.pth` it names `epoch_2.pth`, from the
    first optimizer step to the next checkpoint. Files of the earlier part of the run that have higher numbers stay
    until a new one has the same name; `max_keep_ckpts` does not count them.

    A checkpoint holds state dicts and plain values, never the whole model as an object: that would need pickle, which
    runs code when a file is opened and breaks when the model's source file moves. Rebuild the model from the config
    (it is in the file) and load `state_dict`.

    Mount points: before_run (checks every option), after_load_checkpoint, before_train, before_train_epoch,
    after_train_epoch, after_train_iter, after_val_epoch, after_train. Priority VERY_LOW, MMEngine's: behind the hooks
    whose state it saves, `param_scheduler` and `ema` above all. Writing is a host sync and copies the model to the
    host; iterations without one cost an integer comparison. State: best values and files, and which regular files are
    kept. Options and defaults are those of mmengine's CheckpointHook, with null for its -1.

    Args:
        interval: epochs or iterations between two regular checkpoints, at least 1; None: none but the last.
        by_epoch: count epochs; False: iterations.
        max_keep_ckpts: how many regular files to keep, the newest; None: all. Best ones are not counted.
        save_best: `auto` or True (the first metric of the task), a name, or a list of names, each with a file of its
            own; None or False: none. A value that is not finite is never the best.
        rule: `greater` or `less` values are better, of every name in `save_best`, or a list with one for each; None (in
            a list too): see `monitoring.py`.
        greater_keys: names, or parts of them, of metrics whose high values are good; None: mmengine's.
        less_keys: the same for low values; None: mmengine's.
        out_dir: the folder, anywhere: absolute, from `~`, or relative to the working directory; None: `checkpoints` in
            the run's.
        published_keys: entries to keep in a published file, made after training from the last checkpoint (with
            `save_last`) and from each best one. Its `state_dict` is the averaged weights where there are any
            (`weights=raw`: the raw ones), and is written as safetensors too (`publishing.py`). None: no such files.
        save_last: write one at the end of training too.
        save_begin: the first epoch or iteration that may be due; 0: from the start.
        save_optimizer: False leaves the optimizer's state out; such a file resumes only with `resume_strict=false`.
        save_param_scheduler: False leaves the schedules' state out; the same holds.

    Raises:
        UserError: an option is out of range.
    """

    priority = Priority.VERY_LOW
    collective = True  # all ranks collect what it writes
    runs_after = ("param_scheduler", "ema", "sync_buffers")

    def __init__(
        self,
        *,
        interval: int | None = 1,
        by_epoch: bool = True,
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
    ) -> None:
        self.interval = interval
        self.by_epoch = by_epoch
        self.idle_points = ("after_train_iter",) if by_epoch else ("after_train_epoch",)
        self.max_keep_ckpts = max_keep_ckpts
        self.published_keys = None if published_keys is None else [str(entry) for entry in published_keys]
        self.save_last = save_last
        self.save_begin = save_begin
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.out_dir = None if out_dir is None else expanded(out_dir)
        self._save_best = SaveBest(save_best, rule, greater_keys, less_keys)
        self._check_options()
        self._every = _every(interval, save_begin)
        self._higher: dict[str, bool] = {}  # by monitored metric, in the order of save_best
        self._records = Records()
        self._unwritten: dict[str, float] = {}  # bests of the resumed iteration whose file a kill has left out
        self._settled: CheckpointFolder | None = None
        self._resumed: Path | None = None  # the file that training continues from, until it starts
        self._training = False

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Settle what is monitored and where files go.

        Raises:
            UserError: there is no such metric, nothing says what is better, or the folder cannot be written to.
        """
        self._higher = self._save_best.higher(engine, key=self.key)
        default, resume = engine.run_dir / "checkpoints", engine.settings.resume
        self._settled = CheckpointFolder(
            default if self.out_dir is None else self.out_dir, resumed_beside=None if resume is None else resume.parent
        )
        if engine.distributed.is_main:
            self._folder.open(engine.run_dir, default, key=f"{self.key}.out_dir")

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Let the engine know the best of the part of the run that is over: what rank 0 has found of it."""
        self._records, gone = self._records.as_main_finds_them(engine.distributed)
        for name, best in gone.items():
            if best.iteration == engine.progress.iteration:
                # Killed between the best files of one validation: the resumed file is of this best, too.
                self._unwritten[name] = best.value
            else:
                log.warning(
                    "%s: the best checkpoint so far, %s, is gone; the next validation counts as best", name, best.path
                )
        self._tell_best(engine)
        self._resumed = engine.settings.resume

    def before_train(self, engine: Engine) -> None:
        """From now on validations count; ask for the best file that a kill has left out.

        Raises:
            UserError: the best is to be saved, and nothing is validated.
        """
        if self._higher and (engine.loaders.val is None or engine.settings.val_interval is None):
            raise UserError(
                "the best checkpoint is found by validation, and this run has none",
                key=f"{self.key}.save_best",
                remedy=f"Set {self.key}.save_best=null, or data.val and engine.val_interval.",
            )
        self._training = True
        if self._unwritten:
            self._ask_for_best(engine, self._unwritten)
            self._unwritten = {}

    def before_train_epoch(self, engine: Engine) -> None:
        """Where a run is resumed, ask to let later starts continue from there, too, once something has been trained."""
        if self._resumed is not None:  # what is asked for here is done when the first accumulation window is closed
            engine.request_checkpoint(f"{self.name}: resumed", self._point_to_resumed, self, agreed=True)

    def after_train_epoch(self, engine: Engine) -> None:
        """Ask for the epoch's checkpoint where it is due."""
        last = self.save_last and self.is_last_train_epoch(engine)
        if self.by_epoch and self._every.due(engine.progress.epoch, last=last):
            engine.request_checkpoint(f"{self.name}: regular", self._write_regular, self, agreed=True)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Ask for the iteration's checkpoint where it is due."""
        last = self.save_last and engine.progress.iteration >= engine.max_iters
        if self._every.due(engine.progress.iteration, last=last):
            engine.request_checkpoint(f"{self.name}: regular", self._write_regular, self, agreed=True)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Ask for a checkpoint for each metric that is the best so far."""
        if not self._training:  # a validation on its own saves nothing
            return
        missing = [name for name in self._higher if name not in metrics]
        if missing:  # a task of one's own may leave one out
            reported = ", ".join(metrics) or "nothing"
            log.warning(
                "%s: the validation has no %s, only: %s; it is not the best", self.key, ", ".join(missing), reported
            )
        better: dict[str, float] = {}
        for name, higher in self._higher.items():
            best = self._records.best.get(name)
            than = None if best is None else best.value
            if name in metrics and is_better(metrics[name], than, higher=higher):
                better[name] = metrics[name]
        if better:
            self._ask_for_best(engine, better)

    def after_train(self, engine: Engine) -> None:
        """Ask for the last checkpoint where training ended early, and for the published files."""
        self._training = False
        if engine.error is not None:
            return
        if self.save_last and self._every.due(engine.progress.iteration, done=self._records.last_saved, last=True):
            engine.request_checkpoint(f"{self.name}: regular", self._write_regular, self, agreed=True)
        if self.published_keys is not None:
            engine.request_checkpoint(f"{self.name}: published", self._publish, self, agreed=True)

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Best values and files, and the regular files; paths are relative to `out_dir` where they are inside it."""
        return self._records.state(self._folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the best values and the files of the resumed run."""
        self._records = Records.of(state, self._folder, self._higher)

    # Writing, called by the engine between two windows. --------------------------------------------------------------

    def _point_to_resumed(self, engine: Engine) -> None:
        if self._resumed is not None and engine.distributed.is_main:
            self._folder.resume_from(self._resumed, engine.run_dir)
        self._resumed = None

    def _write_regular(self, engine: Engine) -> None:
        path = self._folder.path / f"{self._stem(engine)}{SUFFIX}"
        before = self._records
        # The list is saved with the file that is about to be deleted still in it: a run that is killed in between
        # deletes it after it was resumed.
        self._records = before.with_regular(path, engine.progress.iteration)
        try:
            self._save(engine, path, last=True)
        except BaseException:
            self._records = before
            raise
        kept = self._records.kept
        surplus = 0 if self.max_keep_ckpts is None else max(0, len(kept) - self.max_keep_ckpts)
        self._delete(engine, kept[:surplus])
        self._records = replace(self._records, kept=kept[surplus:])

    def _ask_for_best(self, engine: Engine, better: Mapping[str, float]) -> None:
        write = partial(self._write_best, better=better)
        engine.request_checkpoint(f"{self.name}: best", write, self, agreed=True)

    def _write_best(self, engine: Engine, better: Mapping[str, float]) -> None:
        at, before = engine.progress.iteration, self._records
        found = {
            name: BestFile(value, at, self._folder.path / f"best_{in_file_name(name)}_{self._stem(engine)}{SUFFIX}")
            for name, value in better.items()
        }
        self._records = before.with_best(found)  # all are in each file's state: a run can go on from any of them
        written: dict[str, BestFile] = {}
        try:
            for name, best in found.items():
                # A regular file of this iteration stays the last one.
                self._save(engine, best.path, last=at > before.last_saved)
                written[name] = best
                log.info("best %s so far: %.4g, saved as %s", name, best.value, best.path.name)
        finally:
            self._records = before.with_best(written)
            self._tell_best(engine)
        self._delete(engine, self._records.replaced)
        self._records = replace(self._records, replaced=())

    def _publish(self, engine: Engine) -> None:
        last = self._records.kept[-1:] if self.save_last else ()
        for path in dict.fromkeys([*last, *(best.path for best in self._records.best.values())]):
            if engine.distributed.is_main and path.is_file():  # a resumed run may have been copied without it
                for file in publish(path, self.published_keys or (), engine.settings.weights):
                    log.info("published %s", file)

    def _save(self, engine: Engine, path: Path, *, last: bool) -> None:
        engine.save_checkpoint(path, optimizer=self.save_optimizer, schedulers=self.save_param_scheduler, last=last)

    def _delete(self, engine: Engine, paths: Sequence[Path]) -> None:
        """Delete files and what was published of them, but never a metric's best: two can have one file's name."""
        in_use = {best.path for best in self._records.best.values()}
        for path in paths:
            if engine.distributed.is_main and path not in in_use:
                for file in (*published_files(path), path):
                    file.unlink(missing_ok=True)

    @property
    def _folder(self) -> CheckpointFolder:
        assert self._settled is not None, "settled in before_run"
        return self._settled

    def _stem(self, engine: Engine) -> str:
        """`epoch_5`, or `iter_500` by iteration and where an epoch was cut off: that is no epoch 5."""
        progress = engine.progress
        if self.by_epoch and progress.batch_in_epoch == 0:
            return f"epoch_{progress.epoch}"
        return f"iter_{progress.iteration}"

    def _tell_best(self, engine: Engine) -> None:
        first = next(iter(self._higher), "")
        if first in self._records.best:
            best = self._records.best[first]
            engine.report_best(Best(first, best.value, best.iteration, str(best.path)))

    # Options. ------------------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        if self.max_keep_ckpts is not None and self.max_keep_ckpts < 1:
            raise UserError(
                f"{self.max_keep_ckpts} is below 1", key="max_keep_ckpts", remedy="Use null to keep all of them."
            )
        if self.published_keys is not None:
            left_out = {"optimizer": self.save_optimizer, "schedulers": self.save_param_scheduler}
            check_keys(
                self.published_keys,
                [entry for entry, saved in left_out.items() if not saved],
                of_any=self.save_last or bool(self._save_best.names),
            )


def _every(interval: int | None, begin: int) -> Every:
    """The interval rule, with the options' names in its errors."""
    try:
        return Every(interval, begin)
    except UserError as error:
        key = "interval" if interval is not None and interval < 1 else "save_begin"
        raise UserError(error.problem, key=key, remedy=error.remedy) from None
