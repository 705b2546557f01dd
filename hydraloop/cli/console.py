"""The handler that prints log messages for people, named by class path in Hydra's `job_logging`. Without torch."""

from __future__ import annotations

import logging
import sys


class ConsoleHandler(logging.Handler):
    """Prints to standard output: the plain message for INFO, with the level's name in front for anything else.

    The stream is looked up at each message, not kept: a progress bar that puts itself in the place of `sys.stdout` gets
    the message and prints it above itself. One write a message, so that lines of several processes do not mix.
    """

    def __init__(self, level: int | str = logging.NOTSET) -> None:
        super().__init__(level)
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname}: {text}"
