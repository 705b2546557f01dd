"""The server of the pool: a process that has imported what jobs need, and forks a process for each job in 5 ms.

It runs no tensor operation: the threads of one do not exist in forks, which would wait for them. It ends when the
controller does. Jobs continue, because each has a separate session.

The controller sends JSON, and gets one answer to each message:

- `{"job": request}`: `{"pid": 11, "since": 81.2}`, or `{"error": "Cannot allocate memory"}`;
- `{}`: `{}`, when what jobs need is imported.

In addition, it gets `{"ended": 3, "code": 0}` when the process of job 3 has ended.
"""

from __future__ import annotations

import contextvars
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from hydraloop.launch.termination import leave
from hydraloop.run.processes import started
from hydraloop.run.uncollected import uncollected
from hydraloop.sweeps.executors.executor import Request, Worker


def start(worker: Worker) -> tuple[int, Connection]:
    """Fork the server. Return its process ID and the connection to it.

    A new thread forks. If the main thread has run tensor operations, OpenMP expects the threads of those in every fork
    of the main thread, and the first operation there would never end. It does not expect them in forks of a thread that
    has run none.

    Raises:
        OSError: no process could be started.
    """
    ours, theirs = multiprocessing.Pipe()
    forked: list[int | OSError] = []

    def serve() -> int:
        ours.close()
        _Server(worker, theirs).serve()
        return 0

    def fork() -> None:
        try:
            forked.append(_fork(serve))
        except OSError as error:
            forked.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(fork,), name=threading.current_thread().name)
    thread.start()
    thread.join()
    theirs.close()
    if isinstance(forked[0], OSError):
        ours.close()
        raise forked[0]
    return forked[0], ours


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode()


def job(request: Request) -> dict[str, Any]:
    """Return the message that starts a job."""
    return {"job": {**asdict(request), "environment": {}}}


class _Server:
    def __init__(self, worker: Worker, controller: Connection) -> None:
        self._worker, self._controller = worker, controller
        self._jobs: dict[int, int] = {}
        """The number of the job that each process runs."""

    def serve(self) -> None:
        """Answer messages until the controller has ended."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, signal.SIG_DFL)
        # Processes of the controller, which the end of a job would terminate.
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        with uncollected():
            self._worker.prepare()
        gc.collect()
        gc.freeze()  # the collector of a job need not look at them
        self._wake, writes = os.pipe()
        for handle in (self._wake, writes):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with suppress(EOFError, OSError):  # the controller has ended
            while True:
                ready = wait([self._controller, self._wake])
                if self._wake in ready:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._controller in ready:
                    self._send(self._answer(json.loads(self._controller.recv_bytes())))

    def _send(self, message: Mapping[str, Any]) -> None:
        self._controller.send_bytes(encoded(message))

    def _answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "job" not in message:
            return {}
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in message["job"].items()
        }
        request = Request(**options)
        try:
            pid = _fork(lambda: self._run(request))
        except OSError as error:
            return {"error": error.strerror}
        self._jobs[pid] = request.number
        return {"pid": pid, "since": started(pid)}

    def _run(self, request: Request) -> int:
        """Run a job in its own process."""
        self._become_job()
        if request.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
        if request.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(request.threads)  # of its ranks
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(request.threads)
        return self._worker.run(request)

    def _become_job(self) -> None:
        os.setsid()
        self._controller.close()
        os.close(self._wake)
        os.close(signal.set_wakeup_fd(-1))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _reap(self) -> None:
        """Tell the controller of processes that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._jobs:
                self._send({"ended": self._jobs.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _fork(run: Callable[[], int]) -> int:
    """Fork a process that calls a function and exits with its result. Return the process ID."""
    sys.stdout.flush()  # or the new process would print the text, too
    sys.stderr.flush()
    with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of threads, numpy's or the one that forks
        pid = os.fork()
    if pid == 0:
        _exit_with(run)
    return pid


def _exit_with(run: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        code = run()
    except KeyboardInterrupt:  # before the job could handle it
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)
