"""A real server behind a proxy that refuses a file."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hydraloop.commands.dispatch import run as command
from hydraloop.run_files.record_log import FILENAME
from hydraloop.run_files.result import Result
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.tracker import MLFLOW
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder
from tests.tracking.mlflow.server import MLflowServer
from tests.tracking.runs import described_run, log_records, track

__all__ = ["empty_database", "folder"]
pytestmark = [QUIET, pytest.mark.slow]
RECORDS, PICTURES = 402, 10


@contextmanager
def proxy(server: MLflowServer, status: Callable[[bytes], int]) -> Iterator[str]:
    """The address of a proxy.

    Args:
        status: returns the answer to a request; with 200, the server answers.
    """
    lock = threading.Lock()
    host = server.uri.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                answer, content, headers = status(body), b"no", {"Content-Type": "text/plain"}
            if answer == 200:
                connection = HTTPConnection(host, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                found = connection.getresponse()
                answer, content = found.status, found.read()
                headers = {"Content-Type": found.getheader("Content-Type", "text/plain")}
                connection.close()
            self.send_response(answer)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def finished_run(run_dir: Path, uri: str) -> dict[str, Any]:
    """A finished run with pictures, of which the server has nothing. Returns the tracker's options."""
    described_run(run_dir)
    log_records(run_dir, RECORDS)
    with (run_dir / FILENAME).open("a") as file:
        for number in range(PICTURES):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(run_dir / f"{number}.png")
            shown = {"kind": "image", "name": "predictions", "path": f"{number}.png"}
            file.write(json.dumps({"mode": "val", "epoch": 1, "iteration": number, "objects": [shown]}) + "\n")
    Result("finished").write(run_dir)
    experiment = run_dir.parents[1].name  # of the test: all of them share a server
    options = {"system_metrics": False, "tracking_uri": uri, "folder": str(run_dir), "experiment": experiment}
    track(run_dir, "mlflow", MLFLOW, options)
    return options


def check(run_dir: Path, uri: str, *, pictures: int = PICTURES) -> None:
    """The server has all records once, the status, and so many pictures."""
    cursor = Cursor.load(run_dir, "mlflow")
    assert cursor is not None
    run_id = cursor.memory["run_id"]
    assert (cursor.sent, cursor.finished) == (RECORDS + PICTURES, True)
    assert client(uri).get_run(run_id).info.status == "FINISHED"
    history = client(uri).get_metric_history(run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [10 * n for n in range(1, RECORDS + 1)]
    images = [one.path for one in client(uri).list_artifacts(run_id, "images") if one.path.endswith(".png")]
    assert len(images) == pictures
    assert cursor.complete


@pytest.mark.parametrize(
    ("status", "what"),
    [(413, "413 Client Error"), (403, "the server denies access: set MLFLOW_TRACKING_USERNAME")],
)
def test_a_proxy_that_refuses_a_file(
    status: int, what: str, folder: Path, server: MLflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is too large (413) or not permitted (403) is left out. Everything else arrives."""
    run_dir = folder / "outputs" / "run"
    finished_run(run_dir, server.uri)
    with proxy(server, refusing(run_dir / "0.png", [status] * 9)) as uri:
        assert command(["sync", str(run_dir), f"hooks.mlflow.tracking_uri={uri}"]) == 0
    check(run_dir, server.uri, pictures=PICTURES - 1)
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warning.startswith(f"a file is not stored: {what}")


def test_a_proxy_that_asks_for_credentials_for_a_file(
    folder: Path, server: MLflowServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The file (401) is tried again, because the credentials may be mended."""
    run_dir = folder / "outputs" / "run"
    finished_run(run_dir, server.uri)
    with proxy(server, refusing(run_dir / "0.png", [401] * 4)) as uri:
        assert command(["sync", str(run_dir), f"hooks.mlflow.tracking_uri={uri}"]) == 1
        assert "not all: ConnectionError: the server denies access: set MLFLOW_TRA" in capsys.readouterr().out
        assert command(["sync", str(run_dir)]) == 0
    check(run_dir, server.uri)
    assert "not stored" not in caplog.text


def refusing(path: Path, answers: list[int]) -> Callable[[bytes], int]:
    """Replace a picture by a large one. Returns the answers of a proxy that receives it; afterwards it passes."""
    Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(3 * 64 * 64)).save(path)
    refused = path.read_bytes()
    return lambda body: answers.pop() if body == refused and answers else 200
