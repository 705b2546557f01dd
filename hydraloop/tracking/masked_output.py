"""Output of a process without secrets, also that of libraries and of tracebacks."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, TextIO, cast

from hydraloop.files.secrets import mask_text

_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"


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


def log_to_stderr(level: int = logging.INFO, form: str = _FORMAT) -> None:
    """Log to stderr, and mask secrets in all output of this process, also that of libraries, and in tracebacks."""
    sys.stdout, sys.stderr = cast(TextIO, _Masking(sys.stdout)), cast(TextIO, _Masking(sys.stderr))
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    logging.basicConfig(level=level, format=form)


def _uncaught(kind: type[BaseException], error: BaseException | None, found: TracebackType | None) -> None:
    """Write the traceback in one call. Python writes it in parts, which could separate a name from its secret."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, found)))
    sys.stderr.flush()
