"""What hooks request (a stop, a checkpoint), and when the engine acts: between windows, and on all ranks together.

A single process acts after the hooks of the current mount point. With several ranks, a hook may ask on one rank only (a
signal, a clock), so the ranks agree first:

* At the end of an epoch or a validation, where all ranks wait for each other anyway, they exchange requests (`act`).
* Inside an epoch, they exchange one flag in the background every `agree_interval` iterations, or every 5 s if these
  take longer (`exchange`). It is read one interval later, when it has arrived, so neither host nor device waits for it.
  If it is set on any rank, the ranks exchange the requests. The flag also has the interval that each rank proposes; the
  smallest one counts. In an evaluation, they do the same every few batches, and act after it.

A request with `agreed=True` needs no exchange: the hook asks on every rank at the same point.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.call_table import CallTable
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.hook import Hook
from hydraloop.engine.progress import Progress
from hydraloop.engine.run import Settings
from hydraloop.files.result import PREEMPTED
from hydraloop.schemas.option_checks import seconds_of

if TYPE_CHECKING:
    from hydraloop.engine.checkpoints import Checkpoints

log = logging.getLogger(__name__)

_SECONDS = 5.0
"""The longest time between two exchanges of the flag, unless an iteration takes longer."""

Write = Callable[[Any], object]


class Requests:
    """The requests of hooks, signals and clocks: a stop, a preemption, checkpoints. All ranks act together.

    Args:
        settings: `max_time`.
        ranks: all ranks, which agree.
        calls: the hooks whose `on_error` applies to writing a checkpoint.
        progress: of the run.
        saves: returns the checkpoints of the run, which are made later.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Distributed,
        calls: CallTable,
        progress: Progress,
        saves: Callable[[], Checkpoints],
    ) -> None:
        self._settings, self._ranks, self._calls, self._progress = settings, ranks, calls, progress
        self._saves = saves
        self._alone = ranks.world_size == 1
        self._checkpoints: dict[str, tuple[Write | None, Hook | None]] = {}
        self._not_agreed: dict[str, tuple[Write | None, Hook | None]] = {}
        self._unannounced = False  # whether `_not_agreed` has checkpoints that the other ranks do not know of
        self._asked_to_stop: str | None = None
        self._asked_to_preempt: str | None = None
        self._stops = False  # whether all ranks have agreed to stop
        self._save_has_failed = False  # in its thread, on this rank
        self._settles = False  # whether all ranks have agreed to settle the save
        self._flag = torch.zeros(2, dtype=torch.int32)  # whether there is news; minus the proposed interval
        self._running: Pending | None = None  # the exchange of the flag
        self._interval, self._next_batch = 1, 0
        # The iteration or batch, in which mode, and the time of the last exchange.
        self._sent, self._sent_in, self._sent_at = 0, "", 0.0
        self._deadline = math.inf
        self.preempted_by: str | None = None
        """Why the run saves and ends, to be continued later; None if it does not, or ranks have not agreed."""
        self.preemptible = False
        """Whether a signal preempts the run: from the start of training until `result.json` is written."""
        self.stop_reason: str | None = None
        """Why training stops early; None if it does not, or ranks have not agreed."""
        self._pending = False  # whether to act now: a single process has asked, or all ranks have agreed
        self._next_exchange = math.inf if self._alone else 0  # the iteration at or after which it takes place

    # Asking. ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, agreed: bool = False) -> None:
        """Ask to end training after this accumulation window; the last validation, checkpoint and test follow.

        If one rank asks, all ranks stop together: at the end of the epoch or validation, or inside an epoch within two
        exchanges (`distributed.agree_interval`).

        Args:
            reason: for the log and `result.json`; the first one counts.
            agreed: every rank asks at the same mount point of the same iteration, so all stop at once.
        """
        self._asked_to_stop = self._asked_to_stop or reason
        if agreed or self._alone:
            self._stops = self._pending = True

    def preempt(self, reason: str, *, agreed: bool = False) -> None:
        """Ask to save and end the run after this accumulation window, so that the same command line continues it.

        No validation and no test follow, and a validation or test is left. `result.json` has the status `interrupted`.
        One rank is enough; see `stop`. Only sets attributes: signal handlers may call it.

        Args:
            reason: for `result.json`: `preempted by …`; the first one counts.
            agreed: as in `stop`.
        """
        self._asked_to_preempt = self._asked_to_preempt or reason
        if agreed or self._alone:
            self.preempted_by = self._asked_to_preempt
        self.stop(f"{PREEMPTED}{self._asked_to_preempt}", agreed=agreed)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.stop_reason is not None

    @property
    def preempting(self) -> bool:
        """Whether this process has called `preempt`; other ranks may not know it yet."""
        return self._asked_to_preempt is not None

    def checkpoint(
        self, tag: str, write: Write | None = None, owner: Hook | None = None, *, agreed: bool = False
    ) -> None:
        """Ask for a checkpoint. It is written after all hooks of this mount point, once the window is closed.

        One rank is enough, but with `write` all ranks must ask. When the ranks act: see `stop`.

        Args:
            tag: one checkpoint is written for each tag; without `write`, it is the file's stem.
            write: called on every rank with the engine; None writes `<run_dir>/checkpoints/<tag>.pth`.
            owner: the hook whose `on_error` and time apply to the writing.
            agreed: every rank asks at the same mount point of the same iteration, so it is written at once.
        """
        if write is None and Path(tag).name != tag:
            raise ValueError(f"the tag {tag!r} is the stem of a file and must not contain a folder")
        # A hook that may continue after an error may have failed on one rank, which then does not ask.
        may_only_raise = owner is None or self._calls.on_error(owner.name) == "raise"
        if self._alone or (agreed and may_only_raise):
            self._checkpoints[tag] = (write, owner)
            self._pending = True
        else:
            self._not_agreed[tag] = (write, owner)
            self._unannounced = True

    def save_failed(self) -> None:
        """Ask to settle the save in the background, which has failed in its thread, so that all ranks get the error.

        Called in the thread, on one rank or on several. When the ranks act: see `stop`.
        """
        self._save_has_failed = True
        if self._alone:
            self._settles = self._pending = True

    def start_clock(self) -> None:
        """From now on, count `max_time`, and let signals preempt the run."""
        self._deadline = perf_counter() + seconds_of(self._settings.max_time)
        self.preemptible = True

    def ignore_signals(self) -> None:
        """From now on, signals do not preempt the run."""
        self.preemptible = False

    def check_clock(self) -> None:
        """Ask for a stop after `max_time`."""
        if perf_counter() > self._deadline:
            self.stop(self._settings.out_of_time)

    def forget(self) -> None:
        """Forget the stop of an earlier use of the engine; called on every rank."""
        self._asked_to_stop = self._asked_to_preempt = self.stop_reason = self.preempted_by = None
        self._stops = self.preemptible = self._save_has_failed = self._settles = False
        self._deadline = math.inf

    def forget_preemption(self) -> None:
        """Let the run end as finished: nothing is left for a resumed run."""
        self.preempted_by = None

    # Acting; on every rank at the same points. -----------------------------------------------------------------------

    def act(self) -> None:
        """Agree with all ranks on all requests, write the checkpoints, and set `stop_reason`."""
        self.agree()
        if self._pending:
            self._act()

    def agree(self) -> None:
        """Agree with all ranks on all requests, and set `preempted_by`; `act` follows."""
        if not self._alone:
            self._read_flag()
            self._agree()

    def act_in_epoch(self) -> None:
        """Inside an epoch, between windows: act on what is agreed; at each interval, send the flag."""
        self.check_clock()
        iteration = self._progress.iteration
        if iteration >= self._next_exchange:
            self._exchange(iteration)
            self._next_exchange = iteration + self._interval
        if self._pending:
            self._act()

    def exchange_in_evaluation(self, batch_idx: int) -> None:
        """Before a batch of an evaluation in which all ranks have equally many: agree on a preemption."""
        if self._alone:
            return
        if batch_idx == 0:
            self._next_batch = 0
        if batch_idx >= self._next_batch:
            self._exchange(batch_idx)
            self._next_batch = batch_idx + self._interval

    def _exchange(self, at: int) -> None:
        """Read the flag that was sent last, and agree if it is set; send the next one.

        Args:
            at: the iteration, or the batch of an evaluation.
        """
        if self._read_flag():
            self._agree()
        now, mode = perf_counter(), self._progress.mode
        if mode != self._sent_in:
            self._interval = 1  # until the time of an iteration or batch is known
        steps = at - self._sent if mode == self._sent_in else 0
        proposed = int(min(self._ranks.agree_interval, _SECONDS * steps / max(now - self._sent_at, 1e-9)))
        proposed = max(1, proposed)
        self._sent, self._sent_in, self._sent_at = at, mode, now
        stops = self._asked_to_stop is not None and self.stop_reason is None
        preempts = self._asked_to_preempt is not None and self.preempted_by is None
        news = stops or preempts or self._unannounced or self._save_has_failed or bool(self._calls.newly_disabled)
        self._flag = torch.tensor([int(news), -proposed], dtype=torch.int32)
        self._running = self._ranks.start_max(self._flag)

    def _read_flag(self) -> bool:
        """Finish the running exchange; return whether any rank has set the flag."""
        if self._running is None:
            return False
        self._running.wait()
        self._running = None
        news, interval = self._flag.tolist()
        self._interval = -interval
        return bool(news)

    def _agree(self) -> None:
        """Exchange the requests and the names of disabled hooks with all ranks."""
        calls = self._calls
        mine = {
            "stop": self._asked_to_stop,
            "preempted": self._asked_to_preempt,
            "checkpoints": {tag: write is not None for tag, (write, _) in self._not_agreed.items()},
            "disabled": sorted(calls.newly_disabled),
            "save_has_failed": self._save_has_failed,
        }
        gathered: list[dict[str, Any]] = self._ranks.gather(mine)
        calls.newly_disabled.clear()
        self._unannounced = False
        for one in gathered:
            self.preempted_by = self.preempted_by or one["preempted"]
            if one["stop"] is not None:
                self._asked_to_stop = self._asked_to_stop or one["stop"]
                self._stops = self._pending = True
            if one["save_has_failed"]:
                self._settles = self._pending = True
            for name in one["disabled"]:
                calls.disable(name)
        for tag in dict.fromkeys(tag for one in gathered for tag in one["checkpoints"]):
            writers = [one["checkpoints"].get(tag) for one in gathered]
            # With a hook's `write`, wait until all ranks have asked: the others do not have the function.
            if any(writers) and None in writers:
                continue
            self._checkpoints[tag] = self._not_agreed.pop(tag, (None, None))
            self._pending = True

    def _act(self) -> None:
        """Write each checkpoint once, with its owner's `on_error`; requests made meanwhile are done next time."""
        self._pending = False
        saves = self._saves()
        if self._settles:
            self._settles = False
            saves.wait_for_save()
        checkpoints, self._checkpoints = self._checkpoints, {}
        for tag, (write, owner) in checkpoints.items():
            save = partial(saves.save_tagged, tag) if write is None else partial(write, self._calls.engine)
            if owner is None:
                save()
            else:
                self._calls.run_for(owner.name, "a checkpoint", save)
        if self._stops and self.stop_reason is None:
            self.stop_reason = self._asked_to_stop
            log.info("stopping: %s", self.stop_reason)
