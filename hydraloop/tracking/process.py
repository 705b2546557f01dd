"""The process of a follower: `python -m hydraloop.tracking.process <run directory> <hook name>`. No torch.

Without arguments, it is the process that is forked for each follower of a sweep's jobs (`spawning.ForkServer`).
It exchanges lines of JSON with the training process. In: the hook's options; `begin` when the run is described and its
log is cut; `finish` when the run has ended. Out: what is to be logged in the terminal. The end of the input means that
the training process has exited; the follower then sends the rest and closes the run within the same time limit.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import psutil

from hydraloop.run.processes import is_alive, started
from hydraloop.run.uncollected import uncollected
from hydraloop.safety.secret_names import name_secrets
from hydraloop.safety.secrets import mask_text, remember
from hydraloop.tracking import description
from hydraloop.tracking.cursor import Cursor, is_free, lock_of, sign
from hydraloop.tracking.follower import Follower, described
from hydraloop.tracking.spawning import HANGS, LEFT, MARGIN, NICE
from hydraloop.tracking.tracker import Finish, Run, Tracker, load_tracker

log = logging.getLogger("hydraloop.tracking.process")  # this module is __main__

_BRIEFLY = 1.0
"""Seconds to wait for the lock before this is reported: a process that only tests it holds it for a moment."""
_LOOK = 0.5
"""Seconds between two checks whether the training process is still running."""
_REAP = 0.2
"""Seconds between two looks for forked followers that have exited."""
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"


def load(first: Mapping[str, Any]) -> type[Tracker]:
    """Import the tracker that the first message names, and its library, which takes seconds."""
    kind = load_tracker(first["kind"], folders=first["folders"], packages=first["trusted"])
    with uncollected():
        kind.preload()
    return kind


def main(run_dir: Path, name: str) -> int:
    """Follow a run until it has ended. Returns the exit code: 0 if everything was sent, else `LEFT`."""
    tell = _Tell()
    log_to_stderr()
    logging.getLogger("hydraloop").addHandler(tell)
    inbox = Inbox()
    first = inbox.next()
    if first is None:
        return 0
    name_secrets(first["secrets"])
    remember(first["options"])
    os.environ.clear()  # a fork has the environment and working directory of the first job
    os.environ.update(first["environment"])
    with suppress(OSError):
        os.chdir(first["cwd"])
    try:
        kind = load(first)
    except Exception as error:
        log.info("the tracker cannot be imported", exc_info=error)
        tell.trouble(described(error))
        return LEFT
    if inbox.next() is None:
        return 0
    if not is_free(run_dir, name, _BRIEFLY):
        log.warning(
            "another process, probably `python -m hydraloop sync`, is sending this run: waiting until it has ended"
        )
    with lock_of(run_dir, name):  # the inbox ends this process in time
        sign(run_dir, name, first["training"])
        run = description.read(run_dir)
        assert run is not None, "the training process describes the run before it says begin"
        cursor = _cursor(run_dir, name, first)
        tracker = kind(first["options"], run, cursor.memory)
        try:
            state = _follow(Follower(tracker, cursor, run_dir, name, tell.trouble), inbox, run, tell)
        finally:
            tracker.close()
    return 0 if state == "done" else LEFT


class Inbox:
    """Reads lines of JSON from the training process. Their end, or the end of that process, counts as the run's end.

    `flush_timeout` seconds are left from then on; the process is killed if a call hangs longer. A thread reads, so
    that this time starts when the run ends, whatever else this process is doing.
    """

    def __init__(self) -> None:
        self._flush_timeout = 0.0
        self._training = (os.getppid(), started(os.getppid()))  # of a fork: the server, until the first message
        self._messages: deque[dict[str, Any]] = deque()
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self.finish: Finish | None = None
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the time for the rest is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def next(self) -> dict[str, Any] | None:
        """Wait for the next message. Returns None if the run ends before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self.ended)
            return self._messages.popleft() if self._messages else None

    def wait(self, seconds: float) -> None:
        """Wait `seconds`, but at most until the run ends, or, after that, until the deadline."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait_for(lambda: self.ended, timeout=seconds)
            else:
                self._changed.wait(max(0.0, min(seconds, self._deadline - time.monotonic())))

    def _read(self) -> None:
        """Read the messages until the run has ended, and end this process in time; runs in the thread."""
        rest = b""  # os.read instead of sys.stdin, whose buffer `select` does not see
        while not self.ended:
            readable, _, _ = select.select([0], [], [], _LOOK)
            read = os.read(0, 1 << 16) if readable else b""
            # A forked worker of a loader may hold the pipe open after the training process has exited.
            if not read and (readable or not is_alive(*self._training)):
                self._take({"finish": None})
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        time.sleep(self._flush_timeout + MARGIN)
        with suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):  # wandb-core, which may hang, too
                with suppress(psutil.Error):
                    process.kill()
        os._exit(HANGS)

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "finish" in message:
                self.finish = None if message["finish"] is None else Finish(**message["finish"])
                self._deadline = time.monotonic() + self._flush_timeout
            else:
                self._messages.append(message)
            if "training" in message:
                self._flush_timeout, self._training = message["flush_timeout"], tuple(message["training"])
            self._changed.notify_all()


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


def _follow(follower: Follower, inbox: Inbox, run: Run, tell: _Tell) -> str:
    finish: Finish | None = None
    opened = False
    while True:
        state = follower.step(finish)
        if not opened and state not in ("in trouble", "given up"):
            opened = True
            tell.say("opened")
        if state in ("done", "given up") or inbox.late:
            return state
        if state != "following":
            inbox.wait(follower.wait(ending=finish is not None))
        if finish is None and inbox.ended:
            finish = inbox.finish or description.ending(run.run_dir, run.attempt)


class _Tell(logging.Handler):
    """Sends messages and warnings to the training process, which may have exited.

    Takes stdout, so libraries print to stderr.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, kind: str, **message: Any) -> None:
        with suppress(OSError):
            self._out.write(json.dumps({"kind": kind, **message}) + "\n")
            self._out.flush()

    def trouble(self, text: str | None) -> None:
        self.say("well" if text is None else "trouble", text=text or "")

    def emit(self, record: logging.LogRecord) -> None:
        self.say("remark", text=record.getMessage())


