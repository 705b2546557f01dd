"""The trackers of a sweep, as its controller sees them. Does not import torch.

The controller marks the sweep's directory, and waits at the end for the senders that still send. The jobs start the
senders.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydraloop.run_files.processes import started
from hydraloop.run_files.record_log import FILENAME, count
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import (
    Cursor,
    has_ended,
    hook_names,
    kill_hanging,
    run_dirs,
    sync_command,
)
from hydraloop.tracking.starting import MARGIN, SENDERS
from hydraloop.tracking.tracker import Sweep, SweepEnding

log = logging.getLogger(__name__)

_POLL = 0.1
"""Seconds between two looks for senders that still send."""
_NAMED = 5
"""Incomplete runs that are named. More do not fit on a screen."""


@dataclass
class SweepTrackers:
    """The trackers of a sweep's jobs."""

    axes: list[str] = field(default_factory=list)
    """The swept keys."""
    jobs: int = 0
    """Number of jobs."""
    ended: SweepEnding | None = "finished"
    """How the sweep has ended. None: another controller continues it."""
    _senders: Path | None = None

    def share_senders(self) -> None:
        """Let jobs share senders, for which `end` waits. Called before processes for jobs are started."""
        self._senders = Path(tempfile.mkdtemp(prefix="hydraloop-"))
        os.environ[SENDERS] = str(self._senders)

    def begin(self, folder: Path) -> None:
        """Mark the sweep's directory. Called before the first job.

        A sweep that is resumed, or that has another controller, keeps its parent run: its id and its name.
        """
        name = f"{folder.parent.name}/{folder.name}" if folder.parent.name[:4].isdigit() else folder.name
        mark = run_description.read_sweep(folder) or Sweep(
            folder=folder.absolute(), uid=secrets.token_hex(8), name=name, job=0, began=time.time()
        )
        mark = replace(
            mark,
            axes=tuple(self.axes),
            jobs=self.jobs,
            ended=None,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started(os.getpid()),
        )
        run_description.write_sweep(mark)

    def end(self, folder: Path) -> None:
        """Write how the sweep ended, and wait for the senders that still send. Called after the last job."""
        folder = folder.absolute()
        try:
            self._end(folder)
        except KeyboardInterrupt:
            log.warning("interrupted: not waiting for the trackers to send the rest")
        except OSError as error:  # a full disk must not replace the result of the sweep
            log.warning("the end of the sweep is not recorded for trackers: %s", error)
        finally:
            if self._senders is not None:  # senders without a run end
                shutil.rmtree(self._senders, ignore_errors=True)
                os.environ.pop(SENDERS, None)

    def _end(self, folder: Path) -> None:
        sweep = run_description.read_sweep(folder)
        if sweep is not None and self.ended is not None:
            run_description.write_sweep(replace(sweep, ended=self.ended))
        _wait(folder)
        _report(folder)


def _wait(folder: Path) -> None:
    """Wait for the senders of the sweep's jobs, at most the longest `flush_timeout`, and kill those that hang."""
    waiting, longest = set(), 0.0
    for run_dir, name, cursor in _cursors(folder):
        if not _is_complete(run_dir, name):
            waiting.add((run_dir, name))
            longest = max(longest, float(cursor.options.get("flush_timeout", 0.0)))
    until = time.monotonic() + longest + MARGIN
    while waiting and time.monotonic() < until:
        time.sleep(_POLL)
        waiting = {one for one in waiting if not _is_over(*one)}
    for one in waiting:
        kill_hanging(*one)


def _report(folder: Path) -> None:
    """Log which runs are not complete, and the command that completes them."""
    left: dict[str, list[str]] = {}
    kinds = {}
    for run_dir, name, cursor in _cursors(folder):
        if not _is_complete(run_dir, name):
            kinds[name] = cursor.kind
            left.setdefault(name, []).append(str(run_dir.relative_to(folder)))
    for name, runs in left.items():
        named = ", ".join(runs[:_NAMED]) + (f" and {len(runs) - _NAMED} others" if len(runs) > _NAMED else "")
        command = sync_command(folder, kinds.values())
        log.warning("%s: not everything is sent in %s; %s sends the rest", name, mask_text(named), command)


def _cursors(folder: Path) -> Iterator[tuple[Path, str, Cursor]]:
    """Yield the directory of each run with a tracker in a sweep, the tracker's name and its cursor."""
    for run_dir in run_dirs(folder):
        for name in hook_names(run_dir):
            cursor = Cursor.load(run_dir, name)
            if cursor is not None:
                yield run_dir, name, cursor


def _is_over(run_dir: Path, name: str) -> bool:
    return _is_complete(run_dir, name) or has_ended(run_dir, name)


def _is_complete(run_dir: Path, name: str) -> bool:
    cursor = Cursor.load(run_dir, name)
    return cursor is None or (cursor.complete and cursor.index == count(run_dir / FILENAME))
