"""Checkpoints: which state of a run is in a file (`_state`), saving it, and restoring it (`_set_state`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydraloop.engine import seeding
from hydraloop.engine.batches import Batches
from hydraloop.engine.checkpoint import optimizer_state, rank_buffers
from hydraloop.engine.checkpoint.data_position import DataPosition
from hydraloop.engine.checkpoint.format import FORMAT, Checkpoint, check_resumable
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.checkpoint.initial_weights import load_from
from hydraloop.engine.checkpoint.saver import Saver, broken_weights, part_of_this_rank, write_file
from hydraloop.engine.checkpoint.weights import load_for_evaluation, load_named, load_own_state, load_weights, own_state
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.hook import Hook
from hydraloop.engine.loss_check import LossCheck, not_finite
from hydraloop.engine.run_parts import Run
from hydraloop.engine.validations import Validations
from hydraloop.errors import UserError
from hydraloop.files import code_patch
from hydraloop.files.changes import resumed
from hydraloop.files.environment import versions

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves the state of a run, and restores it. The constructor loads the weights of `load_from`.

    Args:
        run: the parts of the run.
        batches: of the train loader.
        validations: the metrics and the best validation are saved.
        loss_check: refuses to save a run whose loss or weights are not finite.
        failed: called in the thread of a save that has failed; requests that all ranks call `wait_for_save`.
    """

    def __init__(
        self,
        run: Run,
        batches: Batches,
        validations: Validations,
        loss_check: LossCheck,
        failed: Callable[[], object],
    ) -> None:
        self._run = run
        self._validations = validations
        self.loss_check = loss_check
        self._position = DataPosition(batches, run.progress, run.ranks, run.seed)
        self._saver = Saver(run.ranks, failed)
        self._loaded_from = load_from(run)
        self._generators: dict[str, Any] | None = None
        """The saved states of this rank's random generators, until `restore_generators`."""
        self.loaded = False
        """Whether `load` has been called; it loads once for each engine."""
        self.resumed_from: Path | None = None
        """The checkpoint that `resume` has restored; None if no state was restored."""
        self.last_checkpoint: Path | None = None
        """The newest file that this process has written, not the text file of this name; None before the first."""
        self.saved_iteration = 0
        """The iteration of the newest state on the disk: of `last_checkpoint`, or of `resumed_from`."""
        self.failed_path: Path | None = None
        """A checkpoint that is newer than `last_checkpoint` and could not be written; None without one."""
        self.git: dict[str, str | bool] = {}
        """The code with which this process trains (`code_patch.record`); only on rank 0."""

    # Saving. ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        *,
        links: Sequence[Path] = (),
        optimizer: bool = True,
        schedulers: bool = True,
        resume_from_it: bool = False,
        asynchronous: bool = False,
        delete: Sequence[Path] = (),
        at_end: Callable[[bool], object] | None = None,
    ) -> bool:
        """Write the state of the run to a file, atomically; called on every rank.

        First wait for the save before it. Then call before_save_checkpoint, and write on rank 0.

        Args:
            path: the file.
            links: other names of the file: hard links to it, or copies where the file system has no links.
            optimizer: whether to save the optimizer's state.
            schedulers: whether to save the states of the schedules.
            resume_from_it: whether `resume=auto` and restarts continue from this file: `last_checkpoint` names it.
            asynchronous: write a copy in a thread while training continues; an error is raised in the next iteration.
            delete: files that rank 0 deletes once the file is written.
            at_end: called on every rank, once, with whether the file was written. Called late: when the next save
                begins, or at the end of training. Not called if an error is raised before the writing.

        Returns:
            Whether it was written. False: the disk is full or the folder is read-only, and a warning was logged. True
            if a thread writes it.

        Raises:
            UserError: a loss since the last record, or a weight, is not finite; nothing is written. With
                `asynchronous`, the error of a weight is raised in the next iteration.
        """
        self.wait_for_save()
        checkpoint = self._state(optimizer=optimizer, schedulers=schedulers)
        self._run.calls.before_save_checkpoint(checkpoint)

        ranks = self._run.ranks
        iteration = self._run.progress.iteration
        buffers = {name for name, _ in self._run.model.named_buffers(remove_duplicate=False)}
        averaging_hook: str | None = checkpoint["meta"].get("averaged_weights")

        def write(saved: Checkpoint) -> bool:  # maybe in a thread, while training continues
            self.loss_check.check_weights(broken_weights(saved, buffers, averaging_hook, ranks), iteration)
            return write_file(path, saved, ranks, links=links, resume_from_it=resume_from_it, delete=delete)

        def end(written: bool) -> None:  # on every rank
            if written:
                self.last_checkpoint = path
                self.saved_iteration = iteration
                self.failed_path = None
            elif resume_from_it and iteration > self.saved_iteration:
                self.failed_path = path
            if at_end is not None:
                at_end(written)

        return self._saver.start(part_of_this_rank(checkpoint, ranks), write, end, asynchronous=asynchronous)

    def save_tagged(self, tag: str) -> bool:
        """Write `<run_dir>/checkpoints/<tag>.pth`, from which `resume=auto` continues. Return as `save` does."""
        return self.save(self._run.run_dir / "checkpoints" / f"{tag}.pth", resume_from_it=True)

    def check_weights(self) -> None:
        """Check the weights at the end of training; called on every rank.

        Raises:
            UserError: some are not finite.
        """
        run = self._run
        broken_here = not_finite({name: local(value) for name, value in run.model.named_parameters()})
        broken = dict.fromkeys(name for of_rank in run.ranks.gather(broken_here) for name in of_rank)
        self.loss_check.check_weights(list(broken), self._run.progress.iteration)

    def wait_for_save(self) -> bool:
        """Wait for the asynchronous save; called on every rank. Return whether it was written; True without one."""
        return self._saver.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this rank is writing a checkpoint."""
        return self._saver.is_writing

    def close(self) -> None:
        """Free the buffers of saves. After an error of the run, first wait for the asynchronous save."""
        self._saver.close()

    def record_code(self) -> None:
        """Record the code with which this process trains: its commit, and uncommitted changes in `code.patch`."""
        self.git = code_patch.record(self._run.run_dir, Path.cwd())

    def _state(self, *, optimizer: bool, schedulers: bool) -> Checkpoint:
        """Return the state of the run as a checkpoint (see `format.py`); its tensors are the run's, not copies.

        Called on every rank. Sharded tensors are DTensors; `part_of_this_rank` separates them.
        """
        run = self._run
        progress = run.progress

        # Gather in one exchange what differs between ranks.
        bad_loss = self.loss_check.first()
        of_ranks: list[dict[str, Any]] = run.ranks.gather(
            {
                "rng": seeding.rng_state(),
                "data": self._position.state(),
                "messages": run.messages.state_dict() or None,
                "checksums": rank_buffers.checksums(run),
                "bad": 0 if bad_loss is None else bad_loss.iteration,
            }
        )
        self.loss_check.judge(bad_loss, [of_rank["bad"] for of_rank in of_ranks])

        checkpoint: Checkpoint = {
            "format": FORMAT,
            "meta": {
                **run.settings.metadata,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "versions": versions(),
                "git": self.git,
                "metric_names": list(self._validations.metric_names),
                **self._validations.state_dict(),
                "seconds": progress.seconds,
                "epoch": progress.epoch,
                "iteration": progress.iteration,
                **self._position.meta(),
            },
            "state_dict": run.model.state_dict(),
            "hooks": self._hook_states(),
            "precision": run.precision.state_dict(),
            "rng": seeding.of_all_ranks([of_rank["rng"] for of_rank in of_ranks]),
            "progress": progress.state_dict(),
        }
        # What a run may not have: states of its loaders, values since the last record, buffers that differ between
        # ranks, a state of the task.
        for entry in ("data", "messages"):
            states = [of_rank[entry] for of_rank in of_ranks]
            if any(state is not None for state in states):
                checkpoint[entry] = states
        if names := rank_buffers.differing([of_rank["checksums"] for of_rank in of_ranks]):
            checkpoint["buffers"] = run.ranks.gather(rank_buffers.values(run, names))
        if task := own_state(run.task):
            checkpoint["task"] = task
        # What `save_optimizer` and `save_param_scheduler` may leave out.
        if optimizer:
            checkpoint["optimizer"] = run.optimizer.state_dict()
            checkpoint["meta"] |= optimizer_state.meta(run)
        if schedulers:
            checkpoint["schedulers"] = {name: schedule.state_dict() for name, schedule in run.schedules.items()}
        return checkpoint

    def _hook_states(self) -> dict[str, Any]:
        """Return the states of the hooks, by name. A hook that fails, and whose `on_error` allows it, has none.

        A state that one rank does not have is left out: gathering its sharded tensors would wait for that rank. To
        resume without it, the user needs `resume_strict=false`.
        """
        run = self._run
        states = {
            name: self._run.calls.run_for(name, "state_dict", hook.state_dict)
            for name, hook in self._hooks_with_state().items()
            if run.ranks.is_main or not hook.rank_zero_only
        }
        states = {name: state for name, state in states.items() if state is not None}
        of_ranks: list[list[str]] = run.ranks.gather(list(states))
        return {
            name: state
            for name, state in states.items()
            if run.hooks[name].rank_zero_only or all(name in of_rank for of_rank in of_ranks)
        }

    def _hooks_with_state(self) -> dict[str, Hook]:
        return {name: hook for name, hook in self._run.hooks.items() if hook.overrides("state_dict")}

    # Loading. --------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the checkpoint of `resume`, once for each engine, and call after_load_checkpoint, also for `load_from`.

        The random generators keep their states until `restore_generators`.

        Raises:
            UserError: the file does not fit the run; names the entry.
        """
        if self.loaded:
            return
        self.loaded = True
        settings = self._run.settings
        if settings.resume is not None:
            progress = self._run.progress
            self._generators = self._restore(settings.resume)
            log.info("resumed from %s, iteration %d", settings.resume, progress.iteration)
            if progress.is_complete:
                option = "max_epochs" if settings.max_iters is None else "max_iters"
                text = "all %d iterations are done; to train longer, set engine.%s higher"
                log.info(text, progress.iteration, option)
        elif self._loaded_from is not None:
            self._run.calls.after_load_checkpoint(self._loaded_from)
            self._loaded_from = None

    def restore_generators(self) -> None:
        """Restore the saved states of the random generators, once, where training begins."""
        seeding.set_rng_state(self._generators)
        self._generators = None

    def load_for_evaluation(self, checkpoint: Checkpoint, key: str) -> None:
        """Load the weights, averaged or raw, and the task's own state; `load` then does nothing.

        Args:
            checkpoint: a checkpoint, or a state dict.
            key: the option that named the file, for the error.

        Raises:
            UserError: the file does not fit the model or the task.
        """
        load_for_evaluation(self._run, checkpoint, key)
        if "progress" in checkpoint:  # a task may use it
            self._run.progress.load_state_dict(checkpoint["progress"])
        self.loaded = True

    def _restore(self, path: Path) -> dict[str, Any] | None:
        """Restore the state of the run in a checkpoint, then call after_load_checkpoint.

        Returns:
            The saved states of this rank's random generators, not yet restored; None if the saved run had fewer ranks.

        Raises:
            UserError: the file does not fit the run; names the entry.
        """
        run = self._run
        checkpoint = load_file(path, key="resume", mmap=True, ranks=run.ranks)
        check_resumable(checkpoint, path)
        if run.ranks.is_main:
            now = {**run.settings.metadata, "versions": versions(), "git": self.git}
            for line in resumed(checkpoint["meta"], now, run.settings.optimizer_overrides):
                log.info("%s", line)
        self._set_state(checkpoint)
        self.resumed_from = path
        self.saved_iteration = run.progress.iteration
        run.calls.after_load_checkpoint(checkpoint)
        return deepcopy(seeding.of_rank(checkpoint["rng"], run.ranks.rank))  # the file is mapped to memory

    def _set_state(self, checkpoint: Checkpoint) -> None:
        run = self._run
        progress = run.progress
        strict = run.settings.resume_strict
        load_weights(run, checkpoint["state_dict"], "resume")
        load_own_state(run, checkpoint)
        for entry in ("optimizer", "schedulers"):
            if entry not in checkpoint and strict:
                raise UserError(
                    f"the checkpoint has no {entry}: it was saved without it",
                    key="resume",
                    remedy="To continue with a new one, set resume_strict=false.",
                )
        if "optimizer" in checkpoint:
            optimizer_state.load(run, checkpoint, strict=strict)
        load_named("schedulers", dict(run.schedules), checkpoint.get("schedulers", {}), strict)
        load_named("hooks", self._hooks_with_state(), checkpoint["hooks"], strict)
        rank_buffers.load(run, checkpoint.get("buffers", ()))
        run.precision.load_state_dict(checkpoint["precision"])
        progress.load_state_dict(checkpoint["progress"])
        progress.earlier_seconds = checkpoint["meta"].get("seconds", 0.0)
        self._validations.load_state_dict(checkpoint["meta"])
        self._position.load(checkpoint["meta"], checkpoint.get("data"), strict=strict)
        progress.begin_here()
        run.messages.load_state_dict(checkpoint.get("messages", []), run.ranks)
        progress.set_length(run.settings, progress.epoch_length)
