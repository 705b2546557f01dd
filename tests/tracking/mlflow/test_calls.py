"""Translation of MLflow's errors, and how MLflow is set up in a follower."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from hydraloop.tracking.follower import described
from hydraloop.tracking.mlflow import calling, prepare
from hydraloop.tracking.tracker import MLFLOW, BusyError, GoneError, RefusedError, UnusableError
from tests.tracking.mlflow.runs import QUIET, empty_database, folder
from tests.tracking.runs import described_run, log_records

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def of(code: str) -> Exception:
    from mlflow.exceptions import RestException

    return RestException({"error_code": code, "message": "what happened"})


def answer(status: int) -> Exception:
    """An answer of a proxy without MLflow's code, as MLflow's client raises it."""
    from mlflow.exceptions import MlflowException, get_error_code

    text = f"API request to endpoint /x failed with error code {status} != 200. Response body: '{'<b>no</b>' * 200}'"
    return MlflowException(text, error_code=get_error_code(status))


def of_a_store(status: int) -> requests.HTTPError:
    """An answer of a store of files."""
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


@pytest.mark.parametrize(
    ("make", "argument", "kind", "text"),
    [
        (of, "INVALID_PARAMETER_VALUE", RefusedError, "what happened"),
        (of, "RESOURCE_DOES_NOT_EXIST", GoneError, "the run does not exist there any more"),
        (of, "RESOURCE_ALREADY_EXISTS", BusyError, "what happened"),
        (of, "INTERNAL_ERROR", BusyError, "what happened"),
        (of, "TEMPORARILY_UNAVAILABLE", BusyError, "what happened"),
        (of, "UNAUTHENTICATED", UnusableError, "the server denies access: set MLFLOW_TRACKING_USERNAME"),
        (answer, 403, UnusableError, "the server denies access: set MLFLOW_TRACKING_USERNAME"),
        (answer, 404, ConnectionError, "the answer is not from an MLflow server; see hooks.mlflow.tracking_uri"),
        (answer, 502, BusyError, "failed with error code 502"),
        (of_a_store, 403, UnusableError, "the server denies access: set MLFLOW_TRACKING_USERNAME"),
        (of_a_store, 413, RefusedError, "no"),
        (of_a_store, 500, BusyError, "no"),
        (ValueError, "no image", RefusedError, "no image"),
        (ModuleNotFoundError, "No module named 'psycopg'", UnusableError, "No module named 'psycopg'"),
    ],
)
def test_errors_are_told_apart_by_their_class_code_and_status(
    make: Callable[[Any], Exception], argument: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as raised, calls():
        raise make(argument)
    assert type(raised.value) is kind
    assert text in described(raised.value)
    assert len(described(raised.value)) < 400


def calls(*, gone: bool = False) -> AbstractContextManager[None]:
    return calling(lambda: GoneError("it is gone") if gone else None)


@pytest.mark.parametrize(("gone", "kind"), [(True, GoneError), (False, RefusedError)])
def test_what_is_refused_because_the_run_is_gone(gone: bool, kind: type[Exception]) -> None:
    with pytest.raises(kind), calls(gone=gone):
        raise of("INVALID_PARAMETER_VALUE")


def test_the_user_s_settings_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    prepare()
    assert (MLFLOW_HTTP_REQUEST_TIMEOUT.get(), MLFLOW_HTTP_REQUEST_MAX_RETRIES.get()) == (7, 1)


def test_a_call_sends_before_it_returns_whatever_the_user_s_own_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a record would count as sent that is lost with the process."""
    from mlflow.environment_variables import MLFLOW_ENABLE_ASYNC_LOGGING

    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    prepare()
    assert not MLFLOW_ENABLE_ASYNC_LOGGING.get()


def read(uri: str) -> str:
    """What a user reads of a call to an address that does not work."""
    from mlflow import MlflowClient

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


HEAVY = "{'pandas', 'scipy', 'sklearn', 'torch'} & sys.modules.keys()"


@pytest.mark.slow
def test_the_follower_s_process_has_no_pandas(folder: Path) -> None:
    """From the import of the library to the end of a run with a picture."""
    run = described_run(folder / "run")
    log_records(run.run_dir, 3)
    Image.new("RGB", (8, 8)).save(run.run_dir / "a.png")
    run_python(
        "import sys",
        "from pathlib import Path",
        "from hydraloop.files.metrics_log import LoggedObject, Record",
        "from hydraloop.tracking import run_description",
        "from hydraloop.tracking.tracker import Finish, load_tracker",
        f"kind = load_tracker({MLFLOW!r})",
        "kind.preload()",
        f"run = run_description.read(Path({str(run.run_dir)!r}))",
        "tracker = kind({}, run, {})",
        "tracker.open()",
        "assert 'mlflow.tracking.client' in sys.modules",
        "picture = LoggedObject('image', 'val/predictions', 'a.png')",
        "tracker.send([Record(0, 'val', 1, 10, 1.7e9, {'loss': 1.0}, {}, (picture,))])",
        "tracker.finish(Finish('finished'))",
        "while tracker.send_file():",
        "    pass",
        f"assert not {HEAVY}",
    )


def run_python(*lines: str) -> None:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
