"""A process that gets a signal ends, also if it is stuck in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

BEGIN = """
import ctypes, os, signal, sys, threading, time
from hydraloop.launch.termination import TerminationHandler, watch_parent

def last(number):
    print("last", number, flush=True)

def orphaned():
    print("orphaned", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

handler = TerminationHandler(on_timeout=last, grace=0.5).start()
watch_parent(os.getppid(), orphaned)

def ready():
    print("ready", flush=True)
"""
STUCK = """
mutex = ctypes.create_string_buffer(128)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
ready()
lock(mutex)  # as in a collective whose peer has ended: no signal interrupts it
"""


Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a program after `BEGIN`. Kills processes that outlive the test."""
    started = []

    def go(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BEGIN + textwrap.dedent(program)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
            line += byte  # only this line: `communicate` does not return what a buffer has read
        assert line == b"ready\n"
        return process

    yield go
    for process in started:
        process.kill()
        process.communicate()


def wait_until_stuck(pid: int) -> None:
    """Wait until the main thread blocks. For a moment after `ready`, it still runs Python and handles signals."""
    status, before, until = Path(f"/proc/{pid}/task/{pid}/status"), "", time.monotonic() + 30
    # The file also counts the context switches of the thread.
    while (now := status.read_text(encoding="utf-8")) != before or "State:\tS" not in now:
        assert time.monotonic() < until
        before = now
        time.sleep(0.05)


def test_a_launcher_that_ended_before_its_rank_had_started(start: Start) -> None:
    """The imports take two seconds. Without this, ranks waited for the launcher until a timeout of half an hour."""
    process = start(
        """
        ready()
        watch_parent(os.getpid(), lambda: os._exit(7))  # this is not its parent, which has ended
        time.sleep(20)
        """
    )
    assert process.wait(timeout=10) == 7


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt()"), (signal.SIGTERM, "Terminated('by SIGTERM')")]
)
def test_a_signal_is_raised_in_the_main_thread(number: int, raised: str, start: Start) -> None:
    process = start(
        """
        try:
            ready()
            time.sleep(60)
        except BaseException as error:
            print(repr(error), handler.received, flush=True)
        handler.stop()
        """
    )
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == f"{raised} {int(number)}\n"
    assert process.returncode == 0


def test_a_rank_that_is_closing_is_not_interrupted_but_ends_after_the_grace_period(start: Start) -> None:
    process = start(
        """
        handler._is_closing = lambda: True
        ready()
        while True:
            time.sleep(0.01)
        """
    )
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "last 15\n"
    assert process.returncode == 143


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a mutex")
def test_a_rank_that_is_stuck_in_native_code_ends(start: Start) -> None:
    process = start(STUCK)
    wait_until_stuck(process.pid)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "last 15\n"
    assert process.returncode == 143


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a mutex")
def test_a_rank_ends_after_the_process_that_started_it() -> None:
    program = BEGIN + STUCK
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    process = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (rank,) = psutil.Process(process.pid).children()
    wait_until_stuck(rank.pid)
    process.kill()
    process.wait()
    assert process.stdout.read() == "orphaned\nlast 15\n"
    process.stdout.close()
    until = time.monotonic() + 30
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_forked_process_has_its_own_signals(start: Start) -> None:
    process = start(
        """
        ready()
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, b"ready")
            time.sleep(60)
        os.read(reads, 5)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), handler.received, flush=True)
        handler.stop()
        """
    )
    out, _ = process.communicate(timeout=30)
    assert out == "-15 0\n"


def test_a_process_without_a_launcher_does_not_change_ctrl_c_and_ignored_signals(start: Start) -> None:
    process = start(
        """
        handler.stop()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handler = TerminationHandler(launched=False).start()
        ready()
        os.kill(os.getpid(), signal.SIGHUP)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, handler.received, flush=True)
        handler.stop()
        """
    )
    out, _ = process.communicate(timeout=30)
    assert out == "True 0\n"


@pytest.mark.parametrize("begin", ["handler = TerminationHandler().start()", "body = terminable(); body.__enter__()"])
def test_a_signal_to_a_worker_that_has_just_been_forked_ends_it(begin: str, start: Start) -> None:
    process = start(
        f"""
        from hydraloop.launch.termination import terminable

        handler.stop()
        os.register_at_fork(after_in_child=lambda: time.sleep(1))  # the signal comes before the handlers are reset
        {begin}
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        ready()
        print(os.waitpid(child, 0)[1], handler.received, flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{int(signal.SIGTERM)} 0\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) in (1, -signal.SIGTERM), "the parent still handles its own signals"


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, "by SIGTERM"), (signal.SIGHUP, "by SIGHUP")])
def test_a_command_is_terminable(number: int, raised: str, start: Start) -> None:
    process = start(
        """
        handler.stop()
        from hydraloop.launch.termination import terminable

        try:
            with terminable():
                child = os.fork()
                if child == 0:
                    os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
                assert os.waitpid(child, 0)[1] == 0, "it inherits no handler"
                ready()
                time.sleep(60)
        except KeyboardInterrupt as error:
            print(error, signal.getsignal(signal.SIGTERM).name, flush=True)
        """
    )
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == f"{raised} SIG_DFL\n"


def test_stop_restores_everything(start: Start) -> None:
    process = start(
        """
        ready()
        handler.stop()
        threads = [thread.name for thread in threading.enumerate()]
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM).name,
              "hydraloop-termination" in threads, signal.set_wakeup_fd(-1), flush=True)
        """
    )
    out, _ = process.communicate(timeout=30)
    assert out == "True SIG_DFL False -1\n"
