"""WandbTracker: a run at Weights & Biases, online, or in directories that `wandb sync` uploads."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hydraloop.files.metrics_log import FILENAME, Record
from hydraloop.tracking.tracker import Finish, LostError, Tracker, UnusableError, own_folder

os.environ.update(WANDB_ERROR_REPORTING="false", WANDB_SILENT="true")
os.environ.pop("WANDB_SERVICE", None)  # the `wandb-core` of a training process that uses W&B itself
import wandb  # it reads the environment

from hydraloop.tracking.wandb_run import FOLDER, LiveRun, Mode

log = logging.getLogger(__name__)

_WRITES = 5.0
"""Seconds in which `wandb-core` writes the end of a run."""


class _Core:
    """`wandb-core`, W&B's own process, which all jobs of a sweep share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        """How many of them have been ended."""
        self.users: set[int] = set()
        """Ids of the trackers that have a live run."""

    def leave(self, user: int) -> None:
        """End it after the last run, so that all files are complete."""
        with self.lock:
            self.users.discard(user)
            if not self.users:
                self._end()

    def kill(self, number: int) -> None:
        """Kill the one of a number, which may hang or would continue to upload."""
        with self.lock:
            if number != self.number:  # another job has done it
                return
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if child.name() == "wandb-core":
                        child.kill()
                        child.wait(timeout=5)
            self._end()

    def _end(self) -> None:
        with suppress(Exception, SystemExit):  # teardown exits with wandb-core's exit code
            wandb.teardown()
        self.number += 1
        self.users.clear()


_CORE = _Core()


