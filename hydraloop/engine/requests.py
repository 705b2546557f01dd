"""What hooks asked for, and the moment the engine acts on it: between windows, and on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from hydraloop.engine.hook import Hook

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

Write = Callable[["Engine"], None]


class Requests:
    """The requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checkpoints: dict[str, Write | None] = {}
        self._asked_to_stop: str | None = None
        self.stop_reason: str | None = None
        """Why training stops, once agreed."""
        self.pending = False
        """Whether anything was asked and not acted on: all that the loop looks at in an iteration."""

    def stop(self, reason: str) -> None:
        """See `Engine.request_stop`; the first reason stands."""
        self._asked_to_stop = self._asked_to_stop or reason
        self.pending = True

    def checkpoint(self, tag: str, write: Write | None) -> None:
        """See `Engine.request_checkpoint`."""
        self._checkpoints[tag] = write
        self.pending = True

    def act(self) -> None:
        """Write the checkpoints asked for, then agree on stopping."""
        if not self.pending:
            return
        self._write_all()
        if self.stop_reason is None and self._engine.distributed.any(self._asked_to_stop is not None):
            self.stop_reason = self._asked_to_stop or "another rank asked"
            log.info("stopping: %s", self.stop_reason)
        self.pending = False

    def _write_all(self) -> None:
        engine = self._engine
        while self._checkpoints:
            tag = next(iter(self._checkpoints))
            write = self._checkpoints.pop(tag)
            if write is not None:
                start = perf_counter()
                write(engine)
                owner = getattr(write, "__self__", None)
                if isinstance(owner, Hook):  # the writing is that hook's work, and counts as its time
                    engine.stages.seconds[owner.name][0] += perf_counter() - start
            else:
                engine.save_checkpoint(engine.run_dir / "checkpoints" / f"{tag}.pth")
