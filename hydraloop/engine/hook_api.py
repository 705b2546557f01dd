"""HookApi: what hooks ask the engine to do. When it acts on a request is in `hook_requests.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydraloop.engine.checkpoint import save_load
from hydraloop.engine.checkpoint.format import Checkpoint
from hydraloop.engine.hook import Hook
from hydraloop.engine.state import EngineState
from hydraloop.run.result import Best

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class HookApi(EngineState):
    """The methods of an engine for hooks."""

    def request_stop(self, reason: str, *, agreed: bool = False) -> None:
        """Ask to end training after this accumulation window; the last validation, checkpoint and test follow.

        If one rank asks, all ranks stop together: at the end of the epoch or validation, or inside an epoch within two
        exchanges (`distributed.agree_interval`).

        Args:
            reason: for the log and `result.json`; the first one counts.
            agreed: every rank asks at the same mount point of the same iteration, so all stop at once.
        """
        self._requests.stop(reason, agreed=agreed)

    def preempt(self, reason: str) -> None:
        """Ask to save and end the run after this accumulation window, so that the same command line continues it.

        No validation and no test follow, and a validation or test is left. `result.json` has the status `interrupted`.
        One rank is enough; see `request_stop`. Signal handlers may call it.

        Args:
            reason: for `result.json`: `preempted by …`; the first one counts.
        """
        self._requests.preempt(reason)

    @property
    def preempting(self) -> bool:
        """Whether this process has called `preempt`; other ranks may not know it yet."""
        return self._requests.preempted_by is not None

    def request_checkpoint(
        self,
        tag: str,
        write: Callable[[Engine], object] | None = None,
        owner: Hook | None = None,
        *,
        agreed: bool = False,
    ) -> None:
        """Ask for a checkpoint. It is written after all hooks of this mount point, once the window is closed.

        One rank is enough, but with `write` all ranks must ask. When the ranks act: see `request_stop`.

        Args:
            tag: one checkpoint is written for each tag; without `write`, it is the file's stem.
            write: called on every rank to write it; None writes `<run_dir>/checkpoints/<tag>.pth`.
            owner: the hook whose `on_error` and time apply to the writing.
            agreed: every rank asks at the same mount point of the same iteration, so it is written at once.
        """
        self._requests.checkpoint(tag, write, owner, agreed=agreed)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._requests.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why training stops early; None if it does not."""
        return self._requests.stop_reason

    def leave_out(self, batches: Mapping[int, Collection[int]]) -> None:
        """Do not train on batches, whole accumulation windows. They are loaded, and do not count as iterations.

        Called on every rank in after_load_checkpoint, before which the run's length does not consider any.

        Args:
            batches: by epoch, their indices in it; both from 0.
        """
        self.left_out = batches
        if self.settings.max_iters is None:
            here = (self.progress.epoch, self.progress.batch_in_epoch)
            self.max_iters -= sum((epoch, index) >= here for epoch, found in batches.items() for index in found)

    def report_best(self, best: Best) -> None:
        """Set the best validation, for `result.json`; the test uses its checkpoint."""
        self.best = best

    def during_evaluation(self, context: AbstractContextManager[Any]) -> None:
        """Enter `context` now, and leave it after the last iteration of this validation or test, also after an error.

        Raises:
            RuntimeError: not called in before_val_epoch or before_test_epoch.
        """
        if self._evaluation is None:
            raise RuntimeError("call during_evaluation in before_val_epoch or before_test_epoch")
        self._evaluation.enter_context(context)

    def save_checkpoint(
        self,
        path: Path,
        *,
        optimizer: bool = True,
        schedulers: bool = True,
        last: bool = False,
        asynchronous: bool = False,
        delete: Sequence[Path] = (),
        done: Callable[[bool], object] | None = None,
    ) -> bool:
        """Write the state of the run to `path`, atomically, on rank 0; call before_save_checkpoint first.

        Called on every rank. First waits for the save before it.

        Args:
            path: the file.
            optimizer: whether to save the optimizer's state.
            schedulers: whether to save the states of the schedules.
            last: whether `resume=auto` and restarts continue from this file (the file `last_checkpoint` names it).
            asynchronous: write a copy in a thread while training continues; an error is raised in the next iteration.
            delete: files that rank 0 deletes when the file is written.
            done: called on every rank, with whether it was written, at the latest at the end of training.

        Returns:
            Whether it was written. False: the disk is full or the folder is read-only, and a warning was logged. True
            if a thread writes it.
        """
        self.settle_saves()
        checkpoint = save_load.collect(cast("Engine", self), optimizer=optimizer, schedulers=schedulers)
        self._call(self.stages.before_save_checkpoint, checkpoint)
        iteration = self.progress.iteration

        def settled(written: bool) -> None:
            if written:
                self.last_checkpoint, self.saved_iteration, self.unwritten = path, iteration, None
            elif last and iteration > self.saved_iteration:
                self.unwritten = path
            if done is not None:
                done(written)

        def write(saved: Checkpoint) -> bool:
            return save_load.write_file(path, saved, self.distributed, last=last, delete=delete)

        checkpoint = save_load.stand_alone(checkpoint, self.distributed)
        return self._saver.start(checkpoint, write, settled, asynchronous=asynchronous)

    def settle_saves(self) -> bool:
        """Wait until the asynchronous save is done, on every rank. Return whether it was written; True without one."""
        return self._saver.settle()
