"""WandbTracker: a run at Weights & Biases, online, or in files that `wandb sync` uploads."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hydraloop.run.record_log import Record
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.tracker import Finish, LostError, Run, Tracker
from hydraloop.tracking.wandb import segments as segments
from hydraloop.tracking.wandb.file import steps
from hydraloop.tracking.wandb.run import LiveRun, kill_core
from hydraloop.tracking.wandb.segments import Segment
from hydraloop.tracking.wandb.setup import Mode, mode_of, prepare

log = logging.getLogger(__name__)

_UPLOAD_TIMEOUT = 3600.0
"""Seconds for `wandb sync`: whoever waits for it can end it."""
_PATIENCE = 300.0
"""Seconds until `wandb-core` counts as hanging, where no end of the run waits for it."""
_TIME_TO_END = 0.9
"""Part of `flush_timeout` after which it does at the run's end: the reason is said while there is time."""
_RETRIES = "2"
"""Of `wandb sync` where the service does not answer; its own default goes on for days."""


class WandbTracker(Tracker):
    """One W&B run, whatever happens (`wandb_segments.py` has the exceptions).

    A record is one row of its history: its line is W&B's step, and `iteration` the axis. W&B has a process of its own,
    `wandb-core`, that writes the file and uploads. When that one dies, what it had not yet written, or not uploaded, is
    sent again: the file is made anew from the record log, the service says how far it has come (`LostError`). An
    offline file is read back before the run counts as finished.

    Online, a record counts as sent when `wandb-core` has it; `finish` waits until all of them are at the service, and
    raises where they are not within `flush_timeout`. Then `sync.py` goes on where the service stands.
    """

    kind = "wandb"

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._mode: Mode = "offline"
        self._segment: Segment | None = None
        self._live: LiveRun | None = None

    def open(self) -> None:
        """Make the W&B run, or go on with it.

        Raises:
            UnusableError: it is disabled; `mode=online` without a key.
            LostError: W&B has less than was handed to it.
        """
        prepare()
        self._mode = mode_of(self.options["mode"])
        if self._segment is None:
            self._segment = segments.last(self.memory)
        if self._segment is not None and self._segment.closed == self.run.attempt.number:
            self._upload(self._segment)
        else:
            self._running()

    def send(self, records: Sequence[Record]) -> None:
        """Log each record that W&B does not have yet as a row.

        Raises:
            LostError: W&B has less than was handed to it.
            TimeoutError: `wandb-core` hangs.
        """
        live, segment = self._running()
        with self._or_let_go():
            for record in records:
                if record.index >= segment.next:
                    live.log(record)
                    segment.next = record.index + 1
        self._remember()

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Remember from where on rows are to be taken back; `open` does it."""
        segment = segments.last(self.memory)
        if segment is not None:
            segment.next = min(segment.next, index)
            segments.remember(self.memory, segment)
        return index

    def idle(self) -> None:
        """Send checkpoints, where all of them are wanted."""
        if self._live is not None:
            with self._or_let_go():
                self._live.log_checkpoints(ended=False)
            self._remember()

    def finish(self, finish: Finish) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run with its exit code.

        Raises:
            OSError: not every row is in the file.
            TimeoutError: not everything is uploaded; `wandb-core` hangs.
        """
        live, segment = self._running()
        in_sync = bool(self.options.get("_sync"))
        with self._or_let_go(_UPLOAD_TIMEOUT if in_sync else _TIME_TO_END * max(1.0, self.options["flush_timeout"])):
            live.finish(finish)
        self._live = None
        self.close()
        file = segment.file(self.run.run_dir)
        if segment.mode == "offline" and file is not None and (found := len(steps(file))) != live.rows:
            raise OSError(f"{file} has {found} of {live.rows} rows: is the disk full?")
        segment.closed = self.run.attempt.number
        self._remember()

    def close(self) -> None:
        """End `wandb-core`, if there is one; without waiting for an upload."""
        if self._live is not None and self._mode == "online":
            kill_core()
        self._live = None
        wandb = sys.modules.get("wandb")
        if wandb is not None:
            with suppress(Exception, SystemExit):  # it exits with wandb-core's own code
                wandb.teardown()

    @property
    def where(self) -> str | None:
        """The run's page; offline the command that uploads it."""
        segment = self._segment
        if segment is None or segment.folder is None:
            return None
        if segment.url is not None:
            return segment.url
        return f"wandb sync {shlex.quote(str(self.run.run_dir / segments.FOLDER / segment.folder))}"

    def _running(self) -> tuple[LiveRun, Segment]:
        """The live run and its segment; started now where there is none.

        Raises:
            LostError: it has less than was handed to the one before it.
        """
        if self._live is None or self._segment is None:
            before = self._segment
            with self._or_let_go():
                self._live, self._segment = self._start(before)
            self._remember()
            if before is not None and self._segment.next < before.next:
                raise LostError(self._segment.next)
        return self._live, self._segment

    def _start(self, before: Segment | None) -> tuple[LiveRun, Segment]:
        run_dir, number = self.run.run_dir, self.run.attempt.number
        segment = segments.after(before, self.run.uid, self._mode, run_dir)
        segment = replace(segment, attempt=number)
        if before is None or segment.id != before.id or before.mode != "online":
            if segment.mode == "offline":
                segments.put_away(run_dir, segment.id)  # before a new one could have the same name, of the same second
            live = LiveRun(self.options, self.run, segment)
            segments.put_away(run_dir, segment.id, but=segment.folder)
            segment.next, segment.artifacts = segment.first, []
            return live, segment
        live = LiveRun(self.options, self.run, segment, resume="allow")
        if live.starts_at > segment.next and before.attempt != number:
            return self._take_back(live, segment)
        segment.next = max(live.starts_at, segment.first)
        return live, segment

    def _take_back(self, live: LiveRun, segment: Segment) -> tuple[LiveRun, Segment]:
        """Rows behind `next` are not the run's any more: W&B rewinds, or a new segment begins there."""
        self._live = live
        self.close()
        if segment.next > segment.first:
            try:
                how = {"resume_from": f"{segment.id}?_step={segment.next - 1}"}
                return LiveRun(self.options, self.run, segment, **how), segment
            except Exception as error:
                log.info("W&B does not rewind: %s", error)
                self.close()
        segment = replace(segments.behind(segment, self.run.uid), attempt=self.run.attempt.number)
        return LiveRun(self.options, self.run, segment), segment

    def _upload(self, segment: Segment) -> None:
        """Hand a finished offline run to W&B's own command, where it is synced and a key is there."""
        file = segment.file(self.run.run_dir)
        if self._mode != "online" or segment.mode != "offline" or file is None or segment.is_uploaded(self.run.run_dir):
            return
        done = subprocess.run(
            [sys.executable, "-P", "-m", "wandb", "sync", str(file.parent)],
            env={"WANDB__GRAPHQL_RETRY_MAX": _RETRIES, **os.environ},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_UPLOAD_TIMEOUT,
        )  # fmt: skip
        if not segment.is_uploaded(self.run.run_dir):
            said = mask_text((done.stderr or done.stdout).strip()[-300:])
            raise OSError(f"`wandb sync` has not uploaded {file.parent}: {said}")

    @contextmanager
    def _or_let_go(self, seconds: float = _PATIENCE) -> Iterator[None]:
        """After any error of W&B's the run is started again: nothing tells what of it still works.

        A `wandb-core` that hangs is ended, which ends the waiting for it.

        Raises:
            TimeoutError: it had not done its part after `seconds`.
        """
        hangs = threading.Event()

        def end() -> None:
            hangs.set()
            kill_core()

        watch = threading.Timer(seconds, end)
        watch.daemon = True
        watch.start()
        try:
            yield
        except BaseException as error:
            kill_core()
            self.close()
            if hangs.is_set():
                raise TimeoutError("wandb-core, W&B's own process, does not answer") from error
            raise
        finally:
            watch.cancel()

    def _remember(self) -> None:
        if self._segment is not None:
            segments.remember(self.memory, self._segment)
