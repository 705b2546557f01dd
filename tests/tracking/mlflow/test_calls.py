"""Translation of MLflow's errors, and environment variables that are set only during a call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import requests
from mlflow.exceptions import MlflowException, RestException

from hydraloop.tracking.mlflow.calls import Calls, NoServerError, settings, translated
from hydraloop.tracking.tracker import RefusedError, UnusableError
from tests.tracking.mlflow.runs import QUIET

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
        (lambda: of("RESOURCE_DOES_NOT_EXIST"), UnusableError),
        (lambda: of("PERMISSION_DENIED"), UnusableError),
        (lambda: of("UNAUTHENTICATED"), UnusableError),
        (lambda: ValueError("no image"), RefusedError),
        (lambda: ModuleNotFoundError("No module named 'psycopg'"), UnusableError),
        (lambda: of("INTERNAL_ERROR"), RestException),
        (lambda: of("TEMPORARILY_UNAVAILABLE"), RestException),
        (lambda: of("ENDPOINT_NOT_FOUND"), RestException),
        (lambda: answer(404, "ENDPOINT_NOT_FOUND"), NoServerError),
        (lambda: MlflowException("API request failed with error code 502 != 200"), MlflowException),
        (lambda: requests.ConnectionError("refused"), requests.ConnectionError),
    ],
)
def test_translated(make: Callable[[], Exception], kind: type[Exception]) -> None:
    error = make()
    found = translated(error)
    assert type(found) is kind
    assert found is error or found.__cause__ is error


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


@pytest.mark.parametrize(("gone", "kind"), [(True, UnusableError), (False, RefusedError)])
def test_what_is_refused_because_the_run_is_gone(gone: bool, kind: type[Exception]) -> None:
    with pytest.raises(kind), Calls(lambda: gone)():
        raise of("INVALID_PARAMETER_VALUE")


def test_settings_are_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    before = dict(os.environ)
    level = logging.getLogger("mlflow").level
    with settings(7):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"
        assert logging.getLogger("mlflow").level == logging.CRITICAL
    assert dict(os.environ) == before
    assert logging.getLogger("mlflow").level == level


def test_a_slow_server_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    calls, given = Calls(lambda: False), []

    def ask() -> None:
        given.append(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
        raise MlflowException("no answer") from requests.Timeout("read timed out")

    for _ in range(6):
        with pytest.raises(MlflowException), calls():
            ask()
    assert given == ["5", "10", "20", "40", "60", "60"]
    with calls(files=True):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "120"
