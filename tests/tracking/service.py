"""A tracking service over HTTP that is slow, refuses, or goes down, and a tracker that sends to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hydraloop.files.metrics_log import Record
from hydraloop.tracking.tracker import BusyError, Finish, Tracker

Answer = tuple[int, dict[str, str]]
"""Status and headers."""
OK: Answer = (200, {})


class Service:
    """What a service has received, in order: `(path, body)`.

    Args:
        answer: returns the answer to the n-th request; what is answered with 200 is received.
        delay: seconds before each answer.
    """

    def __init__(self, answer: Callable[[int], Answer] = lambda number: OK, delay: float = 0.0) -> None:
        self.received: list[tuple[str, Any]] = []
        self.requests = 0
        self.port = 0
        self._answer, self._delay = answer, delay
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str) -> list[Any]:
        """The bodies that were sent to a path."""
        return [body for where, body in self.received if where == path]

    @contextmanager
    def up(self) -> Iterator[Service]:
        """The service is there; at the same port as before."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                time.sleep(service._delay)
                with service._lock:
                    status, headers = service._answer(service.requests)
                    service.requests += 1
                    if status == 200:
                        service.received.append((self.path, body))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Posting(Tracker):
    """Posts the numbers of records to `/records`, files to `/files`, and the end to `/finish`."""

    def open(self) -> None:
        self._post("open", self.run.uid)

    def send(self, records: Sequence[Record]) -> None:
        self._post("records", [record.index for record in records])

    def send_file(self) -> bool:
        number = self.memory.get("files", 0)
        if number == self.options.get("files", 0):
            return False
        self._post("files", number)
        self.memory["files"] = number + 1
        return True

    def finish(self, finish: Finish) -> None:
        self._post("finish", finish.status)

    def _post(self, path: str, body: Any) -> None:
        connection = HTTPConnection("127.0.0.1", self.options["port"], timeout=10)
        try:
            connection.request("POST", f"/{path}", json.dumps(body))
            answer = connection.getresponse()
        finally:
            connection.close()
        if answer.status != 200:
            raise BusyError(f"status {answer.status}")


class SilentForOne(Posting):
    """Gets no answer in the run whose directory has the name `silent`."""

    def open(self) -> None:
        if self.run.run_dir.name == self.options["silent"]:
            time.sleep(100)
        super().open()
