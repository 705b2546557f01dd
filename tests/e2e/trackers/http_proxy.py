"""An HTTP proxy that is slow, or refuses requests, in front of a service."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "server", "date")
"""Headers that the proxy sets itself."""


class HttpProxy(ThreadingHTTPServer):
    """Forwards requests to a loopback port.

    Args:
        target: port of the service.
    """

    daemon_threads = True

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        """Seconds before each answer."""
        self.refuse: Callable[[int], tuple[int, dict[str, str]] | None] = lambda number: None
        """Returns the status and the headers with which the n-th request is refused; None: it is forwarded."""
        self.answered: list[tuple[str, str, int]] = []
        """Method, path and status of each request."""
        self._lock = threading.Lock()
        self._count = 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def uri(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.server_port}"

    def number(self) -> int:
        """Return the number of a new request, from 0."""
        with self._lock:
            self._count += 1
            return self._count - 1

    def stored(self) -> list[str]:
        """Paths of the files that the service has accepted, in order."""
        return [path for method, path, status in self.answered if method == "PUT" and status < 300]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpProxy

    def _answer(self) -> None:
        proxy, body = self.server, self._body()
        refused = proxy.refuse(proxy.number())
        time.sleep(proxy.delay)
        status, headers, content = (*refused, b"busy") if refused is not None else self._forwarded(body)
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        proxy.answered.append((self.command, self.path, status))

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Print nothing."""


@contextmanager
def http_proxy(target: int) -> Iterator[HttpProxy]:
    """A running proxy, which is stopped at the end."""
    proxy = HttpProxy(target)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        with suppress(OSError):
            proxy.server_close()
        thread.join()
