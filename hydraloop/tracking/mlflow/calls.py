"""Calls of MLflow: sets it up for a follower, bounds the duration of its calls and translates their errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hydraloop.tracking.follower.follower import causes, reason
from hydraloop.tracking.tracker import BusyError, GoneError, RefusedError, UnusableError

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
DEFAULTS = {
    _TIMEOUT: "20",  # seconds: enough for a server that works; MLflow's 120 would hide for long that one does not
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the follower itself retries
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # a call would return before its points are sent
    "MLFLOW_DISABLE_TELEMETRY": "true",  # the process would wait for it when it exits
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of MLflow, unless the user has set them."""
_FILES = "120"
"""Seconds that a server has to store a file of any size: MLflow's default."""
_NOT_ALLOWED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
_STATUS = re.compile(r"failed with error code (\d{3})")
_TOO_LARGE, _NOT_FOUND = "413", "404"
_BUSY = {"429", "500", "502", "503", "504"}
_NO_JSON = "not in a valid JSON format"
_UNSUPPORTED = re.compile(r"unsupported URI ('[^']*')")
_TAG = re.compile(r"<[^<>]*>")
_HIDDEN = re.compile(r"<(style|script)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_READ, _LONGEST_TEXT = 4000, 200
"""Characters of an error that are searched, and most characters of a message."""


class NoServerError(Exception):
    """The answer does not come from an MLflow server, at least not now: a proxy's page, another program."""


@contextlib.contextmanager
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
    """Import MLflow and set it up for sending. The user's environment variables have precedence.

    Call it in a process that serves trackers only: it changes the environment, log levels, warning filters and the
    garbage collector.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # the slowest part, before any fork

    for name in ("mlflow", "alembic"):  # they log tracebacks of errors that are raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _keep_answers()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a batch is thousands of objects: 20,000 metrics a second instead of 13,000


class Calls:
    """A context for each call of a client: `with calls(): …`.

    Args:
        is_gone: asks the server whether the run is gone, after it has refused something.
        gone: returns the error for that case.
    """

    def __init__(self, is_gone: Callable[[], bool], gone: Callable[[], Exception]) -> None:
        self._is_gone, self._gone = is_gone, gone

    @contextlib.contextmanager
    def __call__(self, *, files: bool = False) -> Iterator[None]:
        """Bound the duration of a call and translate its errors.

        Raises:
            RefusedError: the server will never accept this.
            BusyError: the server is overloaded, or fails now.
            UnusableError: nothing can be sent with these settings.
        """
        timeout = os.environ.get(_TIMEOUT, "")
        if files and timeout == DEFAULTS[_TIMEOUT]:
            os.environ[_TIMEOUT] = _FILES
        try:
            yield
        except Exception as error:
            found = translated(error)
            if found is error:
                raise
            if isinstance(found, GoneError | RefusedError) and self._is_gone():
                found = self._gone()
            raise found from error
        finally:
            if files and timeout == DEFAULTS[_TIMEOUT]:
                os.environ[_TIMEOUT] = timeout


def translated(error: Exception) -> Exception:
    """Translate an error of MLflow to one of a tracker, or to one after which the call is repeated."""
    from mlflow.exceptions import InvalidUrlException, MlflowException

    text = _brief(str(error))
    if isinstance(error, RefusedError | UnusableError):
        return error
    if type(error) is ValueError:
        return RefusedError(text)
    if isinstance(error, ModuleNotFoundError):
        return UnusableError(f"{text}: install it, or use another hooks.mlflow.tracking_uri")
    if isinstance(error, InvalidUrlException):
        return UnusableError(f"{text}; see hooks.mlflow.tracking_uri")
    if not isinstance(error, MlflowException):
        return _unreachable(error) or error
    if isinstance(error.__cause__, OverflowError):  # a number that a database column cannot hold
        return RefusedError(text)
    if "Could not find a registered artifact repository" in text:
        return UnusableError(text.partition(". ")[0])
    if "URI" in type(error).__name__:
        uri = _UNSUPPORTED.search(str(error))
        what = text if uri is None else f"MLflow does not know the address {uri[1]}"
        return UnusableError(f"{what}; see hooks.mlflow.tracking_uri")
    return _unreachable(error) or _answer(text, error)


def _answer(text: str, error: MlflowException) -> Exception:
    """Translate an error that a server has returned."""
    status = _STATUS.search(text)
    if error.error_code in _NOT_ALLOWED:
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return UnusableError(f"the server denies access: {remedy}; {text}")
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return GoneError(f"the run does not exist there any more: {text}")
    if error.error_code == "INVALID_PARAMETER_VALUE" or (status is not None and status[1] == _TOO_LARGE):
        return RefusedError(text)
    if status is not None and status[1] in _BUSY:
        return BusyError(text)
    if _NO_JSON in text or (status is not None and status[1] == _NOT_FOUND):
        what = "the answer is not from an MLflow server; see hooks.mlflow.tracking_uri"
        return NoServerError(f"{what} ({text})")
    return error


def _brief(text: str) -> str:
    """Return a message as one line of bounded length, without the HTML of a proxy's page."""
    text = _HIDDEN.sub(" ", text[:_READ])
    if "<html" in text.lower():
        text = _TAG.sub(" ", text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _unreachable(error: Exception) -> Exception | None:
    """Return the error for a server that asks to come back later, or cannot be reached; None for other errors."""
    import requests

    for cause in causes(error):
        if (status := getattr(cause, "hydraloop_status", None)) is not None:
            return BusyError(f"the server answers {status}", getattr(cause, "hydraloop_retry_after", None))
    for cause in causes(error):
        if isinstance(cause, requests.ConnectionError | requests.Timeout) and cause.request is not None:
            uri = urlsplit(str(cause.request.url))
            place = f"{uri.scheme}://{uri.netloc.rpartition('@')[2]}"
            return ConnectionError(f"cannot reach {place}: {_brief(reason(error))}")
    return None


def _keep_answers() -> None:
    """Let urllib3's error for a busy server keep the answer's status and `Retry-After`, which it drops."""
    from urllib3.exceptions import MaxRetryError
    from urllib3.util.retry import Retry

    increment: Any = Retry.increment
    if increment.__name__ == "keeping":
        return

    def keeping(
        self: Retry, method: Any = None, url: Any = None, response: Any = None, *args: Any, **named: Any
    ) -> Any:
        try:
            return increment(self, method, url, response, *args, **named)
        except MaxRetryError as error:
            if response is not None:
                with contextlib.suppress(Exception):  # a header that is not a number or date
                    error.hydraloop_retry_after = self.get_retry_after(response)  # type: ignore[attr-defined]  # ours
                error.hydraloop_status = response.status  # type: ignore[attr-defined]  # ours
            raise

    Retry.increment = keeping  # type: ignore[method-assign]  # the only place that has the answer
