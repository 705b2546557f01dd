"""How far training has come. Counters move before the closing mount points, so "epoch 5 is done" is 5 everywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class Progress:
    """The counters of a run. All count what is completed, on this rank unless said otherwise."""

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

    def state_dict(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set all counters.

        Raises:
            KeyError: a counter is missing.
        """
        for counter in fields(self):
            setattr(self, counter.name, state[counter.name])
