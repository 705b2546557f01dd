"""Sender: the process that sends a run or the jobs of a sweep to trackers, as its owner sees it.

It is `python -m hydraloop sync --follow <directory>`, which ends soon after its owner. It reads lines of JSON from its
stdin: first what must not be in arguments or files, then what happens.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any

from hydraloop.files.environment import shown
from hydraloop.files.secrets import mask_text, masked
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import is_complete, run_dirs, sync_command
from hydraloop.tracking.tracker import FOLDER

log = logging.getLogger(__name__)

HANGS = 4
"""Exit code of a sender of which a call has not returned in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which a sender ends, whatever hangs."""
_STARTS = 4
"""Most starts of a sender that dies, for example because memory or the disk was short."""
_NAMED = 5
"""Incomplete runs that are named. More do not fit on a screen."""
_ROOT = Path(__file__).resolve().parents[2]
"""Folder that hydraloop is imported from."""

Trust = tuple[list[str], list[str]]
"""Folders and packages in which a tracker may be."""


class Sender:
    """Starts the process, starts it again if it dies, and ends it. Only `wait` waits, in bounded time.

    Args:
        folder: the directory of the run or sweep.
        options: of trackers, by the name of the hook: those whose values are masked in files.
        trust: where trackers may be. None: where this process may import them from.
    """

    def __init__(self, folder: Path, options: Mapping[str, Mapping[str, Any]] = {}, trust: Trust | None = None) -> None:
        self._folder = folder.absolute()
        folders, packages = trust or (ALLOWLIST.folders, ALLOWLIST.packages)
        self._first = {
            "owner": os.getpid(),
            "options": options,
            "folders": folders,
            "packages": packages,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: dict[str, None] = {}
        """Directories of the jobs that run, in order."""
        self._end: Mapping[str, Any] | None = None
        self._starts = 0
        self.problem: str | None = None
        """Why the process has ended early for the last time; None if it has not."""
        self.is_late = False
        """Whether the process had to be killed at the end, because it took too long."""

    @property
    def is_started(self) -> bool:
        """Whether the process was started."""
        return self._starts > 0

    def start(self) -> None:
        """Start the process. Its output is appended to `<folder>/tracking/sync.log`.

        Raises:
            OSError: it could not be started.
        """
        self._starts += 1
        self._close()
        path = log_of(self._folder)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as output:
            self._process = spawn("hydraloop", "sync", "--follow", str(self._folder), output=output)
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # it has ended
            pipe.write(_lines(self._first, *({"started": job} for job in self._jobs)))
            pipe.flush()
        os.set_blocking(pipe.fileno(), False)
        if self._end is not None:
            self._write(self._end)

    def job_begins(self, run_dir: Path) -> None:
        """Let the process follow the run of a job."""
        self._jobs[str(run_dir.absolute())] = None
        self._write({"started": str(run_dir.absolute())})

    def job_ends(self, run_dir: Path) -> None:
        """Tell the process that the job does not run any more."""
        self._jobs.pop(str(run_dir.absolute()), None)
        self._write({"ended": str(run_dir.absolute())})

    def check(self) -> None:
        """Start the process again if it has died. After three times, it is given up."""
        code = None if self._process is None else self._process.poll()
        if code is None or code in (0, HANGS) or self.problem is not None:
            return
        problem = self._why(code)
        if self._starts < _STARTS:
            if self._starts == 1:
                log.warning("the sender of the records %s, and is started again", problem)
            self.start()
        else:
            self.problem = (
                f"the sender of the records {problem} again and is given up, see {shown(log_of(self._folder))}"
            )

    def finish(self, flush_timeout: float, **finish: Any) -> None:
        """Tell the process that the run or sweep has ended. Later calls have no effect.

        Args:
            flush_timeout: seconds to send the rest.
            finish: how the run has ended, if its directory does not say so.
        """
        if self._end is None:
            self._end = {"end": flush_timeout, "finish": finish}
            self._write(self._end)

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, and kill it after `seconds`."""
        until = monotonic() + seconds + 2 * MARGIN  # it reads the message of the end a little later
        while self.is_alive:
            self.check()
            time.sleep(0.02)
            if monotonic() >= until:
                self.kill()
                self.is_late = True
        self._close()
        self.is_late = self.is_late or (self._process is not None and self._process.poll() == HANGS)
        if self.is_late:
            self.problem = f"no answer within {seconds:g} s after the end"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, or is to be started again."""
        return self._process is not None and self.problem is None and self._process.poll() not in (0, HANGS)

    def kill(self) -> None:
        """Kill the process and all that it has started (its session)."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken disk cannot be killed
                self._process.wait(5.0)
        self._close()
        self._process = None

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        """Write a message, unless the pipe is full: then the process hangs."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # also if the pipe is closed, or the process has ended
                os.write(self._process.stdin.fileno(), _lines(message))

    def _why(self, code: int) -> str:
        """Say why the process has ended: the signal, or the last line of its log."""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        lines = log_of(self._folder).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return mask_text(f"has ended with exit code {code}" + (f" ({last.strip()[:300]})" if last else ""))


class SweepSender(Sender):
    """The sender of all jobs of a sweep. It is started when a job has a tracker.

    Args:
        folder: of the sweep.
        hooks: the options of the hooks of a job, by name. They may contain secrets.
    """

    def __init__(self, folder: Path, hooks: Mapping[str, Any] = {}) -> None:
        shown = masked(hooks)
        hidden = {
            name: {key: value for key, value in options.items() if value != shown[name][key]}
            for name, options in hooks.items()
            if isinstance(options, Mapping)
        }
        super().__init__(folder, hidden)

    def job_ends(self, run_dir: Path) -> None:
        """Tell the process that the job does not run any more."""
        self.check()  # the job may have been too short for the last check
        super().job_ends(run_dir)

    def check(self) -> None:
        """Start the process if a job has a tracker, or if the process has died. Called several times a second."""
        if self.is_started:
            super().check()
        elif any(run_description.is_described(Path(run_dir), 0) for run_dir in self._jobs):
            self.start()

    def end(self) -> None:
        """Wait until everything is sent, at most the longest `flush_timeout`. Called after the last job."""
        incomplete, seconds = self._incomplete()
        if not self.is_started:
            if not incomplete:
                return
            self.start()  # for jobs that have saved after the end of an earlier controller
        self.finish(seconds)
        try:
            self.wait(seconds)
        except KeyboardInterrupt:
            log.warning("interrupted: not waiting for the trackers to send the rest")
            self.kill()
        incomplete, _ = self._incomplete()
        for (name, kind), runs in incomplete.items():
            named = ", ".join(runs[:_NAMED]) + (f" and {len(runs) - _NAMED} others" if len(runs) > _NAMED else "")
            command = sync_command(self._folder, kind)
            log.warning("%s: not everything is sent in %s; %s sends the rest", name, mask_text(named), command)

    def _incomplete(self) -> tuple[dict[tuple[str, str], list[str]], float]:
        """Return the runs that are not complete, by name and kind of the tracker, and the longest `flush_timeout`."""
        found: dict[tuple[str, str], list[str]] = {}
        longest = 0.0
        for run_dir in run_dirs(self._folder):
            number, trackers = run_description.trackers_of(run_dir)
            for name, tracker in trackers.items():
                if not is_complete(run_dir, name, number):
                    found.setdefault((name, tracker["kind"]), []).append(str(run_dir.relative_to(self._folder)))
                    longest = max(longest, float(tracker["options"]["flush_timeout"]))
        return found, longest


def _lines(*messages: Mapping[str, Any]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def log_of(folder: Path) -> Path:
    """Return the file with the output of the sender of a run or sweep."""
    return folder / FOLDER / "sync.log"


def spawn(module: str, *arguments: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` in a new session, in which it does not receive Ctrl-C."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
