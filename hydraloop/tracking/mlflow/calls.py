"""Calls of MLflow: sets it up for a sender, and translates its errors."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from hydraloop.tracking.follower import causes, reason
from hydraloop.tracking.tracker import BusyError, GoneError, RefusedError, UnusableError

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds; MLflow's 120 would hide a dead server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # at once: a picture takes several requests. The sender retries the call
    "MLFLOW_DISABLE_TELEMETRY": "true",  # the process would wait for it when it exits
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of MLflow, unless the user has set them."""
_LONGEST_TEXT = 250
"""Most characters of a message: a proxy answers with a page."""


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let `import` not find packages in the body. They must not be needed by what the body imports."""
    names = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: as if not installed
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def prepare() -> None:
    """Import MLflow and set it up for sending.

    Call it in a process that serves trackers only: it changes the environment, log levels and warning filters.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"  # else, a call returns before its points are sent
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient  # noqa: F401  # the import takes seconds, and is done before threads send

    for name in ("mlflow", "alembic"):  # they log tracebacks of errors that are raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def calling(gone: Callable[[], Exception | None] = lambda: None) -> Iterator[None]:
    """Translate the errors of the body's calls to those of a tracker.

    Args:
        gone: asks the server, after it has refused something. Returns the error if the run is gone, else None.
    """
    try:
        yield
    except Exception as error:
        found = translated(error)
        if found is error:
            raise
        lost = gone() if isinstance(found, GoneError | RefusedError) else None
        raise (lost or found) from error


def translated(error: Exception) -> Exception:
    """Translate an error of MLflow to one of a tracker, or to one after which the call is repeated.

    Errors are told apart by class, by MLflow's error code, and by the status of an answer.
    """
    import requests
    from mlflow.exceptions import MlflowException

    text, status = " ".join(str(error).split())[:_LONGEST_TEXT], None
    if isinstance(error, ImportError):
        return UnusableError(text)
    for cause in causes(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            status = cause.response.status_code
        if isinstance(cause, requests.ConnectionError | requests.Timeout) and cause.request is not None:
            at = urlsplit(str(cause.request.url))
            place = f"{at.scheme}://{at.netloc.rpartition('@')[2]}"
            return ConnectionError(f"cannot reach {place}: {reason(error)}")
    if isinstance(error, MlflowException):
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return GoneError(f"the run does not exist there any more: {text}")
        if error.error_code == "RESOURCE_ALREADY_EXISTS":  # another job has just created the experiment
            return BusyError(text)
        status = status or error.get_http_status_code()  # type: ignore[no-untyped-call]
    if status in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return UnusableError(f"the server denies access: {remedy}; {text}")
    if status == 404:
        return ConnectionError(f"the answer is not from an MLflow server; see hooks.mlflow.tracking_uri ({text})")
    if status in (400, 413) or type(error) is ValueError:  # 413: too large; ValueError: of the client's own checks
        return RefusedError(text)
    if status is not None:
        return BusyError(reason(error))
    return error
