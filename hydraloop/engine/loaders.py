"""What the engine needs of loaders: a length and batches; of a train loader also a position. Ending workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydraloop.errors import UserError


class Loader(Sized, Iterable[Any], Protocol):
    """Anything with a length that yields batches, a DataLoader or a list."""


@runtime_checkable
class TrainLoader(Protocol):
    """A loader that can begin at any batch of the run. `as_train_loader` makes one of any other loader.

    In all methods, `first` is the number of batches of this epoch that this rank has consumed, `iteration` that of the
    whole run. A batch is consumed when the training step has had it; a loader may have fetched more.
    """

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    def begin(self, first: int, iteration: int) -> Iterable[Any]:
        """Return the batches of the epoch from index `first` (from 0) to its end. Called once for each epoch."""

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return what a checkpoint keeps of this rank's position; tensors and plain values.

        None: the batches follow from the epoch and `first`.
        """

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Restore the position at which `state_at` returned `state`. Changes nothing if it raises.

        Args:
            state: of this rank. A rank that the saved run did not have gets the state of another one. None: the
                checkpoint has no state of the data.

        Raises:
            UserError: the batches that follow this position cannot be reproduced.
        """


@runtime_checkable
class Shared(Protocol):
    """A loader that knows how many samples each rank has in a batch."""

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return (samples of this rank in the batch, samples of all ranks); (0, n) for a filler batch.

        In the last global batch of an epoch, a rank may have no samples left. It then gets a filler batch with samples
        of other ranks, so that it can take part in collectives.
        """


def share_of(loader: object) -> Callable[[int], tuple[int, int]] | None:
    """Return `samples_at` of a loader; None if it has none, and so does not know the samples of other ranks."""
    return loader.samples_at if isinstance(loader, Shared) else None


def has_exact_sizes(loader: object) -> bool:
    """Return whether each batch has the samples that `samples_at` returns: nothing drops, merges or repeats samples."""
    return isinstance(loader, Shared) and getattr(loader, "has_exact_sizes", False) is True


def epoch_setters(loader: object) -> list[Callable[[int], object]]:
    """Return `set_epoch` of a loader, of its samplers, and of the sampler in its `batch_sampler`, if they have it.

    It is torch's convention: the loader may be a list, and the sampler any object.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    orders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(order, "set_epoch", None) for order in {id(order): order for order in orders}.values())
    return [set_epoch for set_epoch in found if set_epoch is not None]


@runtime_checkable
class Ordered(Protocol):
    """A loader that knows which samples are in a batch."""

    @property
    def epoch(self) -> int:
        """The epoch (from 0) of its current order."""

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch of an epoch, both counted from 0."""


def keeps_workers(loader: object) -> TypeGuard[DataLoader[object]]:
    """Return whether the loader's worker processes outlive an epoch; they have copies of the data set."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def end_workers(loader: object) -> None:
    """End the workers that a loader keeps; its next epoch starts new ones with copies of the current data set.

    Called between two epochs, and at the end of a run, where garbage collection would wait 5 s for each worker. New
    workers take their seeds from the loader's generator, as the first ones did.
    """
    end: Any = getattr(loader, "end_workers", None)  # of another class than torch's
    if end is not None:
        end()
    if not keeps_workers(loader):
        return
    iterator, loader._iterator = loader._iterator, None  # torch has no public function; __iter__ creates the next one
    end_now(iterator)


def end_now(batches: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has any, although references to it are left."""
    if hasattr(batches, "_workers"):
        batches._shutdown_workers()
        for worker in batches._workers:  # hydraloop's ignore torch's SIGTERM
            worker.kill()


def data_sets_with(attribute: str, loader: object, *, outermost: bool = False) -> list[Any]:
    """Return the data sets of a loader that have the attribute (and not as None), from the outside in.

    Data sets that wrap another one (`dataset`, as torch's Subset) or several (`datasets`, as ConcatDataset) are
    searched too. A loader without a data set, such as a list of batches, has none.

    Args:
        attribute: name of a method or value.
        loader: any object, a mapping of them (several data sets), or None.
        outermost: leave out data sets inside one that has the attribute.
    """
    found: list[Any] = []
    seen: set[int] = set()
    loaders = loader.values() if isinstance(loader, Mapping) else [loader]
    waiting = [getattr(each, "dataset", None) for each in loaders]  # classes of users: any type
    while waiting:
        data = waiting.pop(0)
        if data is None or id(data) in seen:
            continue
        seen.add(id(data))
        if getattr(data, attribute, None) is not None:
            found.append(data)
            if outermost:
                continue
        inside = getattr(data, "datasets", None)
        waiting += [getattr(data, "dataset", None), *(inside if isinstance(inside, list | tuple) else ())]
    return found


def sets_of(loaders: Loader | Mapping[str, Loader] | None) -> dict[str, Loader]:
    """Return the loaders of a split by the name of the data set; a single one has the name ""."""
    if loaders is None:
        return {}
    return dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}


@dataclass(frozen=True, slots=True)
class Loaders:
    """The loaders of a run; without `val` there is no validation, without `test` no test.

    Several data sets of a validation or test are a mapping, and their metrics are named `<data set>/<metric>`.
    """

    train: Loader | None = None
    val: Loader | Mapping[str, Loader] | None = None
    test: Loader | Mapping[str, Loader] | None = None

    def __post_init__(self) -> None:
        for key, loader in self.by_key().items():
            of_samples = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
            if of_samples or not isinstance(loader, Sized):
                raise UserError(
                    f"{type(loader).__name__} is not a loader: a length and batches",
                    key=f"data.{key.replace('/', '.')}",
                    remedy="Use torch.utils.data.DataLoader(…, batch_size=64), or a list of batches.",
                )

    def by_key(self) -> dict[str, Loader]:
        """Return all loaders by key: `train`, `val`, `test`; with several data sets `val/a`, `val/b`."""
        return {
            f"{split}/{name}".rstrip("/"): loader
            for split in ("train", "val", "test")
            for name, loader in sets_of(getattr(self, split)).items()
        }
