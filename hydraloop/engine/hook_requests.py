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
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.distributed.comm import Pending
from hydraloop.run.result import PREEMPTED

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Hook

log = logging.getLogger(__name__)

_SECONDS = 5.0
"""The longest time between two exchanges of the flag, unless an iteration takes longer."""

Write = Callable[["Engine"], object]


class Requests:
    """The requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone = engine.distributed.world_size == 1
        self._checkpoints: dict[str, tuple[Write, Hook | None]] = {}
        self._not_agreed: dict[str, tuple[Write | None, Hook | None]] = {}
        self._unannounced = False  # whether `_not_agreed` has checkpoints that the other ranks do not know of
        self._asked_to_stop: str | None = None
        self._stops = False  # whether all ranks have agreed to stop
        self._flag = torch.zeros(2, dtype=torch.int32)  # whether there is news; minus the proposed interval
        self._running: Pending | None = None  # the exchange of the flag
        self._interval, self._next_batch = 1, 0
        # The iteration or batch, in which mode, and the time of the last exchange.
        self._sent, self._sent_in, self._sent_at = 0, "", 0.0
        self.preempted_by: str | None = None
        """Why this process asks to save and end the run, if it does."""
        self.stop_reason: str | None = None
        """Why training stops; None until the ranks have agreed."""
        self.pending = False
        """Whether the engine can act now: a single process has asked, or all ranks have agreed."""
        self.next_exchange = math.inf if self._alone else 0
        """The iteration at or after which the next exchange takes place."""

    # Asking. ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, agreed: bool = False) -> None:
        """See `Engine.request_stop`; the first reason counts."""
        self._asked_to_stop = self._asked_to_stop or reason
        if agreed or self._alone:
            self._stops = self.pending = True

    def preempt(self, reason: str) -> None:
        """See `Engine.preempt`; the first reason counts. Only sets attributes, as a signal handler may call it."""
        self.preempted_by = self.preempted_by or reason
        if self._alone:
            self._engine.preempted_by = self.preempted_by
        self.stop(f"{PREEMPTED}{self.preempted_by}")

    def checkpoint(self, tag: str, write: Write | None, owner: Hook | None, *, agreed: bool = False) -> None:
        """See `Engine.request_checkpoint`."""
        if write is None and Path(tag).name != tag:
            raise ValueError(f"the tag {tag!r} is the stem of a file and must not contain a folder")
        # A hook that may continue after an error may have failed on one rank, which then does not ask.
        may_only_raise = owner is None or self._engine.stages.on_error(owner.name) == "raise"
        if self._alone or (agreed and may_only_raise):
            self._checkpoints[tag] = (write or _default_writer(tag), owner)
            self.pending = True
        else:
            self._not_agreed[tag] = (write, owner)
            self._unannounced = True

    def wake(self) -> None:
        """Act at the end of this window, although nothing is asked for: a save has failed in its thread."""
        self.pending = True

    def forget_stop(self) -> None:
        """Forget the stop of an earlier use of the engine; called on every rank."""
        self._asked_to_stop = self.stop_reason = self.preempted_by = None
        self._stops = False

    def forget_checkpoints(self) -> None:
        """Forget all requests for checkpoints, after a rollback; called on every rank between two exchanges."""
        self._checkpoints.clear()
        self._not_agreed.clear()
        self._unannounced = False
        if not self._alone:
            self.next_exchange = 0  # iterations are counted from an earlier one

    # Acting; on every rank at the same points. -----------------------------------------------------------------------

    def act(self) -> None:
        """Agree with all ranks on all requests, write the checkpoints, and set `stop_reason`."""
        if not self._alone:
            self._read_flag()
            self._agree()
        if self.pending:
            self._act()

    def exchange(self, iteration: int) -> None:
        """Inside an epoch, between windows: act on what is agreed; at each interval, send the flag."""
        if iteration >= self.next_exchange:
            self._exchange(iteration)
            self.next_exchange = iteration + self._interval
        if self.pending:
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
        now, mode = perf_counter(), self._engine.mode
        steps = at - self._sent if mode == self._sent_in else 0
        proposed = int(min(self._engine.distributed.agree_interval, _SECONDS * steps / max(now - self._sent_at, 1e-9)))
        proposed = max(1, proposed)
        self._sent, self._sent_in, self._sent_at = at, mode, now
        stops = self._asked_to_stop is not None and self.stop_reason is None
        news = stops or self._unannounced or bool(self._engine.stages.newly_disabled)
        self._flag = torch.tensor([int(news), -proposed], dtype=torch.int32)
        self._running = self._engine.distributed.start_max(self._flag)

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
        stages = self._engine.stages
        mine = {
            "stop": self._asked_to_stop,
            "preempted": self.preempted_by,
            "checkpoints": {tag: write is not None for tag, (write, _) in self._not_agreed.items()},
            "disabled": sorted(stages.newly_disabled),
        }
        gathered: list[dict[str, Any]] = self._engine.distributed.gather(mine)
        stages.newly_disabled.clear()
        self._unannounced = False
        for one in gathered:
            self._engine.preempted_by = self._engine.preempted_by or one["preempted"]
            if one["stop"] is not None:
                self._asked_to_stop = self._asked_to_stop or one["stop"]
                self._stops = self.pending = True
            for name in one["disabled"]:
                stages.disable(name)
        for tag in dict.fromkeys(tag for one in gathered for tag in one["checkpoints"]):
            writers = [one["checkpoints"].get(tag) for one in gathered]
            # With a hook's `write`, wait until all ranks have asked: the others do not have the function.
            if any(writers) and None in writers:
                continue
            write, owner = self._not_agreed.pop(tag, (None, None))
            self._checkpoints[tag] = (write or _default_writer(tag), owner)
            self.pending = True

    def _act(self) -> None:
        """Write each checkpoint once, with its owner's `on_error`; requests made meanwhile are done next time."""
        self.pending = False
        self._engine._saver.check()
        checkpoints, self._checkpoints = self._checkpoints, {}
        for write, owner in checkpoints.values():
            if owner is None:
                write(self._engine)
            else:
                self._engine.stages.run_for(owner.name, "a checkpoint", write, self._engine)
        if self._stops and self.stop_reason is None:
            self.stop_reason = self._asked_to_stop
            log.info("stopping: %s", self.stop_reason)


def _default_writer(tag: str) -> Write:
    return lambda engine: engine.save_checkpoint(engine.run_dir / "checkpoints" / f"{tag}.pth", last=True)
