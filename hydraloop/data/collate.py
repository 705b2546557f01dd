"""Makes a batch of samples, and names the samples that cannot be put into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from hydraloop.errors import UserError
from hydraloop.files.result import describe


class CollateError(Exception):
    """A collate function has failed. Its text names the samples. Raised in the process that loads the batch."""


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
            CollateError: the collate function has failed.
        """
        if not self.given and not isinstance(fetched, list):
            return fetched
        try:
            return self.stack(fetched)
        except Exception as error:
            function = getattr(self.stack, "func", self.stack)
            name = getattr(function, "__name__", type(function).__name__)
            raise CollateError(
                f"{name} fails for the samples {[*numbers]} of {self.data}: {describe(error)}"
            ) from error

    def mistake(self, error: CollateError) -> UserError:
        """Return what to say of an error that was raised in this process or in a worker."""
        text = str(error).rpartition("CollateError: ")[2].strip()  # after the worker's traceback, if there is one
        remedy = f"Look at these samples, or set {self.key} to a function that can batch them."
        return UserError(text, key=self.key, remedy=remedy)


def as_is(batch: Any) -> Any:
    """Return a batch that is already made; at module level, so that workers can unpickle it."""
    return batch
