"""Ended: how a run ended, for the one who started it; and `result.json` saying so, whoever came to write it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hydraloop.launch.outcome import Outcome, RankError
from hydraloop.run.result import FILENAME, Result, Status, describe
from hydraloop.safety.secrets import mask_text


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    value: float | None = None
    """What a sweep optimises."""
    error: BaseException | None = None
    """What the job is to raise."""
    trained: bool = True
    """Whether it completed an iteration."""

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """As a rank has it."""
        return cls(outcome.value, outcome.error(), outcome.trained)

    def write(self, run_dir: Path, *, written: bool) -> None:
        """See to it that `result.json` gives the error: rank 0 may have known only that another was lost, or nothing.

        Args:
            written: whether the run has written the file, so that all else in it is its own.
        """
        if self.error is None:
            return
        status: Status = "interrupted" if isinstance(self.error, KeyboardInterrupt) else "failed"
        text = mask_text(str(self.error) if isinstance(self.error, RankError) else describe(self.error))
        if not written:
            Result(status=status, error=text).write(run_dir)
            return
        found = json.loads((run_dir / FILENAME).read_text(encoding="utf-8"))
        if (found["status"], found["error"]) != (status, text):
            Result(**{**found, "status": status, "error": text}).write(run_dir)
