"""What hooks asked for, and the moment the engine acts on it: between windows, and on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Hook

log = logging.getLogger(__name__)

Write = Callable[["Engine"], None]


class Requests:
    """The requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checkpoints: dict[str, tuple[Write, Hook | None]] = {}
        self._asked_to_stop: str | None = None
        self.stop_reason: str | None = None
        """Why training stops, once agreed."""
        self.pending = False
        """Whether anything was asked and not acted on: all that the loop looks at in an iteration."""

    def stop(self, reason: str) -> None:
        """See `Engine.request_stop`; the first reason stands."""
        self._asked_to_stop = self._asked_to_stop or reason
        self.pending = True

    def checkpoint(self, tag: str, write: Write | None, owner: Hook | None) -> None:
        """See `Engine.request_checkpoint`."""
        if write is None and Path(tag).name != tag:
            raise ValueError(f"the tag {tag!r} becomes a file's name and cannot have a path in it")
        self._checkpoints[tag] = (write or _default_writer(tag), owner)
        self.pending = True

    def act(self) -> None:
        """Write the checkpoints asked for, then agree on stopping."""
        if not self.pending:
            return
        self.pending = False
        self._write_all()
        if self.stop_reason is None and self._engine.distributed.any(self._asked_to_stop is not None):
            self.stop_reason = self._asked_to_stop or "another rank asked"
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
    return lambda engine: engine.save_checkpoint(engine.run_dir / "checkpoints" / f"{tag}.pth")
