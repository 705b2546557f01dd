"""CheckpointHook: writes checkpoints at an interval, at the end of training, and for the best validation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.files.atomic import file_name
from hydraloop.files.checkpoint_files import BEST, SUFFIX
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.result import Best
from hydraloop.files.run_directory import CHECKPOINTS
from hydraloop.hooks.checkpoint_copies import CheckpointFolder, check_keys, publish, published_files
from hydraloop.hooks.monitoring import RULES, check_metric, check_validated, higher_is_better, is_better
from hydraloop.schemas.option_checks import check_at_least, check_choice

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_SPECIAL = r"[^\w.@=+-]"
"""Characters that are special in paths, globs or the command line: `val/acc` becomes `val_acc`."""


@dataclass(frozen=True, slots=True)
class BestFile:
    """The best validation of one metric."""

    value: float
    iteration: int
    path: Path


@dataclass(frozen=True, slots=True)
class FileRecords:
    """The files of a run. A change makes new records, so that a failed write can restore the previous ones."""

    best: Mapping[str, BestFile] = field(default_factory=dict)
    """By metric."""
    kept: tuple[Path, ...] = ()
    """Regular files, oldest first, without those deleted by `max_keep_ckpts`."""
    replaced: tuple[Path, ...] = ()
    """Best files that a better one has replaced, to be deleted."""
    last_saved: int = 0
    """The iteration of the newest regular file."""

    def state(self, folder: CheckpointFolder) -> dict[str, Any]:
        """Return plain values, with paths as the folder names them."""
        return {
            "best": {
                name: {"value": best.value, "iteration": best.iteration, "checkpoint": folder.relative(best.path)}
                for name, best in self.best.items()
            },
            "kept": [folder.relative(path) for path in self.kept],
            "replaced": [folder.relative(path) for path in self.replaced],
            "last_saved": self.last_saved,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], folder: Path, names: Collection[str]) -> FileRecords:
        """Restore records from a `state`, with the best files of these metrics, even if the files do not exist."""
        return cls(
            best={
                name: BestFile(entry["value"], entry["iteration"], folder / entry["checkpoint"])
                for name, entry in state["best"].items()
                if name in names
            },
            kept=tuple(folder / name for name in state["kept"]),
            replaced=tuple(folder / name for name in state["replaced"]),
            last_saved=state["last_saved"],
        )


class CheckpointHook(Hook):
    """Writes checkpoints: every `interval` epochs (or iterations), at the end, and for the best validations.

    Files in `out_dir`: `epoch_5.pth`, or `iter_500.pth` (by iteration, or if an epoch was cut off); the best checkpoint
    as `best_<metric>_epoch_5.pth` (the previous one is deleted); `<stem>_published.pth` and `.safetensors`, deleted
    with the file that they are made from. If a validation is the best of several metrics, one file is written; the
    others are hard links to it, or copies if the file system has no links. A checkpoint that falls inside an
    accumulation window is written at the end of the window and has that iteration's number. The epoch's checkpoint is
    written before its validation, the best one after it. After an error nothing is written. If the disk is full or the
    folder is read-only, a warning says which checkpoint is still safe, training continues, and the next save is tried.

    The text file `last_checkpoint` names the file from which `resume=auto` and restarts continue: the newest regular
    file, or a best file of a later iteration. After `resume=…/epoch_2.pth` it names `epoch_2.pth`, from the first
    optimizer step to the next checkpoint. Files with higher numbers from the earlier part of the run stay until a new
    file has the same name; `max_keep_ckpts` does not count them.

    A checkpoint contains state dicts and plain values, never the whole model as an object. That would need pickle,
    which runs code when a file is opened and breaks when the model's source file moves. Build the model from the config
    (it is in the file) and load `state_dict`.

    A thread of rank 0 writes and flushes the file. With FSDP2, a thread of each rank writes its shard to a folder,
    `epoch_5.shards-…`, before that; the folder is deleted with the file. Training continues after the checkpoint is
    copied to memory, and waits only if the save before is not done. The test and the end of the run wait for it. An
    error other than a full disk or a read-only folder is raised in the next iteration. If the copy needs more than a
    quarter of the free memory, training waits for the writing instead, and one line in the log says so.

    Priority VERY_LOW, MMEngine's: after the hooks whose state it saves, such as `param_scheduler` and `ema`. Cost:
    a copy of the state to host memory, which is kept for the next save; with `asynchronous=false`, also the writing,
    a host sync. Other iterations cost an integer comparison. State: best values and files, and which regular files are
    kept. Options: `CheckpointHookConf`; options and defaults are those of
    MMEngine's CheckpointHook, with null instead of -1.

    Raises:
        UserError: an option is out of range, or unknown, or there is not one rule for each metric.
    """

    priority = Priority.VERY_LOW
    collective = True  # all ranks gather the state
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
        asynchronous: bool = True,
    ) -> None:
        self.by_epoch = by_epoch
        self.idle_points = ["after_train_iter" if by_epoch else "after_train_epoch"]
        self.max_keep_ckpts = max_keep_ckpts
        self.published_keys = [str(entry) for entry in published_keys or ()]
        self.save_last = save_last
        self.save_optimizer = save_optimizer
        self.save_param_scheduler = save_param_scheduler
        self.asynchronous = asynchronous
        self.out_dir = None if out_dir is None else Path(os.path.expanduser(out_dir))
        self._names = _names(save_best)
        """The metrics as given; empty for no best file."""
        self._rules, self._greater_keys, self._less_keys = _listed(rule), greater_keys, less_keys
        for each in self._rules:
            check_choice(RULES, rule=each)
        if not isinstance(rule, str | None) and len(self._rules) not in (1, len(self._names)):
            raise UserError(
                f"{len(self._rules)} rules for {len(self._names)} metrics in save_best",
                key="rule",
                remedy="Set one rule for all, or a list with one rule for each.",
            )
        check_at_least(1, "Use 1 or more, or null to switch it off.", interval=interval, max_keep_ckpts=max_keep_ckpts)
        check_at_least(0, save_begin=save_begin)
        if self.published_keys:
            left_out = {"optimizer": save_optimizer, "schedulers": save_param_scheduler}
            check_keys(
                self.published_keys,
                [entry for entry, saved in left_out.items() if not saved],
                of_any=save_last or bool(self._names),
            )
        self._every = Every(interval, save_begin)
        self._higher: dict[str, bool] = {}
        """By monitored metric, in the order of `save_best`."""
        self._records = FileRecords()
        self._folder: CheckpointFolder | None = None
        self._resumed: Path | None = None
        """The file that the run was resumed from, until the first optimizer step."""
        self._training = False

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Determine the metrics and the folder.

        Raises:
            UserError: a metric is unknown, no rule applies to it, or the folder cannot be used.
        """
        self._higher = self._directions(engine)
        if self._higher:
            engine.messages.provide("monitor", lambda: next(iter(self._higher.items())))
        if self._folder is None:
            default, resume = engine.run_dir / CHECKPOINTS, engine.settings.resume
            self._folder = CheckpointFolder(default if self.out_dir is None else self.out_dir)
            if engine.distributed.is_main:
                resumed = None if resume is None else resume.parent
                self._folder.open(engine.run_dir, resumed, key=f"{self.key}.out_dir")

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Report the best checkpoint of the earlier part of the run to the engine, if its file exists on rank 0."""
        best = self._records.best
        there = engine.distributed.from_main([name for name, file in best.items() if file.path.is_file()])
        for name in best.keys() - set(there):
            log.info("%s does not exist; the next validation counts as the best by %s", best[name].path, name)
        self._records = replace(self._records, best={name: best[name] for name in there})
        self._report_best(engine)
        self._resumed = engine.checkpoints.resumed_from

    def before_train(self, engine: Engine) -> None:
        """Start to count validations; remove unfinished files of a run that was killed."""
        if self._higher:
            check_validated(engine, key=f"{self.key}.save_best")
        if engine.distributed.is_main:
            self.folder.remove_unfinished()
        self._training = True

    def before_train_epoch(self, engine: Engine) -> None:
        """In a resumed run, once a step was trained, make later starts resume from the same file, and remove the
        result of the earlier attempt."""
        if self._resumed is not None:  # written at the end of the first accumulation window
            self._request(engine, "resumed", self._point_to_resumed)

    def after_train_epoch(self, engine: Engine) -> None:
        """Request the epoch's checkpoint, at the interval."""
        last = self.save_last and self.is_last_train_epoch(engine)
        if last or self._every.fires_at(engine.progress.epoch):
            self._request(engine, "regular", self._write_regular)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Request the iteration's checkpoint, at the interval."""
        last = self.save_last and engine.progress.iteration >= engine.max_iters
        if last or self._every.fires_at(engine.progress.iteration):
            self._request(engine, "regular", self._write_regular)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Request a checkpoint for each metric with a new best value."""
        if not self._training:
            return
        better: dict[str, float] = {}
        for name, higher in self._higher.items():
            best = self._records.best.get(name)
            if name not in metrics:
                log.warning("%s: the validation did not report %s, so it cannot be the best", self.key, name)
            elif is_better(engine.evaluator.comparable[name], None if best is None else best.value, higher=higher):
                better[name] = metrics[name]
        if better:
            self._request(engine, "best", partial(self._write_best, better=better))

    def after_train(self, engine: Engine) -> None:
        """Request the last checkpoint if training ended early, and the published files."""
        self._training = False
        if engine.error is not None:
            return
        progress, preempted = engine.progress, engine.requests.preempted_by is not None
        if preempted and progress.began_at < progress.iteration == progress.last_validation:
            self._records = replace(self._records, last_saved=0)  # saved before the validation, which is not repeated
        saves = self.save_last or preempted
        if saves and progress.iteration > self._records.last_saved:
            self._request(engine, "regular", self._write_regular)
        if self.published_keys:
            self._request(engine, "published", self._publish)

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return best values and files, and the regular files; paths inside `out_dir` are relative to it."""
        return self._records.state(self.folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the best values and the files of the resumed run."""
        self._records = FileRecords.of(state, self.folder.path, self._higher)

    # Writing: the engine calls these between two accumulation windows. ---------------------------------------------

    def _request(self, engine: Engine, what: str, write: Callable[[Engine], object]) -> None:
        engine.request_checkpoint(f"{self.name}: {what}", write, self, agreed=True)

    def _point_to_resumed(self, engine: Engine) -> None:
        if self._resumed is None:
            return
        engine.checkpoints.wait_for_save()  # a thread may be writing the same file
        if engine.distributed.is_main:
            self.folder.resume_from(self._resumed, engine.run_dir)
            (engine.run_dir / RESULT_FILE).unlink(missing_ok=True)  # of an earlier attempt; this one may be killed
        self._resumed = None

    def _write_regular(self, engine: Engine) -> None:
        engine.checkpoints.wait_for_save()
        before = self._records
        path = self.folder.path / f"{self._stem(engine)}{SUFFIX}"
        # The saved list still contains the file to delete: if the run is killed before that, a resumed run deletes it.
        kept = (*(other for other in before.kept if other != path), path)
        self._records = replace(before, kept=kept, last_saved=engine.progress.iteration)
        surplus = 0 if self.max_keep_ckpts is None else max(0, len(kept) - self.max_keep_ckpts)
        after = replace(self._records, kept=kept[surplus:])
        self._save(engine, [path], before, after, last=True, delete=kept[:surplus])

    def _write_best(self, engine: Engine, better: Mapping[str, float]) -> None:
        engine.checkpoints.wait_for_save()
        before, iteration = self._records, engine.progress.iteration
        found = {name: BestFile(value, iteration, self._best_path(engine, name)) for name, value in better.items()}
        replaced = (*before.replaced, *(before.best[name].path for name in found if name in before.best))
        self._records = replace(before, best={**before.best, **found}, replaced=replaced)
        paths = list(dict.fromkeys(best.path for best in found.values()))
        # A regular file of this iteration remains the last one.
        last = iteration > before.last_saved
        self._save(engine, paths, before, replace(self._records, replaced=()), last=last, delete=replaced)

    def _publish(self, engine: Engine) -> None:
        engine.checkpoints.wait_for_save()
        last = self._records.kept[-1:] if self.save_last else ()
        for path in dict.fromkeys([*last, *(best.path for best in self._records.best.values())]):
            if engine.distributed.is_main and path.is_file():  # a copy of a run may lack files
                try:
                    for file in publish(path, self.published_keys, engine.settings.weights):
                        log.info("published %s", file)
                except OSError as error:
                    log.warning("%s is complete, but could not be published: %s", path, error.strerror or error)

    def _save(
        self,
        engine: Engine,
        paths: Sequence[Path],
        before: FileRecords,
        after: FileRecords,
        *,
        last: bool,
        delete: Sequence[Path],
    ) -> None:
        """Save a file, then delete others.

        Args:
            paths: the file, and other names for it.
            before: the records if it could not be written.
            after: the records once it is written. Their best files are not deleted: two metrics can share a file.
            last: whether later starts resume from this file.
            delete: files that are deleted, with their published files.
        """
        self._point_to_resumed(engine)  # before this file, which is newer
        in_use = {*paths, *(best.path for best in after.best.values())}
        unused = [other for other in delete if other not in in_use]

        def done(written: bool) -> None:
            self._records = after if written else before
            self._report_best(engine)

        try:
            engine.checkpoints.save(
                paths[0],
                links=paths[1:],
                optimizer=self.save_optimizer,
                schedulers=self.save_param_scheduler,
                last=last,
                asynchronous=self.asynchronous,
                delete=[file for other in unused for file in (*published_files(other), other)],
                done=done,
            )
        except BaseException:
            done(False)
            raise

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

    def _best_path(self, engine: Engine, name: str) -> Path:
        return self.folder.path / f"{BEST}{file_name(name, _SPECIAL)}_{self._stem(engine)}{SUFFIX}"

    def _directions(self, engine: Engine) -> dict[str, bool]:
        """Return {metric: whether its high values are good}, in the order of `save_best`."""
        names, rules = self._names, self._rules
        if names == ["auto"]:
            names = list(engine.evaluator.metric_names[:1])
        found: dict[str, bool] = {}
        for name, rule in zip(names, rules if len(rules) == len(names) else rules * len(names), strict=True):
            check_metric(name, engine, key=f"{self.key}.save_best")
            found[name] = higher_is_better(
                name, engine, rule=rule, greater_keys=self._greater_keys, less_keys=self._less_keys, key=self.key
            )
        return found

    def _report_best(self, engine: Engine) -> None:
        first = next(iter(self._higher), "")
        best = self._records.best.get(first)
        if best is not None:
            engine.evaluator.report_best(Best(first, best.value, best.iteration, str(best.path)))


def _names(save_best: str | bool | Sequence[str] | None) -> list[str]:
    if isinstance(save_best, bool):  # MMClassification's spelling
        return ["auto"] if save_best else []
    return [] if save_best is None else [str(name) for name in _listed(save_best)]


def _listed(option: str | Sequence[Any] | None) -> list[Any]:
    """Return an option that is one value or a list of them as a list."""
    return list(option) if isinstance(option, Sequence) and not isinstance(option, str) else [option]
