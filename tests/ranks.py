"""Run a function on several ranks: real processes with gloo, started once and used by all tests.

    results = on_ranks(2, train, 0.1)        # train(distributed, 0.1) in two processes; a list of what they return

The function must be importable: defined in a module, not a lambda. Source of the idea: torchtnt's spawn_multi_process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from hydraloop.schemas.engine import DistributedConf

_SECONDS = 120
"""Ranks that have not answered by then are assumed to wait for each other."""


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class _Pool:
    """Processes that wait for work."""

    def __init__(self) -> None:
        self._processes: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._grow(world_size)
        chosen = self._processes[:world_size]
        with _free_port() as port:
            for rank, (_, connection) in enumerate(chosen):
                connection.send((function, args, options, rank, world_size, port))
            return self._results(chosen)

    def _results(self, chosen: list[tuple[Any, Connection]]) -> list[Any]:
        world_size = len(chosen)
        results: dict[int, Any] = {}
        deadline = monotonic() + _SECONDS
        while len(results) < world_size:
            waiting = {rank: chosen[rank][1] for rank in range(world_size) if rank not in results}
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting)} have not ended within {_SECONDS} s")
            for rank, connection in waiting.items():
                if connection not in ready:
                    continue
                try:
                    failed, results[rank] = connection.recv()
                except EOFError:
                    failed, results[rank] = True, "the process has died"
                if failed:
                    self.close()  # the others wait for it
                    raise RankError(f"rank {rank}: {results[rank]}")
        return [results[rank] for rank in range(world_size)]

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        while len(self._processes) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def close(self) -> None:
        """Kill all processes."""
        for process, connection in self._processes:
            process.kill()
            process.join()
            connection.close()
        self._processes = []


_pool = _Pool()


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `function(distributed, *args)` on each of `world_size` ranks. Returns their results by rank.

    Args:
        options: of `DistributedConf`.

    Raises:
        RankError: a rank raised or died, or the ranks wait for each other.
    """
    return list(_pool.run(world_size, function, args, options))


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A free port, reserved until the context ends, so that no test in another process gets it."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 does the same and may listen on it
        kept.bind(("", 0))  # rank 0 listens on all addresses
        yield int(kept.getsockname()[1])


def _serve(connection: Connection) -> None:
    import torch

    from hydraloop.engine.distributed.process_group import connect

    torch.set_num_threads(1)
    while True:
        try:
            function, args, options, rank, world_size, port = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
        try:
            distributed = connect(DistributedConf(**options), "cpu")
            result = function(distributed, *args)
            distributed.close()
            if torch.distributed.is_initialized():  # a function that fails on purpose leaves it open
                torch.distributed.destroy_process_group()
        except BaseException:
            connection.send((True, traceback.format_exc()))
            return
        connection.send((False, result))
