"""`result.json`: the outcome of a run, for scripts and sweeps. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any, Literal, Self, TypeVar, get_args

from hydraloop.errors import Terminated
from hydraloop.files import atomic
from hydraloop.files.atomic import parsed_json, read_bytes
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import mask_text

log = logging.getLogger(__name__)

T = TypeVar("T")

Status = Literal["finished", "failed", "stopped", "interrupted"]

FILENAME = "result.json"
_INTERRUPTED = "interrupted by "
"""Begins the description of a signal that has ended the run."""
_PREEMPTED = "preempted by "
"""Begins the reason of a run that has saved and ended, to be continued."""
_CTRL_C = f"{_INTERRUPTED}Ctrl-C"
"""The reason if Ctrl-C has preempted it."""
NO_CHECKPOINT = " (no best checkpoint)"
"""Follows the value of a best validation that was not kept as a file."""
PAUSE = "engine.pause_after"
"""The option that pauses a run. The name begins what has preempted such a run."""
_MOST = 2_000
"""Characters of an error in `result.json`, in states of jobs and in tables: twenty to fifty lines."""
GREATER_KEYS: tuple[str, ...] = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Names, or parts of names, of metrics whose high values are good, as in mmengine's CheckpointHook."""
LESS_KEYS: tuple[str, ...] = ("loss",)
"""The same for low values."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation of the objective until now. Only `engine/validations.py` decides which one it is."""

    metric: str
    value: float
    iteration: int
    """Completed iterations at that validation."""
    checkpoint: str | None = None
    """Path of the best checkpoint; None if this validation was not kept as a file."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The value of a run by which the jobs of a sweep are compared."""

    metric: str
    """The first metric of `save_best`, otherwise of `sweep.objectives`, otherwise the first one of the task."""
    rule: Literal["greater", "less"] | None
    """Whether greater or lesser values are better; None if the metric does not say."""
    value: float
    """The value of the best validation. If it is not known which values are good: the last value. NaN if the run has
    diverged, or if no validation was finite."""
    iteration: int
    """Completed iterations at that validation."""


