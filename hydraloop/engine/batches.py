"""The batches of a run on its device, and the windows of training: the batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from hydraloop.engine.device.batch_transfer import mover
from hydraloop.engine.device.prefetch import prefetched, reads_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loader, Loaders, TrainLoader
from hydraloop.engine.progress import Progress
from hydraloop.engine.ready_loader import as_train_loader, check_ranks
from hydraloop.engine.settings import Settings
from hydraloop.errors import UserError


class Window:
    """The batches of one optimizer step. Iterate once: it yields `(batch_idx, batch)`, fetched one by one.

    Args:
        indices: of its batches in the epoch, at least one.
        fetch: returns the batch of an index, on the device.
    """

    def __init__(self, indices: Sequence[int], fetch: Callable[[int], Any]) -> None:
        self.indices = indices
        self.first, self.last = indices[0], indices[-1]
        """Indices of its first batch, and of the one with which the optimizer steps."""
        self._fetch = fetch

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for batch_idx in self.indices:
            yield batch_idx, self._fetch(batch_idx)

    def held(self) -> Window:
        """Fetch all batches now. Return a window that has them; the memory of the device holds them together."""
        batches = {batch_idx: self._fetch(batch_idx) for batch_idx in self.indices}
        return Window(self.indices, batches.pop)


class Batches:
    """The loaders of a run, whose batches it moves to the device.

    Args:
        loaders: of batches.
        device: of the run.
        settings: `channels_last`, `prefetch`, `limit_train_batches`, `accumulate`.
        progress: of the run.
    """

    loaders: Loaders
    """The loaders `train`, `val` and `test`. `use` replaces them between two runs by loaders of the same lengths."""
    train_loader: TrainLoader | None
    """`loaders.train`, in a `ResumableLoader` if it does not know its position."""

    def __init__(self, loaders: Loaders, device: torch.device, settings: Settings, progress: Progress) -> None:
        self._device, self._settings, self._progress = device, settings, progress
        self._move = mover(device, settings.channels_last)
        self.asked_at = 0.0
        """When training asked for its current batch (`perf_counter`)."""
        self.waited = 0.0
        """How long training waited for its current batch [s]."""
        self.use(loaders)

    def use(self, loaders: Loaders) -> None:
        """Use these loaders from now on."""
        self.loaders = loaders
        self.train_loader = None if loaders.train is None else as_train_loader(loaders.train)

    def check_trainable(self, ranks: Distributed) -> None:
        """Refuse to train without a train loader, or with one that has no batch."""
        if self.loaders.train is None:
            raise UserError(
                "there is no training data",
                key="data.train",
                remedy="Try data=digits, or in Python loaders={'train': …}.",
            )
        check_ranks(self.loaders.train, ranks.world_size)
        if not all(self.check_lengths(ranks)):
            raise UserError(
                "the train loader has no batch",
                key="data.loader.batch_size",
                remedy="Use a batch size up to the size of the data set, or data.loader.drop_last=false.",
            )

    def check_lengths(self, ranks: Distributed) -> list[int]:
        """Refuse loaders of different lengths, with which some ranks would wait forever for others.

        In evaluation, ranks wait for each other only if the model is sharded.

        Returns:
            The number of train batches on each rank.
        """
        mine = {"train": 0, **{key: len(loader) for key, loader in self.loaders.by_key().items()}}
        gathered: list[dict[str, int]] = ranks.gather(mine)
        for split in mine if ranks.sharded else ("train",):
            lengths = [one.get(split, 0) for one in gathered]
            if len(set(lengths)) > 1:
                raise UserError(
                    f"the ranks have different numbers of batches in an epoch: {', '.join(map(str, lengths))}; those "
                    "with more would wait for the others forever",
                    key=f"data.{split.replace('/', '.')}",
                    remedy="Give each rank the same number of batches, as hydraloop's loader does.",
                )
        return [one["train"] for one in gathered]

    @property
    def epoch_length(self) -> int:
        """Batches of an epoch that are trained on."""
        return self._settings.limited("train", len(self.train_loader or ()))

    def on_device(
        self, loader: Loader | None, batches: Iterable[Any] | None = None, count: int | None = None
    ) -> Iterator[Any]:
        """Iterate over `batches` of the loader (None: all of them), at most `count`, moved to the device."""
        ahead = self._settings.prefetch and reads_ahead(loader)
        found = loader or () if batches is None else batches
        return prefetched(found if count is None else islice(found, count), self._move, self._device, ahead=ahead)

    def windows(self) -> Iterator[Window]:
        """Yield the windows from the position of the run to the end of the epoch, or of the run.

        A window has `accumulate` batches; the last one of an epoch, and of the run, may have fewer. Batches that are
        left out are loaded and dropped.

        Raises:
            UserError: the loader yields more or fewer batches than its length, from which windows are planned.
        """
        progress = self._progress
        left_out = progress.left_out.get(progress.epoch, ())
        planned = (index for index in range(progress.batch_in_epoch, progress.epoch_length) if index not in left_out)
        batches = enumerate(self._rest_of_epoch(), start=progress.batch_in_epoch)

        def fetch(batch_idx: int) -> Any:
            self.asked_at = perf_counter()
            for index, batch in batches:
                if index == batch_idx:
                    self.waited = perf_counter() - self.asked_at
                    return batch
            raise self._wrong_length(str(progress.batch_in_epoch))

        while progress.iteration < progress.max_iters:
            indices = tuple(islice(planned, min(self._settings.accumulate, progress.max_iters - progress.iteration)))
            if not indices:
                break
            yield Window(indices, fetch)
        progress.skip_left_out()
        if progress.batch_in_epoch == progress.epoch_length:
            for index, _ in batches:  # to its end, where workers end
                if index >= progress.epoch_length:
                    raise self._wrong_length("more")

    def _rest_of_epoch(self) -> Iterator[Any]:
        loader, progress = self.train_loader, self._progress
        assert loader is not None  # check_trainable
        first = progress.batch_in_epoch
        left = progress.epoch_length - first if progress.epoch_length < len(loader) else None
        yield from self.on_device(self.loaders.train, loader.begin(first, progress.iteration), left)

    def _wrong_length(self, got: str) -> UserError:
        return UserError(
            f"the loader has a length of {self._progress.epoch_length} batches and yielded {got}",
            key="data.train",
            remedy="Let __len__ of the data set (or loader) return the number that it yields.",
        )
