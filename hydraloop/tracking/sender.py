"""The process of a sender: `python -m hydraloop.tracking.sender <run directory> <hook name>`. No torch.

With only the directory of a sweep, it serves several of its jobs, each in a thread, so that a call that hangs delays
no other run. Its stdin is the connection to the training process, or the socket to which jobs connect. The arguments
are only for people who look at processes.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hydraloop.run_files.output import write_utf8
from hydraloop.run_files.uncollected import uncollected
from hydraloop.safety.secret_names import name_secrets
from hydraloop.safety.secrets import remember
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, is_free, lock_of, sign
from hydraloop.tracking.follower import Follower, described
from hydraloop.tracking.inbox import Inbox, Remarks
from hydraloop.tracking.masked_output import log_to_stderr
from hydraloop.tracking.starting import HANGS, LEFT
from hydraloop.tracking.tracker import Finish, Run, Tracker, load_tracker

log = logging.getLogger("hydraloop.tracking.sender")  # this module is __main__

_NICE = 5
"""Lower priority than training, because importing libraries takes seconds of CPU time. Not lower still: at the end of
the run, training waits for this process."""
_BRIEFLY = 1.0
"""Seconds to wait for the lock before this is reported: a process that only tests it holds it for a moment."""
_LOOK = 0.5
"""Seconds between two checks which runs have ended."""
_IDLE = 10.0
"""Seconds without a run after which the sender of a sweep ends. The next job may need it soon."""


class _Library:
    """The tracker of all runs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracker: type[Tracker] | None = None

    def tracker(self, first: Mapping[str, Any]) -> type[Tracker]:
        """Return the class that the first message names. The first call imports its library.

        Raises:
            Exception: the tracker cannot be imported.
        """
        with self._lock:
            if self._tracker is None:
                _adopt(first)
                self._tracker = load(first)
            return self._tracker


def load(first: Mapping[str, Any]) -> type[Tracker]:
    """Import the tracker that the first message names, and its library, which takes seconds."""
    kind = load_tracker(first["kind"], folders=first["folders"], packages=first["trusted"])
    with uncollected():
        kind.preload()
    return kind


def serve(inbox: Inbox, library: _Library) -> int:
    """Send a run until it has ended. Returns the outcome: 0 if everything was sent, else `LEFT` or `HANGS`."""
    remarks = Remarks(inbox)
    logging.getLogger("hydraloop").addHandler(remarks)
    code = None
    try:
        code = _serve(inbox, library)
    finally:
        logging.getLogger("hydraloop").removeHandler(remarks)
        inbox.close(code)
    return code


def _serve(inbox: Inbox, library: _Library) -> int:
    first = inbox.next()
    if first is None:
        return 0
    try:
        kind = library.tracker(first)
    except Exception as error:
        log.info("the tracker cannot be imported", exc_info=error)
        inbox.say_trouble(described(error))
        return LEFT
    if inbox.next() is None:
        return 0
    run_dir, name = Path(first["run_dir"]), first["name"]
    if not is_free(run_dir, name, _BRIEFLY):
        log.warning(
            "another process, probably `python -m hydraloop sync`, is sending this run: waiting until it has ended"
        )
    with lock_of(run_dir, name):
        if inbox.is_closed:  # the time was over before
            return HANGS
        sign(run_dir, name, first["owner"])
        run = run_description.read(run_dir)
        assert run is not None, "the training process describes the run before it says begin"
        cursor = _cursor(run_dir, name, first)
        tracker = kind(first["options"], run, cursor.memory)
        try:
            state = _follow(Follower(tracker, cursor, run_dir, name, inbox.say_trouble), inbox, run)
        finally:
            tracker.close()
    return 0 if state == "done" else LEFT


def _adopt(first: Mapping[str, Any]) -> None:
    """Give this process the secrets, environment and working directory of a run."""
    name_secrets(first["secrets"])
    remember(first["options"])
    os.environ.clear()
    os.environ.update(first["environment"])
    with suppress(OSError):
        os.chdir(first["cwd"])


def _cursor(run_dir: Path, name: str, first: Mapping[str, Any]) -> Cursor:
    """Return the cursor of an earlier process if it is of the same tracker, else a new one."""
    cursor = Cursor.load(run_dir, name)
    if cursor is not None and cursor.kind != first["kind"]:
        log.warning("the tracker was %s and is %s now: all records are sent again", cursor.kind, first["kind"])
        cursor = None
    cursor = cursor or Cursor(first["kind"], {})
    cursor.options = first["masked"]
    with suppress(OSError):  # the follower's own saves report a full disk
        cursor.save(run_dir, name)  # for `sync`, if this process is killed
    return cursor


def _follow(follower: Follower, inbox: Inbox, run: Run) -> str:
    finish: Finish | None = None
    opened = False
    while True:
        state = follower.step(finish)
        if not opened and state not in ("in trouble", "given up"):
            opened = True
            inbox.say("opened")
        if state in ("done", "given up") or inbox.late:
            return state
        if state != "following":
            inbox.wait(follower.wait(ending=finish is not None))
        if finish is None and inbox.ended:
            finish = inbox.finish or run_description.ending(run.run_dir, run.attempt)


def _exit_hanging(inbox: Inbox) -> None:
    """End this process, which serves one run, although a call has not returned."""
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):  # wandb-core, which may hang, too
            with suppress(psutil.Error):
                process.kill()
    os._exit(HANGS)


def _serve_jobs(listener: socket.socket) -> None:
    """Serve the jobs of a sweep that connect.

    The thread of a run whose time is over ends when its call returns. It holds the lock of the run until then.
    """
    library, inboxes, is_open = _Library(), set[Inbox](), True
    while is_open or inboxes:
        readable, _, _ = select.select([listener], [], [], _LOOK if inboxes else _IDLE)
        if not (readable or inboxes):
            is_open = False
            Path(listener.getsockname()).unlink(missing_ok=True)  # from here on, jobs start another sender
            readable, _, _ = select.select([listener], [], [], 0.0)  # a job that has connected just before
        if readable:
            connection, _ = listener.accept()
            inbox = Inbox(connection, lambda late: late.close(HANGS))
            inboxes.add(inbox)
            threading.Thread(target=serve, args=[inbox, library], name="run", daemon=True).start()
        inboxes = {inbox for inbox in inboxes if not inbox.is_closed}


def _detach() -> None:
    """Continue in a process that is not a descendant of the job that has started it: a job is killed with those."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()


def _main(of_one_run: bool) -> int:
    if not of_one_run:
        _detach()
    os.nice(_NICE)
    write_utf8()
    log_to_stderr()
    connection = socket.socket(fileno=os.dup(0))  # processes that a library starts inherit stdin, not the copy
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if of_one_run:
        return serve(Inbox(connection, _exit_hanging), _Library())
    _serve_jobs(connection)
    return 0


if __name__ == "__main__":
    sys.exit(_main(of_one_run=len(sys.argv) == 3))
