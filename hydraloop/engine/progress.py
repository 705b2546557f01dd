"""Progress: how far a run is, and how long it will be. Counters move before the `after_*` mount points: after epoch 5,
the epoch is 5 everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from hydraloop.engine.hook import Mode

if TYPE_CHECKING:
    from hydraloop.engine.run_parts import Settings

_COUNTERS = ("epoch", "iteration", "optimizer_step", "samples", "batch_in_epoch", "last_validation")
"""What a checkpoint keeps."""


@dataclass(slots=True)
class Progress:
    """The counters of a run, which count what is completed, and its lengths. Equal on all ranks."""

    epoch: int = 0
    """Completed epochs; during the first epoch 0."""
    iteration: int = 0
    """Completed iterations (batches of the train loader)."""
    optimizer_step: int = 0
    """Completed optimizer steps: one in `accumulate` iterations; a skipped fp16 step does not count."""
    samples: int = 0
    """Training samples seen, by all ranks together."""
    batch_in_epoch: int = 0
    """Completed batches of the current epoch; 0 between epochs. The position a loader resumes at."""
    last_validation: int = 0
    """The iteration at which the last completed validation ran; 0 before the first."""

    epoch_length: int = field(default=0, compare=False)
    """Iterations in an epoch."""
    max_iters: int = field(default=0, compare=False)
    """Iterations of the whole run."""
    max_epochs: int = field(default=0, compare=False)
    """Epochs of the whole run."""
    began_at: int = field(default=0, compare=False)
    """The iteration at which this process began or resumed."""
    earlier_seconds: float = field(default=0.0, compare=False)
    """Wall-clock time of the attempts before this process, until their checkpoints [s]."""
    clock_began: float = field(default_factory=perf_counter, compare=False)
    """When this process began to use the engine, by `perf_counter` [s]."""
    epoch_begun: int = field(default=0, compare=False)
    """Number (from 1) of the last epoch that has begun, also after its end; 0 before the first."""
    resumed_in_epoch: bool = field(default=False, compare=False)
    """Whether an earlier process began this epoch."""
    mode: Mode = field(default="train", compare=False)
    """`val` or `test` from before_val to after_val and from before_test to after_test, otherwise `train`."""

    @property
    def is_complete(self) -> bool:
        """Whether all iterations of the run are done."""
        return self.iteration >= self.max_iters

    def start_clock(self) -> None:
        """Note that this attempt begins now."""
        self.clock_began = perf_counter()

    @property
    def attempt_seconds(self) -> float:
        """Wall-clock time of this attempt [s]."""
        return perf_counter() - self.clock_began

    @property
    def seconds(self) -> float:
        """Wall-clock time of all attempts [s]."""
        return self.earlier_seconds + self.attempt_seconds

    def set_length(self, settings: Settings, epoch_length: int) -> None:
        """Set the lengths of the run from its options.

        Args:
            settings: with `max_iters`, or `max_epochs`.
            epoch_length: iterations in an epoch; epochs that are already completed may have had another length.
        """
        self.epoch_length = epoch_length
        epoch_began_at = self.iteration - self.batch_in_epoch
        if settings.max_iters is None:
            self.max_epochs = settings.max_epochs
            self.max_iters = epoch_began_at + max(self.max_epochs - self.epoch, 0) * epoch_length
        else:
            self.max_iters = settings.max_iters
            left = max(self.max_iters - epoch_began_at, 0)
            self.max_epochs = self.epoch + -(-left // max(epoch_length, 1))

    def begin_here(self) -> None:
        """Note that this process continues at this iteration, after a resume."""
        self.began_at = min(self.began_at, self.iteration) if self.epoch_begun else self.iteration
        self.epoch_begun = self.epoch + (self.batch_in_epoch > 0)

    def begin_epoch(self) -> None:
        """Begin the next epoch, or the rest of one."""
        self.epoch_begun = self.epoch + 1
        self.resumed_in_epoch = self.batch_in_epoch > 0

    def complete_iteration(self, batch_idx: int, samples: int, *, stepped: bool) -> None:
        """Count an iteration.

        Args:
            batch_idx: of its batch in the epoch.
            samples: of all ranks.
            stepped: whether an optimizer stepped.
        """
        self.iteration += 1
        self.optimizer_step += stepped
        self.samples += samples
        self.batch_in_epoch = batch_idx + 1

    def complete_epoch_if_done(self) -> bool:
        """Count the epoch and return True, if all its batches are done."""
        is_done = self.batch_in_epoch == self.epoch_length
        if is_done:
            self.epoch += 1
            self.batch_in_epoch = 0
        return is_done

    def complete_validation(self) -> None:
        """Note that a validation is done at this iteration."""
        self.last_validation = self.iteration

    @contextmanager
    def in_mode(self, mode: Mode) -> Iterator[None]:
        """Set `mode` in the body."""
        self.mode = mode
        try:
            yield
        finally:
            self.mode = "train"

    def state_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the counters.

        Raises:
            KeyError: a counter is missing.
        """
        for name in _COUNTERS:
            setattr(self, name, state[name])
