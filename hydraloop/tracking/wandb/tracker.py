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
from hydraloop.tracking.wandb import segments
from hydraloop.tracking.wandb.file import steps
from hydraloop.tracking.wandb.run import LiveRun, kill_core
from hydraloop.tracking.wandb.segments import Segment
from hydraloop.tracking.wandb.setup import Mode, mode_of, prepare

log = logging.getLogger(__name__)

_UPLOAD_TIMEOUT = 3600.0
"""Seconds for `wandb sync`; the user can interrupt it earlier."""
_PATIENCE = 300.0
"""Seconds after which `wandb-core` counts as hanging, while the run has not ended."""
_TIME_TO_END = 0.9
"""The same at the run's end, as a part of `flush_timeout`: the rest is for reporting the reason."""
_RETRIES = "2"
"""Retries of `wandb sync` if the service does not answer. Its default takes days."""


class WandbTracker(Tracker):
    """Sends a run to one W&B run (`segments.py` explains when there are more).

    A record is one row of the history, with its line number as W&B's step and `iteration` as the axis. W&B has its own
    process, `wandb-core`, which writes the file and uploads. If it dies, the records that it had not yet written or
    uploaded are sent again: an offline file is written again from the record log, and online, the service says which
    step it has (`LostError`). An offline file is read back before the run counts as finished.

    Online, a record counts as sent when `wandb-core` has it. `finish` waits until the service has all records, and
    raises if this takes longer than `flush_timeout`. `sync.py` then continues from the service's last step.
    """

    @classmethod
    def preload(cls) -> None:
        prepare()
        import wandb  # noqa: F401  # it reads the environment when it is imported

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._mode: Mode = "offline"
        self._segment: Segment | None = None
        self._live: LiveRun | None = None

    def open(self) -> None:
        """Create the W&B run or continue it.

        Raises:
            UnusableError: W&B is disabled, or `mode=online` and there is no key.
            LostError: W&B has fewer records than were handed to it.
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
            LostError: W&B has fewer records than were handed to it.
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
        """Remember from which record on rows are to be taken back; `open` does it."""
        segment = segments.last(self.memory)
        if segment is not None:
            segment.next = min(segment.next, index)
            segments.remember(self.memory, segment)
        return index

    def send_file(self) -> bool:
        """Send checkpoints if `checkpoints=all`."""
        if self._live is not None:
            with self._or_let_go():
                self._live.log_checkpoints(ended=False)
            self._remember()
        return False

    def finish(self, finish: Finish) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run with its exit code.

        Raises:
            OSError: the file does not have every row.
            TimeoutError: not everything was uploaded in time, or `wandb-core` hangs.
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
        """End `wandb-core` if it runs, without waiting for an upload."""
        if self._live is not None and self._mode == "online":
            kill_core()
        self._live = None
        wandb = sys.modules.get("wandb")
        if wandb is not None:
            with suppress(Exception, SystemExit):  # teardown exits with wandb-core's exit code
                wandb.teardown()

    @property
    def where(self) -> str | None:
        """The address of the run's page; offline, the command that uploads the run."""
        segment = self._segment
        if segment is None or segment.folder is None:
            return None
        if segment.url is not None:
            return segment.url
        return f"wandb sync {shlex.quote(str(self.run.run_dir / segments.FOLDER / segment.folder))}"

    def _running(self) -> tuple[LiveRun, Segment]:
        """Return the live run and its segment, which are started if necessary.

        Raises:
            LostError: the run has fewer records than were handed to the previous live run.
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
        segment = segments.to_open(before, self.run.uid, self._mode, run_dir)
        segment = replace(segment, attempt=number)
        if before is None or segment.id != before.id or before.mode != "online":
            if segment.mode == "offline":
                segments.put_away(run_dir, segment.id)  # first: a new folder of the same second has the same name
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
        """Remove the rows from `next` on: W&B rewinds the run, or a new segment begins there."""
        self._live = live
        self.close()
        if segment.next > segment.first:
            try:
                how = {"resume_from": f"{segment.id}?_step={segment.next - 1}"}
                return LiveRun(self.options, self.run, segment, **how), segment
            except Exception as error:
                log.info("W&B does not rewind: %s", error)
                self.close()
        segment = replace(segments.new_part(segment, self.run.uid, segment.mode), attempt=self.run.attempt.number)
        return LiveRun(self.options, self.run, segment), segment

    def _upload(self, segment: Segment) -> None:
        """Upload a finished offline run with W&B's command, if W&B is online now."""
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
        """After any error of W&B, close the run, so that the next call starts it again.

        A `wandb-core` that hangs is killed, which ends the call that waits for it.

        Raises:
            TimeoutError: the call took longer than `seconds`.
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
