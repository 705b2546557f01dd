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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any

from hydraloop.run_files.environment import shown
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secret_names import secret_names
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.tracker import FOLDER

log = logging.getLogger(__name__)

LEFT, HANGS = 3, 4
"""Exit codes of a sender: something was not sent in time, or a call has not returned in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which a sender ends, whatever hangs."""
_STARTS = 4
"""Most starts of a sender that dies, for example because memory or the disk was short."""
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
            "secrets": secret_names(),
            "folders": folders,
            "packages": packages,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: dict[str, None] = {}
        """Directories of the jobs that run, in order."""
        self._end: Mapping[str, Any] | None = None
        self._unwritten = b""
        self._starts = 0
        self._is_over = False
        self.problem: str | None = None
        """Why the process has ended early for the last time; None if it has not."""

    @property
    def is_started(self) -> bool:
        """Whether the process was started."""
        return self._process is not None

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
            arguments = ("sync", "--follow", str(self._folder))
            self._process = spawn("hydraloop", *arguments, stdin=subprocess.PIPE, stdout=output, stderr=output)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unwritten = b""
        self._tell(self._first, *({"begun": job} for job in self._jobs), *([] if self._end is None else [self._end]))

    def job_begins(self, run_dir: Path) -> None:
        """Let the process follow the run of a job."""
        self._jobs[str(run_dir.absolute())] = None
        if self.is_started:
            self._tell({"begun": str(run_dir.absolute())})

    def job_ends(self, run_dir: Path) -> None:
        """Tell the process that the job does not run any more."""
        self._jobs.pop(str(run_dir.absolute()), None)
        if self.is_started:
            self._tell({"ended": str(run_dir.absolute())})

    def check(self) -> None:
        """Start the process again if it has died. After three times, it is given up."""
        if self._process is None or self.problem is not None or self._is_over:
            return
        self._write()
        code = self._process.poll()
        if code is None or code in (0, LEFT, HANGS):
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

    def finish(self, **finish: Any) -> None:
        """Tell the process how the run has ended, or that the sweep has. Later calls have no effect."""
        if self._end is None:
            self._end = {"end": finish}
            if self.is_started:
                self._tell(self._end)

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, and kill it after `seconds`."""
        until = monotonic() + seconds + 2 * MARGIN  # it reads the message of the end a little later
        while self.is_alive:
            self.check()
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
            if monotonic() >= until:
                self.kill()
                self.problem = f"no answer within {seconds:g} s after the end"
        self._close()
        if self._process is not None and self._process.poll() == HANGS:
            self.problem = f"no answer within {seconds:g} s after the end"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, or is to be started again."""
        if self._process is None or self.problem is not None or self._is_over:
            return False
        return self._process.poll() not in (0, LEFT, HANGS)

    def kill(self) -> None:
        """Kill the process and all that it has started (its session)."""
        if self._process is not None and self._process.poll() is None:
            self._is_over = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken disk cannot be killed
                self._process.wait(5.0)
        self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _tell(self, *messages: Mapping[str, Any]) -> None:
        self._unwritten += b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes: the process may hang."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the pipe is full or closed, or the process has ended
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._process.stdin.fileno(), self._unwritten) :]

    def _why(self, code: int) -> str:
        """Say why the process has ended: the signal, or the last line of its log."""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        lines = log_of(self._folder).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return mask_text(f"has ended with exit code {code}" + (f" ({last.strip()[:300]})" if last else ""))


def log_of(folder: Path) -> Path:
    """Return the file with the output of the sender of a run or sweep."""
    return folder / FOLDER / "sync.log"


def spawn(
    module: str, *arguments: str, stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` in a new session, in which it does not receive Ctrl-C."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
