"""The handler that prints log messages for people, named by class path in Hydra's `job_logging`. Without torch."""

from __future__ import annotations

import logging
import sys


class ConsoleHandler(logging.Handler):
    """Prints the plain message for INFO, with the level's name in front for anything else; errors to standard error.

    The stream is looked up at each message, not kept: a progress bar that puts itself in the place of `sys.stdout` gets
    the message and prints it above itself. One write a message, so that lines of several processes do not mix.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The message as the formatter makes it (without one: as it is), with its level where that is not INFO."""
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        try:
            stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
            stream.write(self.format(record) + "\n")
            stream.flush()
        except RecursionError:
            raise
        except BrokenPipeError:  # whoever read has gone (`| head`): the run goes on, its log file has everything
            self.setLevel(logging.CRITICAL + 1)
        except Exception:
            self.handleError(record)
