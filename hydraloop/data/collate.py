"""Making a batch of samples, and saying which sample could not be loaded or put into a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError
from hydraloop.run.result import describe

if TYPE_CHECKING:
    from hydraloop.data.loader import PartLoader


class Collate:
    """Stacks a list of samples, and returns a stacked batch as it is. A class, so that workers can unpickle it."""

    def __init__(self, stack: Callable[[Any], Any]) -> None:
        self.stack = stack

    def __call__(self, fetched: Any) -> Any:
        return self.stack(fetched) if isinstance(fetched, list) else fetched

    @property
    def name(self) -> str:
        """The name of the function, or of the class."""
        function = getattr(self.stack, "func", self.stack)
        return getattr(function, "__name__", type(function).__name__)


def explained(batches: Iterable[Any], loader: PartLoader, first: int) -> Iterator[Any]:
    """Yield the batches. An error in making one is explained: the worker that died, or the sample that does not fit.

    Args:
        first: number of the first batch in the epoch.

    Raises:
        UserError: `collate_fn` has failed, or a worker has died.
        Exception: of the data set, with a note of the sample.
    """
    batch_idx = first
    try:
        for batch in batches:
            yield batch
            batch_idx += 1
    except Exception as error:
        mistake = dead_worker(error, loader.key) or _failed_sample(error, loader, batch_idx)
        if mistake is None:
            raise
        raise mistake from error


def dead_worker(error: Exception, key: str) -> UserError | None:
    """Return what to say of torch's error for workers that were killed or have exited."""
    texts = (str(one) for one in (error.__cause__, error) if isinstance(one, RuntimeError))  # the cause has the signal
    text = next((text for text in texts if text.startswith("DataLoader worker (pid")), None)
    if text is None:
        return None
    return UserError(
        f"{text.splitlines()[0].rstrip('. ')}, while it loaded {key}",
        key="data.loader.num_workers",
        remedy="Often there is too little memory: use fewer workers. data.loader.num_workers=0 loads in the training "
        "process, which shows any other error.",
    )


def _failed_sample(error: Exception, loader: PartLoader, batch_idx: int) -> UserError | None:
    """Return what to say of a failed `collate_fn`; None for an error of the data set, which gets a note.

    The samples are loaded again, in this process.
    """
    dataset, indices = loader.dataset, loader.indices_at(batch_idx, loader.epoch)
    fetch = getattr(dataset, "__getitems__", None)
    index: Any = indices
    samples: Any
    try:
        if fetch is None:
            samples = []
            for index in indices:
                samples.append(dataset[index])
        else:
            samples = fetch(indices)
    except Exception:
        error.add_note(f"{loader.key}: sample {index}, in batch {batch_idx} (from 0) of epoch {loader.epoch + 1}")
        return None
    if not isinstance(samples, list):
        return None
    return misfit(loader.collate_fn, samples, indices, loader.key, "dataset[{}]")


def misfit(
    collate: Any, samples: Sequence[Any], numbers: Sequence[int], key: str, shown: str = "it"
) -> UserError | None:
    """Return the error that says for which sample `collate` fails; None if it does not fail.

    Args:
        collate: a `Collate`.
        samples: of a batch.
        numbers: of the samples, for the message.
        key: of the data set in the config.
        shown: how to look at a sample, with {} for its number.
    """
    error = _failure(collate, samples)
    if error is None:
        return None
    for number, sample in zip(numbers, samples, strict=True):
        for together in ([sample], [samples[0], sample]):
            failure = _failure(collate, together)
            if failure is not None:
                with_first = "" if len(together) == 1 else f" together with sample {numbers[0]}"
                return UserError(
                    f"{collate.name} fails for sample {number} of {key}{with_first}: {describe(failure)}",
                    key="data.loader.collate_fn",
                    remedy=f"Look at {shown.format(number)}, or set data.loader.collate_fn to a function that can "
                    "batch it.",
                )
    return UserError(
        f"{collate.name} fails for the samples {[*numbers]} of {key}: {describe(error)}",
        key="data.loader.collate_fn",
        remedy="Set it to a function that can batch them.",
    )


def _failure(collate: Callable[[Any], Any], samples: Sequence[Any]) -> Exception | None:
    try:
        collate(samples)
    except Exception as error:
        return error
    return None
