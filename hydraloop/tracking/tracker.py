"""Tracker: the interface of a tracking service. Does not import torch, because trackers run in separate processes."""

from __future__ import annotations

import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from hydraloop.errors import UserError
from hydraloop.files.metrics_log import Record
from hydraloop.files.result import Status
from hydraloop.safety.allowlist import ALLOWLIST

FOLDER = "tracking"
"""Folder in a run directory with the description of the run, and cursors, locks and logs of trackers."""
MLFLOW = "hydraloop.tracking.mlflow.MLflowTracker"
WANDB = "hydraloop.tracking.wandb.WandbTracker"
TENSORBOARD = "hydraloop.tracking.tensorboard.TensorBoardTracker"
OWN = {"mlflow": MLFLOW, "wandb": WANDB, "tensorboard": TENSORBOARD}
"""By the name of the hook."""
Ending = Status | Literal["killed"]
"""How a run ended. `killed`: its process has exited without a result."""
EXIT_CODES: dict[Ending, int] = {"finished": 0, "stopped": 0, "failed": 1, "interrupted": 130, "killed": 137}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process's part of a run, as it is described to trackers, with secrets masked."""

    number: int
    """0 for the start of the run, n for its n-th resume."""
    iteration: int
    """Completed iterations when the attempt began; 0 for a start."""
    params: dict[str, str | int | float | bool | None]
    """The resolved config, flattened: `optimizer.lr`, `hooks.ema.momentum`. List elements are named by their index."""
    config: str
    """The resolved config as YAML."""
    tags: dict[str, str]
    """`git_commit`, `command`, `host`, `world_size`, `user`, `device`, … as far as they are known."""
    began: float
    """Start time, in seconds since 1970."""
    pid: int
    """Id of the training process."""
    trackers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of the hook: `kind`, the dotted path of its tracker, and its `options`, with secrets masked."""
    earlier_result: str | None = None
    """Digest of the `result.json` that existed when the attempt began."""
    patch: str | None = None
    """Path of `code.patch`, relative to the run directory; None if all code was committed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep that a run belongs to."""

    folder: Path
    """Absolute path of the sweep."""
    uid: str
    """Random id of the sweep."""
    name: str
    """Display name: date, time and id of the directory."""
    job: int
    """Number of the job, from 0."""
    axes: tuple[str, ...] = ()
    """The swept keys."""
    began: float = 0.0
    """Start time, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as trackers see it."""

    run_dir: Path
    """Absolute path."""
    uid: str
    """Random id of the run, which identifies it on a server."""
    experiment: str
    name: str
    """Display name: the swept values of a sweep's job (`lr=0.01`), else the name of the directory (time and id)."""
    attempts: tuple[Attempt, ...]
    """All attempts, in order; at least one. The last one is the current attempt."""
    sweep: Sweep | None = None

    @property
    def attempt(self) -> Attempt:
        """The current attempt."""
        return self.attempts[-1]

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """The trackers of all attempts. If two attempts have one of the same name, the later one counts."""
        return {name: one for attempt in self.attempts for name, one in attempt.trackers.items()}


@dataclass(frozen=True, slots=True)
class Finish:
    """How the run ended."""

    status: Ending
    error: str | None = None
    """Type and message of the exception that ended the run, with secrets masked."""
    records: int = 0
    """Number of lines that the record log has, at least. A file server may show fewer for a while."""

    @property
    def exit_code(self) -> int:
        """0: finished or stopped on request; 1: failed; 130: interrupted; 137: killed."""
        return EXIT_CODES[self.status]


class RefusedError(Exception):
    """The service will never accept these records. The sender skips them with one warning and sends the rest."""


class UnusableError(Exception):
    """Nothing can be sent with these settings (a malformed address, a deleted experiment). The sender gives up."""


class BusyError(Exception):
    """The service is there but refuses now (status 429, 500, 502, 503 or 504). The sender repeats the call soon."""


class GoneError(UnusableError):
    """The service does not have the run any more: its database was deleted, replaced or moved.

    The sender gives up, and its message has the command that sends everything again.
    """


