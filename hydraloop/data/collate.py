"""Makes a batch of samples; an error names the samples that cannot be put into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate


class Collate:
    """Makes a batch of a list of samples. A class, so that workers can unpickle it.

    Args:
        collate_fn: of the user. None: torch's `default_collate`, and a batch that the data set has stacked stays as it
            is.
        key: of `collate_fn` in the config, for errors.
        data: key of the data set in the config, for errors.
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None, key: str, data: str) -> None:
        self.stack, self.key, self.data, self.given = collate_fn or default_collate, key, data, collate_fn is not None

    def __call__(self, fetched: Any, numbers: Sequence[int]) -> Any:
        """Return the batch of what was fetched for the samples with these numbers.

        Raises:
            Exception: of the collate function, with a note of the samples.
        """
        if not self.given and not isinstance(fetched, list):
            return fetched
        try:
            return self.stack(fetched)
        except Exception as error:
            error.add_note(f"{self.key} fails for the samples {[*numbers]} of {self.data}")
            raise


def as_is(batch: Any) -> Any:
    """Return a batch that is already made; at module level, so that workers can unpickle it."""
    return batch