@dataclass(slots=True)
class Result:
    """The contents of `result.json`."""

    status: Status
    error: str | None = None
    """The error that ended the run (`describe`)."""
    reason: str | None = None
    """Why it stopped or was preempted, if the status is `stopped` or `interrupted` and there is no error."""
    val_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation."""
    test_metrics: dict[str, float] = field(default_factory=dict)
    best: Best | None = None
    """None without a finite validation, and if it is not known which values are good."""
    objective: Objective | None = None
    """None without a validation that reports the metric."""
    progress: dict[str, int] = field(default_factory=dict)
    records: int = 0
    """Number of lines of `metrics.jsonl`."""
    seconds: float = 0.0
    """Wall-clock time of all attempts. Of an earlier attempt, what came after its checkpoint does not count."""
    earlier_seconds: float = 0.0
    """The part of it of earlier attempts."""
    hook_seconds: dict[str, float] = field(default_factory=dict)
    """The time that each hook has taken in this attempt before `after_run`."""
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, str | bool] = field(default_factory=dict)
    """`commit` of the folder in which the run was started, `dirty`: whether tracked files differed from it, and if so
    `patch`: the checksum of `code.patch`."""

    @classmethod
    def read(cls, run_dir: Path, *, earlier: str | None = None) -> Self | None:
        """Return the contents of the file; None if there is no file, or no complete one of hydraloop.

        Args:
            earlier: the `digest` of a file that an earlier attempt has written. That file is not read.
        """
        try:
            content = read_bytes(run_dir / FILENAME)
            found = {name: value for name, value in parsed_json(content).items() if name in cls.__slots__}
            if earlier == _digest(content) or found["status"] not in get_args(Status):
                return None
            found["best"] = _with_number(Best, found.get("best"))
            found["objective"] = _with_number(Objective, found.get("objective"))
            found |= {name: _numbers(found.get(name) or {}) for name in ("val_metrics", "test_metrics", "hook_seconds")}
            result = cls(**found)
            texts = (result.error, result.reason, result.objective and result.objective.metric)
            is_ours = isinstance(result.seconds, int | float) and all(isinstance(one, str | None) for one in texts)
            return result if is_ours and isinstance(result.progress, dict) and isinstance(result.git, dict) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def value(self) -> float | None:
        """What a sweep optimizes."""
        return None if self.objective is None else self.objective.value

    @property
    def best_checkpoint(self) -> Path | None:
        """The file of the best validation; None if it was not kept."""
        return None if self.best is None or self.best.checkpoint is None else Path(self.best.checkpoint)

    @property
    def note(self) -> str:
        """What to print after the objective, in parentheses; empty if it is that of the best checkpoint, or NaN."""
        if self.objective is None or math.isnan(self.objective.value):
            return ""
        if self.objective.rule is None:
            return " (last)"
        return NO_CHECKPOINT if self.best_checkpoint is None else ""

    @property
    def preempted_by(self) -> str | None:
        """What has preempted the run, which is to be continued; None if it has ended."""
        return preempted_by(self.reason) if self.status == "interrupted" else None

    def write(self, run_dir: Path) -> None:
        """Write the file atomically; secrets in the error are masked.

        NaN and infinity, which JSON does not have, become their names as strings.
        """
        shown = replace(self, error=_masked(self.error), reason=_masked(self.reason))
        text = json.dumps(plain(asdict(shown)), indent=2, allow_nan=False)
        atomic.write_text(run_dir / FILENAME, text + "\n")


class ResultFile:
    """`result.json` of one attempt, for its launcher. Nothing outside this module writes `result.json`.

    Args:
        run_dir: the run directory, which is locked; the present content of its file is from an earlier attempt.
        attempt: the folder of this attempt to resume the run, `.hydra/resume_<n>`; None for a new run.
        before: the content of the file before this attempt; empty without a file. None: its present content.
    """

    def __init__(self, run_dir: Path, attempt: Path | None = None, before: str | None = None) -> None:
        self._path, self._attempt = run_dir / FILENAME, attempt
        atomic.remove_unfinished(self._path)
        if before is None:
            before = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        self._before = before.encode() or None
        self._began = time.monotonic()

    def has(self, error: BaseException) -> bool:
        """Return whether this attempt has written the error."""
        written = self._written()
        return written is not None and (written.status, written.error) == _outcome(error)

    @property
    def is_complete(self) -> bool:
        """Return whether this attempt has written how the run has ended, and not an error."""
        written = self._written()
        return written is not None and written.error is None

    def set_error(self, error: BaseException) -> None:
        """Write the error into the file: rank 0 may have written nothing, or only that it lost another rank.

        On a full disk, this is only logged.
        """
        if not self.has(error):
            status, text = _outcome(error)
            # Without the time, an attempt that fails as the one before it would write the same file.
            written = self._written() or Result(status, seconds=time.monotonic() - self._began)
            try:
                replace(written, status=status, error=text).write(self._path.parent)
            except OSError as late:
                log.error("%s cannot be written: %s", FILENAME, describe(late))

    def _written(self) -> Result | None:
        """Return what this attempt has written; None if it has not written the file."""
        earlier = None if self._before is None else _digest(self._before)
        return Result.read(self._path.parent, earlier=earlier)

    def put_back(self) -> None:
        """Move the file to the attempt's folder and restore the earlier one; a new run keeps its file.

        For an attempt that failed before its first iteration (another model, an incomplete checkpoint).
        """
        if self._attempt is None or not self._path.exists():
            return
        if self._before is None:
            self._path.replace(self._attempt / FILENAME)
            return
        atomic.write_bytes(self._attempt / FILENAME, self._path.read_bytes())
        atomic.write_bytes(self._path, self._before)


def by_keys(name: str, greater: Iterable[str] = GREATER_KEYS, less: Iterable[str] = LESS_KEYS) -> bool | None:
    """Return whether high values are good; None if the name is not in the lists. An exact match counts first."""
    name, greater, less = name.lower(), [key.lower() for key in greater], [key.lower() for key in less]
    if name in greater or name in less:
        return name in greater
    if any(key in name for key in greater):
        return True
    return False if any(key in name for key in less) else None


def is_better(value: float, than: float | None, *, higher: bool) -> bool:
    """Return whether `value` is strictly better. Any finite value is better than None; NaN and infinity never are."""
    if not math.isfinite(value):
        return False
    return than is None or (value > than if higher else value < than)


def digest(run_dir: Path) -> str | None:
    """Return a checksum of the file, which tells later whether it was replaced; None if there is no file."""
    try:
        return _digest(read_bytes(run_dir / FILENAME))
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _with_number(kind: type[T], found: Mapping[str, Any] | None) -> T | None:
    return None if found is None else kind(**{**found, "value": float(found["value"])})


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}


def shortened(text: str, most: int) -> str:
    """Return the first and last lines of a text that is longer than `most` characters. Its secrets are masked."""
    if len(text) <= most:
        return text
    text = mask_text(text)  # not later: half of a secret would not be found
    first, last = text[: most // 2], text[-(most // 2) :]
    first = first.rpartition("\n")[0] or first
    last = last.partition("\n")[2] or last
    return f"{first}\n… {len(text) - len(first) - len(last):,} characters are left out: the log has them …\n{last}"


def describe(error: BaseException) -> str:
    """Return an error as text: its type and message, or `interrupted by Ctrl-C (SIGINT)`.

    A `UserError`, and the error of another rank, is its message alone. A long text is shortened.
    """
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Terminated) else SIGINT
        return _INTERRUPTED + ("Ctrl-C (SIGINT)" if number == SIGINT else Signals(number).name)
    text = str(error)
    if type(error).__name__ not in ("UserError", "RankError"):
        text = f"{type(error).__name__}: {text}" if text else repr(error)
    return shortened(text, _MOST)


def preemption(cause: str) -> str:
    """Return the reason of a run that has saved and ended, because of a signal (its name), an option or a hook."""
    return _CTRL_C if cause == SIGINT.name else _PREEMPTED + cause


def preempted_by(reason: str | None) -> str | None:
    """Return the cause in a `preemption`; None for another reason."""
    if reason == _CTRL_C:
        return SIGINT.name
    return reason.removeprefix(_PREEMPTED) if reason is not None and reason.startswith(_PREEMPTED) else None


def signal_of(described: str) -> int:
    """Return the number of the signal that `describe` has named; 0 for another error."""
    found = re.fullmatch(rf"{_INTERRUPTED}(?:Ctrl-C \()?(SIG\w+)\)?", described)
    return 0 if found is None else Signals[found[1]]


def _outcome(error: BaseException) -> tuple[Status, str]:
    is_interrupted = isinstance(error, KeyboardInterrupt) or getattr(error, "was_killed", False)  # it, or a rank
    return "interrupted" if is_interrupted else "failed", mask_text(describe(error))


def _masked(text: str | None) -> str | None:
    return None if text is None else mask_text(text)
