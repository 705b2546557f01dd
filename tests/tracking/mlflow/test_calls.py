"""Translation of MLflow's errors, and how MLflow is set up in a follower."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
import requests
from mlflow import MlflowClient
from mlflow.environment_variables import (
    MLFLOW_ENABLE_ASYNC_LOGGING,
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
)
from mlflow.exceptions import MlflowException, RestException
from PIL import Image

from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import described
from hydraloop.tracking.mlflow.calls import calling, prepare, translated
from hydraloop.tracking.tracker import MLFLOW, BusyError, GoneError, RefusedError, UnusableError
from tests.tracking.mlflow.runs import QUIET, empty_database, folder
from tests.tracking.runs import described_run, log_records, track

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def of(code: str) -> RestException:
    return RestException({"error_code": code, "message": "what happened"})


PAGE = "<html><style>x</style><body>" + "<b>no</b> entry " * 200 + "</body></html>"


def answer(status: int, code: str = "INTERNAL_ERROR") -> MlflowException:
    """An answer of a proxy, as MLflow's client raises it."""
    text = f"API request to endpoint /x failed with error code {status} != 200. Response body: '{PAGE}'"
    error = MlflowException(text)
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: of("INVALID_PARAMETER_VALUE"), RefusedError),
        (lambda: MlflowException("API request failed with error code 413 != 200"), RefusedError),
        (lambda: of("RESOURCE_DOES_NOT_EXIST"), GoneError),
        (lambda: of("PERMISSION_DENIED"), UnusableError),
        (lambda: of("UNAUTHENTICATED"), UnusableError),
        (lambda: ValueError("no image"), RefusedError),
        (lambda: of("RESOURCE_ALREADY_EXISTS"), BusyError),
        (lambda: ModuleNotFoundError("No module named 'psycopg'"), UnusableError),
        (lambda: of("INTERNAL_ERROR"), RestException),
        (lambda: of("TEMPORARILY_UNAVAILABLE"), RestException),
        (lambda: of("ENDPOINT_NOT_FOUND"), RestException),
        (lambda: answer(404, "ENDPOINT_NOT_FOUND"), ConnectionError),
        (lambda: MlflowException("API request failed with error code 502 != 200"), BusyError),
        (lambda: requests.ConnectionError("refused"), requests.ConnectionError),
    ],
)
def test_translated(make: Callable[[], Exception], kind: type[Exception]) -> None:
    error = make()
    with pytest.raises(kind) as raised, calls():
        raise error
    assert type(raised.value) is kind
    assert raised.value is error or raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answer(403, "PERMISSION_DENIED"), "the server denies access: set MLFLOW_TRACKING_USERNAME"),
        (answer(401, "UNAUTHENTICATED"), "the server denies access: set MLFLOW_TRACKING_USERNAME"),
        (answer(413), "API request to endpoint /x failed with error code 413"),
        (answer(404, "ENDPOINT_NOT_FOUND"), "the answer is not from an MLflow server; see hooks.mlflow.tracking_uri"),
        (
            MlflowException(f"the response body was not in a valid JSON format. Response body: '{PAGE}'"),
            "the answer is not from an MLflow server; see hooks.mlflow.tracking_uri",
        ),
        (ModuleNotFoundError("No module named 'psycopg'"), "No module named 'psycopg': install it, or"),
    ],
)
def test_messages_are_short_and_say_what_to_do_first(error: Exception, expected: str) -> None:
    text = str(translated(error))
    assert text.startswith(expected)
    assert "<" not in text
    assert len(text) < 360


def calls(*, gone: bool = False) -> AbstractContextManager[None]:
    return calling(lambda: GoneError("it is gone") if gone else None)


@pytest.mark.parametrize(("gone", "kind"), [(True, GoneError), (False, RefusedError)])
def test_what_is_refused_because_the_run_is_gone(gone: bool, kind: type[Exception]) -> None:
    with pytest.raises(kind), calls(gone=gone):
        raise of("INVALID_PARAMETER_VALUE")


