"""What hooks ask for, and the moment the engine acts on it: between windows, and on all ranks alike.

In a single process whatever is asked is done when the current mount point is over. With several ranks a hook may ask on
one of them only (a signal, a clock), so first they have to agree:

* where all ranks wait for each other anyway (an epoch's end, a validation) they tell each other what was asked (`act`);
* inside an epoch a flag goes round in the background every `agree_interval` iterations (`exchange`). It is looked at
  an interval later, when it has long arrived, so neither host nor device waits for it; only where a flag is up do the
  ranks then tell each other what it stands for.

A hook that asks on every rank at the very same point, since counters say so, is taken at its word (`agreed`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.distributed.comm import Pending

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Hook

log = logging.getLogger(__name__)

Write = Callable[["Engine"], None]


class Requests:
    """The requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone = engine.distributed.world_size == 1
        self._checkpoints: dict[str, tuple[Write, Hook | None]] = {}
        self._wishes: dict[str, tuple[Write | None, Hook | None]] = {}  # checkpoints not agreed on yet
        self._new_wishes = False  # whether the other ranks have not heard of them
        self._asked_to_stop: str | None = None
        self._stops = False  # whether that is agreed
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._round: Pending | None = None  # the exchange that is under way
        self.stop_reason: str | None = None
        """Why training stops, once agreed."""
        self.pending = False
        """Whether anything can be done at once: asked in a single process, or agreed."""
        self.next_exchange = math.inf if self._alone else 0
        """The iteration from which the next exchange is due."""

    # Asking. ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, agreed: bool = False) -> None:
        """See `Engine.request_stop`; the first reason stands."""
        self._asked_to_stop = self._asked_to_stop or reason
        if agreed or self._alone:
            self._stops = self.pending = True

    def checkpoint(self, tag: str, write: Write | None, owner: Hook | None, *, agreed: bool = False) -> None:
        """See `Engine.request_checkpoint`."""
        if write is None and Path(tag).name != tag:
            raise ValueError(f"the tag {tag!r} becomes a file's name and cannot have a path in it")
        # A hook that may go on after an error may have failed on one rank, which then does not ask.
        if self._alone or (agreed and (owner is None or self._engine.stages.may_only_raise(owner.name))):
            self._checkpoints[tag] = (write or _default_writer(tag), owner)
            self.pending = True
        else:
            self._wishes[tag] = (write, owner)
            self._new_wishes = True

    def forget_stop(self) -> None:
        """What ended an earlier use of the engine does not end the next one; called on every rank."""
        self._asked_to_stop = self.stop_reason = None
        self._stops = False

    # Acting; on every rank at the same points. -----------------------------------------------------------------------

    def act(self) -> None:
        """At a point where all ranks are: agree on everything that was asked, write the checkpoints, note a stop."""
        if not self._alone:
            self._finish_round()
            self._agree()
        if self.pending:
            self._act()

    def exchange(self, iteration: int) -> None:
        """Inside an epoch, between windows: do what is agreed, and send the flag round where that is due."""
        if iteration >= self.next_exchange:
            if self._finish_round():
                self._agree()
            stops = self._asked_to_stop is not None and self.stop_reason is None
            news = stops or self._new_wishes or bool(self._engine.stages.news)
            self._flag = torch.tensor([int(news)], dtype=torch.int32)
            self._round = self._engine.distributed.start_max(self._flag)
            self.next_exchange = iteration + self._engine.distributed.agree_interval
        if self.pending:
            self._act()

    def _finish_round(self) -> bool:
        """Whether the exchange that was under way, if any, has brought a flag."""
        if self._round is None:
            return False
        self._round.wait()
        self._round = None
        return bool(self._flag.item())

    def _agree(self) -> None:
        """Tell all ranks what was asked and which hooks are switched off, and take over what they say."""
        stages = self._engine.stages
        mine = {
            "stop": self._asked_to_stop,
            "checkpoints": {tag: write is not None for tag, (write, _) in self._wishes.items()},
            "disabled": sorted(stages.news),
        }
        told: list[dict[str, Any]] = self._engine.distributed.gather(mine)
        stages.news.clear()
        self._new_wishes = False
        for said in told:
            if said["stop"] is not None:
                self._asked_to_stop = self._asked_to_stop or said["stop"]
                self._stops = self.pending = True
            for name in said["disabled"]:
                stages.disable(name)
        for tag in dict.fromkeys(tag for said in told for tag in said["checkpoints"]):
            writers = [said["checkpoints"].get(tag) for said in told]
            # One with a writer of the hook's own waits until all ranks have asked: the others have nothing to call.
            if any(writers) and None in writers:
                continue
            write, owner = self._wishes.pop(tag, (None, None))
            self._checkpoints[tag] = (write or _default_writer(tag), owner)
            self.pending = True

    def _act(self) -> None:
        self.pending = False
        self._write_all()
        if self._stops and self.stop_reason is None:
            self.stop_reason = self._asked_to_stop
            log.info("stopping: %s", self.stop_reason)

    def _write_all(self) -> None:
        """Each request once; what is asked for meanwhile waits for the next time. An owner's errors do as it says."""
        asked, self._checkpoints = self._checkpoints, {}
        for write, owner in asked.values():
            if owner is None:
                write(self._engine)
            else:
                self._engine.stages.run_for(owner.name, "a checkpoint", write, self._engine)


def _default_writer(tag: str) -> Write:
    return lambda engine: engine.save_checkpoint(engine.run_dir / "checkpoints" / f"{tag}.pth", last=True)
