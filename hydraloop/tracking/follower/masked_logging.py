"""What the processes of trackers write to stderr, into a file in the run directory: secrets are masked. Without torch.

All of it goes through one stream, so what libraries log with handlers of their own, print, or die of is masked, too.
Known secrets are only found where the process was told of them: `hydraloop.safety.secrets.remember`.
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
    """Log to stderr, and mask whatever this process writes to stdout and stderr from now on, tracebacks included.

    Args:
        level: the lowest that is written.
        form: of a line.
    """
    sys.stdout, sys.stderr = _masking(sys.stdout), _masking(sys.stderr)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    logging.basicConfig(level=level, format=form)


class _Masking:
    """A text stream that masks what is written to it, one call at a time; everything else is the stream's own."""

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
    """In one piece: Python writes it in several, and a secret is known by what stands before it."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, found)))
    sys.stderr.flush()