class LostError(Exception):
    """The service has lost records that it had accepted. The sender sends the records from `index` on again.

    Every method may raise it. The call is repeated after the records were sent. It is reported as a problem only if the
    same records are lost again before the service has everything.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the service has lost records that were sent; they are sent again from line {index + 1} on")
        self.index = index


def valid_utf8(text: str) -> str:
    """Replace surrogates by question marks, so that text is valid UTF-8.

    Python represents bytes of a command line or file name that are not UTF-8 as surrogates.
    """
    return text.encode(errors="replace").decode()


class Tracker(ABC):
    """One tracking service. Runs in a sender or in `sync.py`, so it may block, and raise any error of its library.

    After `RefusedError` and `UnusableError`, a call is not repeated. After any other `Exception`, the same call is
    repeated later, possibly in a new process. A call must therefore be repeatable after it failed halfway. What must
    not be done twice belongs into `memory`, which is written to disk after each call that returned.

    Args:
        options: the hook's options, by name.
        run: the run that is sent.
        memory: the tracker's own state from earlier processes, as plain JSON. Changed in place.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        self.options, self.run, self.memory = options, run, memory

    @classmethod
    def preload(cls) -> None:
        """Import the library while the run is prepared. Called only in a process that serves nothing but this tracker.

        `open` reports a library that cannot be imported.
        """

    @abstractmethod
    def open(self) -> None:
        """Create the run at the service or find it again, and describe the attempts that are not described yet."""

    @abstractmethod
    def send(self, records: Sequence[Record]) -> None:
        """Send all of the records, in order, or raise."""

    def rewound(self, index: int) -> int:
        """Handle that records that were sent have been cut from the log by a resume. Called before `open`.

        Args:
            index: number of records that were sent and are still in the log.

        Returns:
            The index of the first record to send next, at most `index`.
        """
        return index

    def send_file(self) -> bool:
        """Send the next file that is due: config, objects of records, checkpoints, `result.json`.

        Called for at most a second between batches of records, and after `finish` until it returns False.

        Returns:
            Whether there was one.
        """
        return False

    @abstractmethod
    def finish(self, finish: Finish) -> None:
        """Send the final values and the status. Called when all records are sent, before the rest of the files."""

    def close(self) -> None:
        """Release all resources without sending anything. Always called, also after errors. Must not raise."""

    @property
    def where(self) -> str | None:
        """Where a person finds the run: an address, or a command that shows it. None until it is known."""
        return None


def load_tracker(kind: str, *, folders: Sequence[str] = (), packages: Sequence[str] = ()) -> type[Tracker]:
    """Return the class of a tracker: one of hydraloop's own, or one that the allowlist permits.

    Args:
        kind: dotted path of the class, which may come from a file.
        folders: trusted folders, in which the class is looked for first, as in the training process.
        packages: trusted packages.

    Raises:
        ValueError: the allowlist refuses the class, or it is not a tracker.
        Exception: raised by a module of the project while it is imported.
    """
    if kind in OWN.values():
        module, _, name = kind.rpartition(".")
        found = getattr(import_module(module), name)
    else:
        sys.path[:0] = [folder for folder in folders if folder not in sys.path[: len(folders)]]
        for folder in folders:
            ALLOWLIST.trust_folder(Path(folder))
        ALLOWLIST.trust(packages)
        try:
            found = ALLOWLIST.locate(kind, "kind")
        except UserError as error:
            raise ValueError(f"the tracker {kind!r} cannot be loaded: {error.problem}") from error
    if not isinstance(found, type) or not issubclass(found, Tracker):
        raise ValueError(f"{kind!r} is not a subclass of hydraloop.tracking.Tracker")
    return found


def own(run_dir: Path, path: Path) -> Path:
    """Return the path of a file below a run directory.

    Raises:
        RefusedError: it is elsewhere, is a link or has another name (a hard link), is below a link, or is no file.
        FileNotFoundError: it does not exist.
    """
    if not _is_below(run_dir, path.parent):
        raise RefusedError(f"{path} is not in the run directory, or is below a link")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise RefusedError(f"{path} is a link, or no file")
    return path


def own_folder(run_dir: Path, folder: Path) -> None:
    """Create a folder of a run directory if it does not exist.

    Raises:
        UnusableError: it is a link or below one, or no folder.
    """
    if not _is_below(run_dir, folder):
        raise UnusableError(f"{folder} is a link, or below a link: remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UnusableError(f"{folder} is not a folder: move it away") from error


def _is_below(run_dir: Path, folder: Path) -> bool:
    """Return whether a folder is in a run directory and not below a link there."""
    run_dir, folder = run_dir.absolute(), folder.absolute()
    return folder.is_relative_to(run_dir) and folder.resolve() == run_dir.resolve() / folder.relative_to(run_dir)
