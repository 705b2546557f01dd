"""Jobs: the jobs of one command line, and the last line that a sweep prints about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from hydraloop.cli import arguments
from hydraloop.safety.secrets import mask_text

_NAMED = 5
"""Failed jobs that the last line names; more would not fit on a screen."""


@dataclass
class Jobs:
    """The jobs that a command line has started."""

    started: list[str] = field(default_factory=list)
    """Their names: the number, which is also the name of the directory, and the swept values."""
    failed: list[str] = field(default_factory=list)
    """The names of those that have failed."""
    closed: bool = False
    """Whether the job that was started last has ended in an orderly way, not by an interrupt."""

    def start(self, axes: Sequence[str]) -> None:
        """Note the job that Hydra is running now.

        Args:
            axes: the keys that are swept.
        """
        hydra = HydraConfig.get()
        number = hydra.job.num if hydra.mode is RunMode.MULTIRUN else 0
        parsed = arguments.parse(list(hydra.overrides.task))
        values = [override.input_line or "" for override in parsed if override.key_or_group in axes]
        swept = f" ({' '.join(values)})" if values else ""
        self.started.append(mask_text(f"job {number}{swept}"))
        self.closed = False

    def end(self, error: BaseException | None) -> None:
        """Note how the job that was started last has ended."""
        self.closed = not isinstance(error, KeyboardInterrupt)
        if error is not None and self.closed:
            self.failed.append(self.started[-1])

    def summary(self, *, interrupted: bool) -> str | None:
        """The last line about a sweep; None where each job has succeeded, or one job has said all there is to say."""
        failed = ", ".join(self.failed[:_NAMED])
        if len(self.failed) > _NAMED:
            failed += f" and {len(self.failed) - _NAMED} others"
        if interrupted and self.started:
            where = f"{'after' if self.closed else 'in'} {self.started[-1]}"
            return f"error: the sweep was interrupted {where}{f'; failed before: {failed}' if failed else ''}"
        if failed and len(self.started) > 1:
            return f"error: {len(self.failed)} of {len(self.started)} jobs failed: {failed}"
        return None
