"""What hooks request (a stop, a checkpoint), and when the engine acts: between windows, and on all ranks together.

A single process acts after the hooks of the current mount point. With several ranks, a hook may ask on one rank only (a
signal, a clock), so the ranks agree first:

* At the end of an epoch or a validation, all ranks wait for each other anyway. There, they exchange all requests
  (`agree_then_save_or_stop`).
* Inside an epoch, they exchange one flag in the background (`save_or_stop_if_agreed`). If any rank has set it, the
  ranks exchange all requests. In an evaluation, they do the same every few batches, and act after it.

A request with `agreed=True` needs no exchange: the hook asks on every rank at the same point.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from hydraloop.engine.background_flag import BackgroundFlag
from hydraloop.engine.hook import Hook
from hydraloop.engine.run_parts import Run
from hydraloop.files.result import preemption
from hydraloop.schemas.option_checks import seconds_of

if TYPE_CHECKING:
    from hydraloop.engine.save_and_restore import Checkpoints

log = logging.getLogger(__name__)

Write = Callable[[Any], object]


class CheckpointRequest(NamedTuple):
    """A checkpoint that is to be written."""

    write: Write | None = None
    """Called on every rank with the engine; None writes `<run_dir>/checkpoints/<tag>.pth`."""
    owner: Hook | None = None
    """The hook whose `on_error` and time apply to the writing."""


class Requests:
    """The requests of hooks, signals and clocks: to stop, to preempt the run, to write checkpoints.

    Args:
        run: the parts of the run.
        checkpoints: returns the checkpoints of the run, which are made later.
    """

    def __init__(self, run: Run, checkpoints: Callable[[], Checkpoints]) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._is_single = run.ranks.world_size == 1
        self._flag = BackgroundFlag(run.ranks)

        # Requested on this rank; other ranks may not know of it.
        self._stop_requested: str | None = None
        self._preemption_requested: str | None = None
        self._checkpoints_requested: dict[str, CheckpointRequest] = {}
        self._has_new_checkpoints = False  # whether some of them were not yet exchanged
        self._save_failed = False

        # What all ranks have agreed on; done by the next `save_or_stop_if_…`.
        self._must_act = False
        self._stop_agreed = False
        self._checkpoints_agreed: dict[str, CheckpointRequest] = {}
        self._error_agreed = False  # whether a save has failed, which all ranks end

        self.stop_reason: str | None = None
        """Why training stops early; None if it does not, or ranks have not agreed."""
        self.preempted_by: str | None = None
        """Why the run saves and ends, to be continued later; None if it does not, or ranks have not agreed."""
        self.preemptible = False
        """Whether a signal preempts the run: from the start of training until `result.json` is written."""
        self._deadline = math.inf

    # Asking. ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, agreed: bool = False) -> None:
        """Ask to end training after this accumulation window. The last validation, checkpoint and test follow.

        If one rank asks, all ranks stop together: at the end of the epoch or validation, or inside an epoch within two
        exchanges (`distributed.agree_interval`).

        Args:
            reason: for the log and `result.json`. The first reason counts.
            agreed: every rank asks at the same mount point of the same iteration, so all stop at once.
        """
        self._stop_requested = self._stop_requested or reason
        if agreed or self._is_single:
            self._stop_agreed = True
            self._must_act = True

    def preempt(self, reason: str, *, agreed: bool = False) -> None:
        """Ask to save and end the run after this accumulation window, so that the same command line continues it.

        No validation and no test follow, and a running evaluation is not finished. `result.json` has the status
        `interrupted`. If one rank asks, all ranks stop together, as in `stop`. Signal handlers may call this: it only
        sets attributes.

        Args:
            reason: for `result.json` (`preemption`). The first reason counts.
            agreed: as in `stop`.
        """
        self._preemption_requested = self._preemption_requested or reason
        if agreed or self._is_single:
            self.preempted_by = self._preemption_requested
        self.stop(preemption(self._preemption_requested), agreed=agreed)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.stop_reason is not None

    @property
    def stopping_for_good(self) -> bool:
        """Whether all ranks have agreed to stop, and a resumed run does not continue: no preemption, no `max_time`."""
        return self.preempted_by is None and self.stop_reason not in (None, self._run.settings.out_of_time)

    @property
    def preempting(self) -> bool:
        """Whether this process has called `preempt`; other ranks may not know it yet."""
        return self._preemption_requested is not None

    def checkpoint(
        self, tag: str, write: Write | None = None, owner: Hook | None = None, *, agreed: bool = False
    ) -> None:
        """Ask for a checkpoint. It is written after all hooks of this mount point, once the window is closed.

        It is enough if one rank asks; with `write`, all ranks must ask. The ranks act at the points that `stop` names.

        Args:
            tag: for each tag, one checkpoint is written. Without `write`, the tag is the file's stem.
            write: called on every rank with the engine; None writes `<run_dir>/checkpoints/<tag>.pth`.
            owner: the hook whose `on_error` and time apply to the writing.
            agreed: every rank asks at the same mount point of the same iteration, so it is written at once.
        """
        if write is None and Path(tag).name != tag:
            raise ValueError(f"the tag {tag!r} is the stem of a file and must not contain a folder")
        request = CheckpointRequest(write, owner)
        # If a hook may continue after an error, it may have failed on one rank, and that rank does not ask.
        asks_everywhere = agreed and (owner is None or self._run.calls.on_error(owner.name) == "raise")
        if asks_everywhere or self._is_single:
            self._checkpoints_agreed[tag] = request
            self._must_act = True
        else:
            self._checkpoints_requested[tag] = request
            self._has_new_checkpoints = True

    def report_failed_save(self) -> None:
        """Ask all ranks to end the save in the background, and to raise its error unless it is an `OSError`.

        Called in the thread of the save, on one rank or on several. The ranks act at the points that `stop` names.
        """
        self._save_failed = True
        if self._is_single:
            self._error_agreed = True
            self._must_act = True

    def start_time_limit(self) -> None:
        """From now on, `max_time` counts, and signals preempt the run."""
        self._deadline = perf_counter() + seconds_of(self._run.settings.max_time)
        self.preemptible = True

    def ignore_signals(self) -> None:
        """From now on, signals do not preempt the run."""
        self.preemptible = False

    def check_time_limit(self) -> None:
        """Ask for a stop after `max_time`."""
        if perf_counter() > self._deadline:
            self.stop(self._run.settings.out_of_time)

    def reset(self) -> None:
        """Forget the stop of an earlier use of the engine; called on every rank."""
        self._stop_requested = None
        self._preemption_requested = None
        self._save_failed = False
        self._stop_agreed = False
        self._error_agreed = False
        self.stop_reason = None
        self.preempted_by = None
        self.preemptible = False
        self._deadline = math.inf

    def forget_preemption(self) -> None:
        """Let the run end as finished, because a resumed run would have nothing to do."""
        self.preempted_by = None

    # Acting; on every rank at the same points. -----------------------------------------------------------------------

    def agree_then_save_or_stop(self) -> None:
        """Agree with all ranks on all requests now, write the checkpoints, and set `stop_reason`. Ranks wait."""
        self.agree()
        if self._must_act:
            self._save_or_stop()

    def save_or_stop_if_agreed(self) -> None:
        """Do only what all ranks have agreed on already, so that no rank waits. At each interval, exchange the flag."""
        self.check_time_limit()
        if not self._is_single:
            self._exchange_flag(self._run.progress.iteration)
        if self._must_act:
            self._save_or_stop()

    def exchange_in_evaluation(self, batch_idx: int) -> None:
        """Exchange the flag before a batch of an evaluation in which all ranks have the same number of batches."""
        if not self._is_single:
            self._exchange_flag(batch_idx)

    def agree(self) -> None:
        """Agree with all ranks on all requests, and set `preempted_by`; `agree_then_save_or_stop` follows."""
        if not self._is_single:
            self._flag.receive()
            self._exchange_requests()

    def _exchange_flag(self, at: int) -> None:
        """At each interval: receive the last flag, exchange requests if any rank has set it, and send the next flag.

        Args:
            at: the iteration, or the batch of an evaluation.
        """
        mode = self._run.progress.mode
        if not self._flag.is_time(at, mode):
            return
        if self._flag.receive():
            self._exchange_requests()
        has_requests = (
            (self._stop_requested is not None and self.stop_reason is None)
            or (self._preemption_requested is not None and self.preempted_by is None)
            or self._has_new_checkpoints
            or self._save_failed
            or bool(self._run.calls.newly_disabled)
        )
        self._flag.send(at, mode, is_set=has_requests)

    def _exchange_requests(self) -> None:
        """Exchange the requests and the names of disabled hooks with all ranks."""
        calls = self._run.calls
        of_ranks: list[dict[str, Any]] = self._run.ranks.gather(
            {
                "stop": self._stop_requested,
                "preemption": self._preemption_requested,
                "checkpoints": {tag: asked.write is not None for tag, asked in self._checkpoints_requested.items()},
                "disabled": sorted(calls.newly_disabled),
                "save_failed": self._save_failed,
            }
        )
        calls.newly_disabled.clear()
        self._has_new_checkpoints = False
        for of_rank in of_ranks:
            self.preempted_by = self.preempted_by or of_rank["preemption"]
            if of_rank["stop"] is not None:
                self.stop(of_rank["stop"], agreed=True)
            if of_rank["save_failed"]:
                self._error_agreed = True
                self._must_act = True
            for name in of_rank["disabled"]:
                calls.disable(name)
        for tag in dict.fromkeys(tag for of_rank in of_ranks for tag in of_rank["checkpoints"]):
            # With a hook's `write`, wait until all ranks have asked: the others do not have the function.
            has_write = [of_rank["checkpoints"].get(tag) for of_rank in of_ranks]
            if any(has_write) and None in has_write:
                continue
            self._checkpoints_agreed[tag] = self._checkpoints_requested.pop(tag, CheckpointRequest())
            self._must_act = True

    def _save_or_stop(self) -> None:
        """Write each checkpoint once, with its owner's `on_error`, and stop. The next call does new requests."""
        self._must_act = False
        checkpoints = self._checkpoints()
        if self._error_agreed:
            self._error_agreed = False
            checkpoints.wait_for_save()
            self._save_failed = False
        requested = self._checkpoints_agreed
        self._checkpoints_agreed = {}
        for tag, (write, owner) in requested.items():
            save = partial(checkpoints.save_tagged, tag) if write is None else partial(write, self._run.calls.engine)
            if owner is None:
                save()
            else:
                self._run.calls.run_for(owner.name, "a checkpoint", save)
        if self._stop_agreed and self.stop_reason is None:
            self.stop_reason = self._stop_requested
            log.info("stopping: %s", self.stop_reason)
