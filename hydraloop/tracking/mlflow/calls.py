"""Calls of MLflow: bounds their duration and translates their errors for a follower."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hydraloop.tracking.tracker import RefusedError, UnusableError

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException

_SHORTEST, _LONGEST = 5, 60
"""Seconds that a server has to answer. 5 s are enough for one that works, and the follower does not hang on one that
does not. After a timeout, the next try has twice the time."""
_FILES = 120
"""The same for storing a file of any size: MLflow's default."""
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the follower itself retries
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # a call would return before its points are sent
    "MLFLOW_DISABLE_TELEMETRY": "true",  # the process would wait for it when it exits
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_NOT_ALLOWED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
_STATUS = re.compile(r"failed with error code (\d{3})")
_TOO_LARGE, _NOT_FOUND = "413", "404"
_NO_JSON = "not in a valid JSON format"
_UNSUPPORTED = re.compile(r"unsupported URI ('[^']*')")
_TAG = re.compile(r"<[^<>]*>")
_HIDDEN = re.compile(r"<(style|script)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_READ, _LONGEST_TEXT = 4000, 200
"""Characters of an error that are searched, and most characters of a message."""


class Calls:
    """A context for each call of a client: `with calls(): …`.

    Args:
        is_gone: asks the server whether the run is deleted, after it has refused something.
    """

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self._is_gone = is_gone
        self._timeout = _SHORTEST

    @contextlib.contextmanager
    def __call__(self, *, files: bool = False) -> Iterator[None]:
        """Bound the duration of a call, silence MLflow and translate errors. The user's environment has precedence.

        Raises:
            RefusedError: the server will never accept this.
            UnusableError: nothing can be sent with these settings.
        """
        try:
            with settings(_FILES if files else self._timeout):
                yield
        except Exception as error:
            if _is_timeout(error):
                self._timeout = min(2 * self._timeout, _LONGEST)
            self._raise(error)

    def _raise(self, error: Exception) -> None:
        found = translated(error)
        if isinstance(found, RefusedError):
            with settings(self._timeout):
                if self._is_gone():
                    raise UnusableError("the run was deleted there") from error
        raise found


@contextlib.contextmanager
def settings(timeout: int) -> Iterator[None]:
    """Set MLflow's environment variables, which it reads at each call, unless the user has set them."""
    added = {name: value for name, value in {**_DEFAULTS, _TIMEOUT: str(timeout)}.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with _quiet():
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class NoServerError(Exception):
    """The answer does not come from an MLflow server, at least not now: a proxy's page, another program."""


def translated(error: Exception) -> Exception:
    """Translate an error of MLflow to `RefusedError`, `UnusableError`, or one after which the call is repeated."""
    from mlflow.exceptions import InvalidUrlException, MlflowException

    text = _brief(str(error))
    if isinstance(error, RefusedError | UnusableError):
        return error
    if type(error) is ValueError:
        return _refused(text, error)
    if isinstance(error, ModuleNotFoundError):
        return _unusable(f"{text}: install it, or use another hooks.mlflow.tracking_uri", error)
    if isinstance(error, InvalidUrlException):
        return _unusable(f"{text}; see hooks.mlflow.tracking_uri", error)
    if not isinstance(error, MlflowException):
        return error
    if isinstance(error.__cause__, OverflowError):  # a number that a database column cannot hold
        return _refused(text, error)
    if "Could not find a registered artifact repository" in text:
        return _unusable(text.partition(". ")[0], error)
    if "URI" in type(error).__name__:
        uri = _UNSUPPORTED.search(str(error))
        what = text if uri is None else f"MLflow does not know the address {uri[1]}"
        return _unusable(f"{what}; see hooks.mlflow.tracking_uri", error)
    return _answer(text, error)


def _answer(text: str, error: MlflowException) -> Exception:
    """Translate an error that a server has returned."""
    status = _STATUS.search(text)
    if error.error_code in _NOT_ALLOWED:
        return _unusable(
            "the server denies access: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            f"MLFLOW_TRACKING_TOKEN; {text}",
            error,
        )
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return _unusable(f"the run does not exist there any more: {text}", error)
    if error.error_code == "INVALID_PARAMETER_VALUE" or (status is not None and status[1] == _TOO_LARGE):
        return _refused(text, error)
    if _NO_JSON in text or (status is not None and status[1] == _NOT_FOUND):
        found = NoServerError(f"the answer is not from an MLflow server; see hooks.mlflow.tracking_uri ({text})")
        found.__cause__ = error
        return found
    return error


def _brief(text: str) -> str:
    """Return a message as one line of bounded length, without the HTML of a proxy's page."""
    text = _HIDDEN.sub(" ", text[:_READ])
    if "<html" in text.lower():
        text = _TAG.sub(" ", text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _refused(text: str, error: Exception) -> RefusedError:
    found = RefusedError(text)
    found.__cause__ = error
    return found


def _unusable(text: str, error: Exception) -> UnusableError:
    found = UnusableError(text)
    found.__cause__ = error
    return found


def _is_timeout(error: BaseException | None) -> bool:
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, Timeout):
            return True
        error = error.__cause__ or error.__context__
    return False


_LOUD = ("mlflow", "alembic")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's log, which contains tracebacks of errors that are raised anyway, and its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow  # noqa: F401 - it sets its log levels when it is imported

    before = [(name, logging.getLogger(name).level) for name in _LOUD]
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before:
            logging.getLogger(name).setLevel(level)
