"""The server of the pool: a process that has imported what jobs need, and forks a process for each job in 5 ms.

It runs no tensor operation: the threads of one do not exist in forks, which would wait for them. It ends when the
controller does, and the jobs save and end when it does. The library's server (`forkserver`) would start each job
without the composed configs of the sweep, and composing takes 0.2 s.

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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from hydraloop.importing import uncollected
from hydraloop.launch.exit import exit_now
from hydraloop.launch.termination import end_with, started
from hydraloop.sweeps.executors.executor import Request, Worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of jobs. While a child of a job lives, it keeps the job's `sentinel` open."""


def start(worker: Worker) -> tuple[BaseProcess, Connection]:
    """Fork the server. Return its process and the connection to it.

    A new thread forks. If the main thread has run tensor operations, OpenMP expects the threads of those in every fork
    of the main thread, and the first operation there would never end. It does not expect them in forks of a thread that
    has run none.

    Raises:
        OSError: no process could be started.
    """
    ours, theirs = multiprocessing.Pipe()
    errors: list[OSError] = []

    def serve() -> None:
        ours.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a live table has replaced them
        multiprocessing.current_process().daemon = False  # it starts processes, which a daemon may not
        _end_with(Server(worker, theirs).serve, os._exit)

    server = _process(serve, daemon=True)

    def fork() -> None:
        try:
            server.start()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(fork,), name=threading.current_thread().name)
    thread.start()
    thread.join()
    theirs.close()
    if errors:
        ours.close()
        raise errors[0]
    return server, ours


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other process has ended.
    """
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


class Server:
    """The server, in its own process.

    Args:
        worker: what the jobs run.
        controller: the connection to the controller.
    """

    def __init__(self, worker: Worker, controller: Connection) -> None:
        self._worker, self._controller = worker, controller
        self._jobs: dict[int, BaseProcess] = {}

    def serve(self) -> int:
        """Answer messages until the controller has ended."""
        os.setsid()
        _handle_signals(lambda number, frame: None)  # Slurm sends them to all processes: it ends after the jobs
        with uncollected():
            self._worker.prepare()
        gc.collect()
        gc.freeze()  # the collector of a job need not look at them
        with suppress(EOFError, OSError):  # the controller has ended
            while True:
                sentinels = [process.sentinel for process in self._jobs.values()]
                ready = wait([self._controller, *sentinels], _CHECK_INTERVAL if sentinels else None)
                self._report_ends()
                if self._controller in ready:
                    send(self._controller, self._answer(receive(self._controller)))
        return 0

    def _report_ends(self) -> None:
        for number, process in list(self._jobs.items()):
            if process.exitcode is not None:
                del self._jobs[number]
                send(self._controller, {"ended": number, "code": process.exitcode})

    def _answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "job" not in message:
            return {}
        request = Request.from_json(message["job"])
        server = os.getpid()
        process = _process(lambda: _end_with(lambda: self._run(request, server), exit_now))
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the job handles them
        try:
            process.start()
        except OSError as error:
            return {"error": error.strerror}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        assert process.pid is not None
        self._jobs[request.number] = process
        return {"pid": process.pid, "since": started(process.pid)}

    def _run(self, request: Request, server: int) -> int:
        """Run a job in its own process."""
        os.setsid()
        self._controller.close()
        _handle_signals(signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with(server)
        os.environ.update(request.variables())
        if request.threads is not None and (torch := sys.modules.get("torch")):
            torch.set_num_threads(request.threads)
        return self._worker.run(request)


def _handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handler)


def _process(target: Callable[[], None], *, daemon: bool = False) -> BaseProcess:
    """Return a process that forks this one when it is started."""
    # Python 3.12 warns of threads, numpy's or the one that forks.
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    return multiprocessing.get_context("fork").Process(target=target, daemon=daemon)


def _end_with(run: Callable[[], int], exit_process: Callable[[int], NoReturn]) -> NoReturn:
    """Run something, and end this process with its result."""
    code = 1
    try:
        code = run()
    except KeyboardInterrupt:  # before the job could handle it
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        exit_process(code)