class _Masking:
    """A text stream that masks secrets. Each call is masked separately."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask_text(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def log_to_stderr(level: int = logging.INFO, form: str = _FORMAT) -> None:
    """Log to stderr, and mask secrets in all output of this process, also that of libraries, and in tracebacks."""
    sys.stdout, sys.stderr = cast(TextIO, _Masking(sys.stdout)), cast(TextIO, _Masking(sys.stderr))
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    logging.basicConfig(level=level, format=form)


def _uncaught(kind: type[BaseException], error: BaseException | None, found: TracebackType | None) -> None:
    """Write the traceback in one call. Python writes it in parts, which could separate a name from its secret."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, found)))
    sys.stderr.flush()


def _serve() -> None:
    """Import the library, and fork followers until the training process closes the socket or exits."""
    parent, children = os.getppid(), dict[int, int]()
    control = socket.socket(fileno=os.dup(0))
    with suppress(Exception):  # each follower reports it
        load(json.loads(control.recv(1 << 20)))
    gc.freeze()  # shares its memory with the followers
    control.settimeout(_REAP)
    while True:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(OSError), os.fdopen(children.pop(pid), "w") as answer:
                    answer.write(str(os.waitstatus_to_exitcode(status)))
        try:
            request, passed, _, _ = socket.recv_fds(control, 1 << 16, 4)
        except TimeoutError:  # a worker of a loader may hold the socket open after the training process has exited
            if os.getppid() != parent:
                return
            continue
        if not passed:
            return
        *pipes, answers = passed
        pid = -1 if len(os.listdir("/proc/self/task")) > 1 else os.fork()
        if pid == 0:
            os.setsid()
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
            for handle in (*passed, *children.values(), control.detach()):
                os.close(handle)
            with suppress(OSError):  # the training process has exited
                os.write(1, json.dumps({"pid": os.getpid()}).encode() + b"\n")
            run_dir, name = json.loads(request)
            sys.exit(main(Path(run_dir), name))
        for pipe in pipes:
            os.close(pipe)
        if pid > 0:
            children[pid] = answers
        else:
            os.close(answers)


if __name__ == "__main__":
    os.nice(NICE)
    if len(sys.argv) == 1:
        _serve()
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
