"""Calls of MLflow: sets it up for a sender, and translates its errors."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from hydraloop.tracking.follower import causes, reason
from hydraloop.tracking.tracker import BusyError, GoneError, RefusedError, UnusableError

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",  # seconds, also to store a large file; MLflow's 120 would hide a dead server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender itself retries
    "MLFLOW_DISABLE_TELEMETRY": "true",  # the process would wait for it when it exits
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of MLflow, unless the user has set them."""
_BUSY = {408, 429, 500, 502, 503, 504}
_NOT_ALLOWED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
_STATUS = re.compile(r"(?:failed with error code|too many) (\d{3})")
"""The status of an answer, in the text of MLflow's error or in that of urllib3."""
_UNSUPPORTED = re.compile(r"unsupported URI ('[^']*')")
_HTML = re.compile(r"(Response (body|text): '?)?<(!doctype|html).*", re.DOTALL | re.IGNORECASE)
_LONGEST_TEXT = 200
"""Most characters of a message."""


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

    Call it in a process that serves trackers only: it changes the environment, log levels, warning filters and the
    garbage collector.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"  # else, a call returns before its points are sent
    warnings.simplefilter("ignore")
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # the slowest part, before any fork

    for name in ("mlflow", "alembic"):  # they log tracebacks of errors that are raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gc.set_threshold(50_000, 20, 50)  # a batch is thousands of objects: 20,000 metrics a second instead of 13,000


@contextmanager
def calling(gone: Callable[[], Exception | None], *, a_file: bool = False) -> Iterator[None]:
    """Translate the errors of the body's calls to those of a tracker.

    Args:
        gone: asks the server, after it has refused something. Returns the error if the run is gone, else None.
        a_file: whether the body stores a file, for which access may be denied although all other calls are permitted.
    """
    try:
        yield
    except Exception as error:
        found = translated(error, a_file=a_file)
        if found is error:
            raise
        lost = gone() if isinstance(found, GoneError | RefusedError) else None
        raise (lost or found) from error


def translated(error: Exception, *, a_file: bool = False) -> Exception:
    """Translate an error of MLflow to one of a tracker, or to one after which the call is repeated."""
    import requests

    if isinstance(error, RefusedError | UnusableError):
        return error
    text, code, status = _brief(str(error)), getattr(error, "error_code", None), _status(error)
    if type(error) is ValueError or isinstance(error.__cause__, OverflowError):  # a number that is too large
        return RefusedError(text)
    if isinstance(error, ModuleNotFoundError):
        return UnusableError(f"{text}: install it, or use another hooks.mlflow.tracking_uri")
    if (uri := _UNSUPPORTED.search(str(error))) is not None:
        return UnusableError(f"MLflow does not know the address {uri[1]}; see hooks.mlflow.tracking_uri")
    if type(error).__name__ == "InvalidUrlException":
        return UnusableError(f"{text}; see hooks.mlflow.tracking_uri")
    if "Could not find a registered artifact repository" in text:
        return UnusableError(text.partition(". ")[0])
    if status in _BUSY:
        return BusyError(f"the server answers {status}")
    if code == "RESOURCE_ALREADY_EXISTS":  # another job has just created the experiment
        return BusyError(text)
    if code in _NOT_ALLOWED or status in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        text = f"the server denies access: {remedy}; {text}"
        if not a_file:
            return UnusableError(text)
        return RefusedError(text) if status == 403 or code == "PERMISSION_DENIED" else ConnectionError(text)
    if code == "RESOURCE_DOES_NOT_EXIST":
        return GoneError(f"the run does not exist there any more: {text}")
    if code == "INVALID_PARAMETER_VALUE" or status == 413:  # 413: too large
        return RefusedError(text)
    if status == 404 or "not in a valid JSON format" in text:
        return ConnectionError(f"the answer is not from an MLflow server; see hooks.mlflow.tracking_uri ({text})")
    for cause in causes(error):
        if isinstance(cause, requests.ConnectionError | requests.Timeout) and cause.request is not None:
            at = urlsplit(str(cause.request.url))
            place = f"{at.scheme}://{at.netloc.rpartition('@')[2]}"
            return ConnectionError(f"cannot reach {place}: {_brief(reason(error))}")
    return error


def _status(error: Exception) -> int | None:
    """Return the HTTP status of a server's answer."""
    import requests

    for cause in causes(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            return cause.response.status_code
    found = _STATUS.search(str(error))
    return None if found is None else int(found[1])


def _brief(text: str) -> str:
    """Return a message as one line of bounded length, without a proxy's page."""
    text = " ".join(_HTML.sub("", text).split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