class WandbTracker(Tracker):
    """Sends a run to one W&B run, which stays online or offline as it began.

    A record is one row of the history, with its line number as W&B's step and `iteration` as the axis. If `wandb-core`
    or this process dies, W&B may lack rows that were handed to it. Online, the service says which step it has. Offline,
    directories that `wandb sync` has not uploaded are removed, and their records are logged again.

    Rows that W&B has had are not sent again, even if a resume replaces them.

    `memory`: `next`, the number of the next record; `folder`, W&B's directory; `ended`, the number of records in each
    directory of which the run was ended; `closed`, the attempt whose end is sent; `checkpoints`, names of files.
    """

    _live: LiveRun | None = None
    _core = 0
    """The number of the `wandb-core` that has the live run."""

    def open(self) -> None:
        """Create the W&B run or continue it."""
        memory = self.memory
        memory["mode"] = mode_of(self.options["init"], memory.get("mode"))
        if memory.get("closed") != self.run.attempt.number:
            with self._running():
                pass

    def rewound(self, index: int) -> int:
        """Remember that a resume has cut records that were sent."""
        if index < self.memory.get("next", 0):
            self.memory.update(next=index, is_cut=True)
        return index

    def send(self, records: Sequence[Record]) -> None:
        """Log each record that W&B has not had as a row."""
        with self._running() as live:
            live.log([record for record in records if record.index >= self.memory["next"]])
        self.memory["next"] = max(self.memory["next"], records[-1].index + 1)

    def send_file(self) -> bool:
        """Send checkpoints if `checkpoints=all`. Other files are sent with their record, or by `finish`."""
        if self._live is not None:
            with self._running() as live:
                live.log_checkpoints(self.memory["checkpoints"], ended=False)
        return False

    def finish(self, finish: Finish) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run with its exit code.

        Raises:
            TimeoutError: not everything was uploaded in time.
            OSError: W&B could not write its file.
            UnusableError: `wandb sync` has uploaded the directory too early.
        """
        memory = self.memory
        with self._running() as live:
            size = live.file.stat().st_size
            live.finish(finish, memory["checkpoints"])
            self._live = None
            _CORE.leave(id(self))
            if memory["mode"] == "offline" and not _grows(live.file, size):  # `wandb-core` raises no error
                raise OSError(f"W&B could not write {live.file.name}, which is written again: was the disk full?")
            if _is_synced(live.file.parent):
                raise _too_early()
        memory["closed"] = self.run.attempt.number
        memory["ended"] = {**memory.get("ended", {}), memory["folder"]: memory["next"]}

    def close(self) -> None:
        """End `wandb-core` if it has the run, also for other jobs: their next calls start it again."""
        if self._live is not None:
            self._live = None
            _CORE.kill(self._core)

    @property
    def where(self) -> str | None:
        """The address of the run's page; offline, the command that uploads the run."""
        folder, url = self.memory.get("folder"), self.memory.get("url")
        if folder is None or url is not None:
            return url
        return f"wandb sync {shlex.quote(str(self.run.run_dir / FOLDER / folder))}"

    @contextmanager
    def _running(self) -> Iterator[LiveRun]:
        """Yield the live run, which is started if necessary. After any error of W&B, it is started again.

        Raises:
            UnusableError: W&B cannot continue the run.
            LostError: W&B has fewer records than were handed to it.
        """
        try:
            if self._live is None or self._core != _CORE.number:
                self._start()
            assert self._live is not None
            yield self._live
        except (LostError, UnusableError):
            raise
        except Exception:
            self._live = None
            _CORE.kill(self._core)
            raise

    def _start(self) -> None:
        """Start the run after the last record that W&B has."""
        memory, handed = self.memory, self.memory.get("next", 0)
        own_folder(self.run.run_dir, self.run.run_dir / FOLDER)
        synced = self._synced()
        with _CORE.lock:
            self._core = _CORE.number
            self._live = LiveRun(self.options, self.run, self.run.uid, memory["mode"])
            _CORE.users.add(id(self))
        there = synced if memory["mode"] == "offline" else self._live.starts_at
        if there == 0:
            memory["checkpoints"] = []
        is_cut = memory.pop("is_cut", False)
        memory.update(next=there, folder=self._live.file.parent.name, url=self._live.url, closed=None)
        if there < handed:
            raise LostError(there)
        if is_cut and there > handed:
            text = "W&B has lines %d to %d already, which the resumed run replaces: the new ones are only in %s"
            log.warning(text, handed + 1, there, FILENAME)

    def _synced(self) -> int:
        """Remove earlier directories of the run, but those that were synced. Returns the number of records in them.

        Raises:
            UnusableError: a directory was synced before its run was ended: it is not known how many records it has.
        """
        there, memory = 0, self.memory
        kind = "offline-run" if memory["mode"] == "offline" else "run"
        for folder in (self.run.run_dir / FOLDER).glob(f"{kind}-*-{self.run.uid}"):
            if not _is_synced(folder):
                shutil.rmtree(folder)
                continue
            if folder.name not in memory.get("ended", {}):
                raise _too_early()
            there = max(there, memory["ended"][folder.name])
        return there


def _is_synced(folder: Path) -> bool:
    return any(folder.glob("*.synced"))


def _too_early() -> UnusableError:
    return UnusableError(
        "the run was uploaded by `wandb sync` before its end, and W&B cannot continue its file: "
        f"the records after that are only in {FILENAME}"
    )


def _grows(file: Path, size: int) -> bool:
    """Return whether a file becomes larger than a size: `wandb-core` writes a little later if other jobs use it."""
    until = time.monotonic() + _WRITES
    while file.stat().st_size <= size and time.monotonic() < until:
        time.sleep(0.05)
    return file.stat().st_size > size


def mode_of(given: Mapping[str, Any], began: Mode | None = None) -> Mode:
    """Return the mode of a run: the one in which it `began`, else `init.mode`, `WANDB_MODE`, or online with a key.

    Never asks for a key.

    Raises:
        UnusableError: W&B is disabled, or a run that must be online cannot be.
    """
    mode = began or given.get("mode") or os.environ.get("WANDB_MODE")
    if mode == "disabled":
        raise UnusableError("W&B is disabled, by hooks.wandb.init.mode or WANDB_MODE")
    if mode == "offline":
        return "offline"
    if mode == "online":
        os.environ["WANDB_MODE"] = mode  # wandb.login finds no key if that is offline, whatever `init` says
    if wandb.login(prompt=False, verify=False):
        return "online"
    if mode is not None:
        raise UnusableError("W&B cannot be online without an API key: run `wandb login` or set WANDB_API_KEY")
    return "offline"
