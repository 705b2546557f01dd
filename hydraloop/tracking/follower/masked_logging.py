"""Masks secrets in the output of tracker processes, which goes to a file in the run directory. Does not import torch.

The streams themselves mask, which includes output of libraries and tracebacks. A process knows the secrets that it has
passed to `hydraloop.safety.secrets.remember`.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, TextIO, cast

from hydraloop.safety.secrets import mask_text

FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"


def log_to_stderr(level: int = logging.INFO, form: str = FORMAT) -> None:
    """Log to stderr, and mask everything that this process writes to stdout and stderr, including tracebacks.

    Args:
        level: lowest level that is logged.
        form: format of a line.
    """
    sys.stdout, sys.stderr = _masking(sys.stdout), _masking(sys.stderr)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    logging.basicConfig(level=level, format=form)


class _Masking:
    """A text stream that masks secrets. Each call is masked separately."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask_text(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _masking(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, _Masking) else cast(TextIO, _Masking(stream))


def _uncaught(kind: type[BaseException], error: BaseException | None, found: TracebackType | None) -> None:
    """Write the traceback in one call. Python writes it in parts, which could separate a name from its secret."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, found)))
    sys.stderr.flush()