def test_the_user_s_settings_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    prepare()
    assert (MLFLOW_HTTP_REQUEST_TIMEOUT.get(), MLFLOW_HTTP_REQUEST_MAX_RETRIES.get()) == (7, 0)


def test_a_call_sends_before_it_returns_whatever_the_user_s_own_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a record would count as sent that is lost with the process."""
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    prepare()
    assert not MLFLOW_ENABLE_ASYNC_LOGGING.get()


class Refusing(BaseHTTPRequestHandler):
    """Answers with the status in the path."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.split("/")[1]))
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - the name that http.server looks for

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server(refusing: str, status: int) -> None:
    with pytest.raises(BusyError, match=str(status)), calls():
        MlflowClient(tracking_uri=f"{refusing}/{status}").get_run("0" * 32)


def read(uri: str) -> str:
    """What a user reads of a call to an address that does not work."""
    with pytest.raises(ConnectionError) as raised, calls():
        MlflowClient(tracking_uri=uri).get_run("0" * 32)
    return described(raised.value)


def test_the_message_says_why_a_server_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        assert read(f"http://{place}") == f"ConnectionError: cannot reach http://{place}: Connection refused"
        assert read(f"http://me:secret@{place}") == f"ConnectionError: cannot reach http://{place}: Connection refused"
        listener.listen()
        assert read(f"http://{place}") == f"ConnectionError: cannot reach http://{place}: timed out"


def test_the_message_for_an_address_that_does_not_speak_http() -> None:
    class Garbage(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.wfile.write(b"hello\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Garbage) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}"
        text = read(f"http://{place}")
        server.shutdown()
    assert text.startswith(f"ConnectionError: cannot reach http://{place}: ('Connection aborted.', BadStatusLine(")


HEAVY = "{'pandas', 'numpy', 'scipy', 'sklearn', 'torch'} & sys.modules.keys()"


@pytest.mark.slow
def test_the_follower_s_process_has_no_pandas(folder: Path) -> None:
    """From the import of the library to the end of a run with a picture."""
    run = described_run(folder / "run")
    log_records(run.run_dir, 3)
    Image.new("RGB", (8, 8)).save(run.run_dir / "a.png")
    run_python(
        "import sys",
        "from pathlib import Path",
        "from hydraloop.run_files.record_log import LoggedObject, Record",
        "from hydraloop.tracking import run_description",
        "from hydraloop.tracking.tracker import Finish, load_tracker",
        f"kind = load_tracker({MLFLOW!r})",
        "kind.preload()",
        f"run = run_description.read(Path({str(run.run_dir)!r}))",
        "tracker = kind({}, run, {})",
        "tracker.open()",
        "assert 'mlflow.store.tracking.sqlalchemy_store' in sys.modules",
        "picture = LoggedObject('image', 'val/predictions', 'a.png')",
        "tracker.send([Record(0, 'val', 1, 10, 1.7e9, {'loss': 1.0}, {}, (picture,))])",
        "tracker.finish(Finish('finished'))",
        "while tracker.send_file():",
        "    pass",
        f"assert not {HEAVY}",
    )


@pytest.mark.slow
def test_a_process_that_used_sync_has_the_whole_mlflow(folder: Path) -> None:
    run = described_run(folder / "run")
    log_records(run.run_dir, 3)
    track(run.run_dir, "mlflow", MLFLOW)
    run_python(
        "from hydraloop.commands.dispatch import run",
        f"run(['sync', {str(run.run_dir)!r}])",
        "import mlflow",
        "mlflow.data.from_pandas, mlflow.models.infer_signature, mlflow.pytorch",
    )
    cursor = Cursor.load(run.run_dir, "mlflow")
    assert cursor is not None
    assert cursor.sent == 3, "it has used MLflow"


def run_python(*lines: str) -> None:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
