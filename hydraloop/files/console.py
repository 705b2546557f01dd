"""Logging: what the terminal and train.log get, with secrets masked, and tracebacks that show the user's frames."""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from hydraloop.errors import printable
from hydraloop.files.result import shortened
from hydraloop.files.secrets import mask_text
from hydraloop.files.terminal import replace_unencodable

_BLOCK = re.compile(r"(?<=^Traceback \(most recent call last\):\n)(?:  .*\n)+", re.MULTILINE)
_PATH = re.compile(r'^  File "(.*?)"', re.MULTILINE)

_HINT = "  train.log has all frames. To look at the variables in a debugger, add --pdb to the command."


def of_user(text: str) -> str:
    """Return a text in which each traceback has only the frames of the user's code, and the last frame.

    A text without a frame of the user's code is unchanged, and so is every one with HYDRA_FULL_ERROR=1.
    """
    paths = [path for block in _BLOCK.findall(text) for path in _PATH.findall(block)]
    if os.environ.get("HYDRA_FULL_ERROR") == "1" or not any(map(_is_of_user, paths)):
        return text
    return f"{_BLOCK.sub(_shortened, text)}\n{_HINT}"


def _shortened(block: re.Match[str]) -> str:
    starts = [found.start() for found in _PATH.finditer(block[0])]
    frames = [block[0][start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    shown = [frame for frame in frames[:-1] if _is_of_user(frame.split('"')[1])] + frames[-1:]
    return f"  … without {len(frames) - len(shown)} frames of hydraloop and packages\n{''.join(shown)}"


def _is_of_user(path: str) -> bool:
    packages = (str(Path(__file__).resolve().parents[1]) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")
    return not path.startswith(packages) and not {"site-packages", "dist-packages"} & set(Path(path).parts)


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


_COLOURS = {"header": 1, "val": 36, "test": 36, "best": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
"""Codes of ANSI terminals by a message's `style` (an attribute of the log record), else by its level."""

_MOST = 20_000
"""Characters of an error with its traceback: some hundred lines. Log files have all of it."""


class ConsoleHandler(logging.Handler):
    """Prints messages, those of other levels than INFO with the level's name. Errors go to standard error.

    In a terminal, the first line has a colour, unless NO_COLOR is set: `log.info(…, extra={"style": "best"})`.

    `sys.stdout` is read for each message, so that a progress bar that replaces it can print the message above itself.
    Each message is one write, so that lines of several processes do not mix.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted message, with its level unless that is INFO. A traceback and a long error are shortened.

        Log files have all of them.
        """
        text = super().format(record)
        if record.levelno >= logging.ERROR:
            text = shortened(of_user(text), _MOST)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message, unless it is for log files: `log.error(…, extra={"in_files": True})`."""
        if getattr(record, "in_files", False):
            return
        try:
            stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
            text = self.format(record)
            colour = _COLOURS.get(getattr(record, "style", record.levelname))
            if colour is not None and _shows_colours(stream):
                first, *rest = text.split("\n", 1)
                text = "\n".join([f"\x1b[{colour}m{first}\x1b[0m", *rest])
            stream.write(text + "\n")
            stream.flush()
        except RecursionError:
            raise
        except BrokenPipeError:  # the reader has ended (`| head`); the run continues, and its log file is complete
            self.setLevel(logging.CRITICAL + 1)
        except Exception:
            self.handleError(record)


def _shows_colours(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with colours, and NO_COLOR (https://no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


class MaskingFormatter(logging.Formatter):
    """Formats like `logging.Formatter`, and masks secrets in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message and its traceback."""
        return mask_text(super().format(record))


class PrintableFormatter(MaskingFormatter):
    """Formats like `MaskingFormatter`, for commands that print what the files of a run contain."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message, in which nothing controls the terminal."""
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file in UTF-8. An error of the disk is one line in the terminal, once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="replace")
        self._reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called by `logging` for an error of `emit`."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            name = Path(self.baseFilename).name
            print(f"warning: {name} cannot be written: {error}; messages are in the terminal only", file=sys.stderr)


def set_up(verbose: Any, file: Path | None = None, *, terminal: bool = True) -> None:
    """Send the messages of all loggers to the terminal and to a file, and to no other place. Secrets are masked.

    Args:
        verbose: `hydra.verbose`: whether messages for debugging are sent; or the loggers of which they are.
        file: gets messages with time, logger and level.
        terminal: whether there is one. If not, messages on the standard output are as in a file.
    """
    root = logging.getLogger()
    for earlier in [*root.handlers]:
        root.removeHandler(earlier)
        earlier.close()
    full = MaskingFormatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s")
    output = ConsoleHandler() if terminal else logging.StreamHandler(sys.stdout)
    output.setFormatter(MaskingFormatter("%(message)s") if terminal else full)
    root.addHandler(output)
    if file is not None:
        log_file = _LogFile(file)
        log_file.setFormatter(full)
        root.addHandler(log_file)
    root.setLevel(logging.DEBUG if verbose is True else logging.INFO)
    for name in () if isinstance(verbose, bool) else [verbose] if isinstance(verbose, str) else verbose:
        logging.getLogger(name).setLevel(logging.DEBUG)


def ensure() -> None:
    """Print the messages of hydraloop as on the command line, unless the script has set up logging or does so later."""
    ours = logging.getLogger("hydraloop")
    if ours.handlers or logging.getLogger().handlers:
        return
    replace_unencodable()
    handler = ConsoleHandler(logging.INFO if int(os.environ.get("RANK", "0")) == 0 else logging.ERROR)
    handler.setFormatter(MaskingFormatter("%(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
