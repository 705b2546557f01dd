"""The process that is forked for each follower of a sweep's jobs: `python -m hydraloop.tracking.follower.fork_server`.

`spawning.ForkServer` starts it, and passes it the pipes of each follower.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hydraloop.tracking.follower.process import load, main
from hydraloop.tracking.follower.spawning import NICE

_LOOK = 0.2
"""Seconds between two looks for followers that have exited."""


def _serve() -> None:
    """Import the library, and fork followers until the training process closes the socket or exits."""
    os.nice(NICE)
    parent, children = os.getppid(), dict[int, int]()
    control = socket.socket(fileno=os.dup(0))
    with suppress(Exception):  # each follower reports it
        load(json.loads(control.recv(1 << 20)))
    gc.freeze()  # shares its memory with the followers
    control.settimeout(_LOOK)
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
            others = (*passed, *children.values(), control.detach())
            _follow(json.loads(request), pipes, others)
        for pipe in pipes:
            os.close(pipe)
        if pid > 0:
            children[pid] = answers
        else:
            os.close(answers)


def _follow(arguments: list[str], pipes: list[int], others: tuple[int, ...]) -> NoReturn:
    """Run a follower in the forked process."""
    os.setsid()
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
    for handle in others:
        os.close(handle)
    with suppress(OSError):  # the training process has exited
        os.write(1, json.dumps({"pid": os.getpid()}).encode() + b"\n")
    sys.exit(main(Path(arguments[0]), arguments[1]))


if __name__ == "__main__":
    _serve()
