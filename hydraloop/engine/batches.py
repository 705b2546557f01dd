"""The batches of a run on its device, and the windows of training: the batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

from hydraloop.engine.batch_transfer import mover, prefetched, reads_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loader, Loaders, TrainLoader
from hydraloop.engine.resumable_loader import as_train_loader, check_ranks
from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError

Window = Sequence[int]
"""The batches of one optimizer step, by their indices in the epoch; at least one."""


class Batches:
    """The loaders of a run, whose batches it moves to the device.

    For each epoch, call `windows`; then `next_batch` for each batch of a window; then `end_epoch`.

    Args:
        loaders: of batches.
        run: its device, its settings and its progress.
    """

    loaders: Loaders
    """The loaders `train`, `val` and `test`. `use` replaces them between two runs by loaders of the same lengths."""
    train_loader: TrainLoader | None
    """`loaders.train`, in a `ResumableLoader` if it does not know its position."""

    def __init__(self, loaders: Loaders, run: Run) -> None:
        self._device = run.device
        self._settings = run.settings
        self._progress = run.progress
        self._move = mover(run.device, run.settings.channels_last)
        self._rest: Iterator[Any] | None = None
        """The rest of the epoch: batches on the device. None before the first `next_batch`."""
        self.asked_at = 0.0
        """When training requested its current batch (`perf_counter`)."""
        self.waited = 0.0
        """How long training has waited for its current batch [s]."""
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
        if not all(self.check_lengths(ranks, "train", "val", "test")):
            raise UserError(
                "the train loader has no batch",
                key="data.loader.batch_size",
                remedy="Use a batch size up to the size of the data set, or data.loader.drop_last=false.",
            )

    def check_lengths(self, ranks: Distributed, *splits: str) -> list[int]:
        """Refuse loaders of different lengths, with which some ranks would wait forever for others.

        In evaluation, ranks wait for each other only if the model is sharded.

        Args:
            ranks: the ranks.
            splits: those that are used: `train`, `val`, `test`.

        Returns:
            The number of train batches on each rank.
        """
        lengths_here = {"train": 0, **{key: len(loader) for key, loader in self.loaders.by_key().items()}}
        of_ranks: list[dict[str, int]] = ranks.gather(lengths_here)
        for key in dict.fromkeys(key for of_rank in of_ranks for key in of_rank):
            split = key.partition("/")[0]
            lengths = [of_rank.get(key, 0) for of_rank in of_ranks]
            if split in splits and (split == "train" or ranks.sharded) and len(set(lengths)) > 1:
                raise UserError(
                    f"the ranks have different numbers of batches in an epoch: {', '.join(map(str, lengths))}; those "
                    "with more would wait for the others forever",
                    key=f"data.{key.replace('/', '.')}",
                    remedy="Give each rank the same number of batches, as hydraloop's loader does.",
                )
        return [of_rank["train"] for of_rank in of_ranks]

    @property
    def epoch_length(self) -> int:
        """Batches of an epoch that are trained on."""
        return self._settings.limited("train", len(self.train_loader or ()))

    def on_device(
        self, loader: Loader | None, batches: Iterable[Any] | None = None, count: int | None = None
    ) -> Iterator[Any]:
        """Iterate over `batches` of the loader (None: all of them), at most `count`, moved to the device."""
        if batches is None:
            batches = loader or ()
        if count is not None:
            batches = islice(batches, count)
        ahead = self._settings.prefetch and reads_ahead(loader)
        return prefetched(batches, self._move, self._device, ahead=ahead)

    def windows(self) -> Iterable[Window]:
        """Return the windows from the position of the run to the end of the epoch, or of the run.

        A window has `accumulate` batches. The last window of an epoch, and of the run, may have fewer.
        """
        progress = self._progress
        accumulate = self._settings.accumulate
        remaining_iters = progress.max_iters - progress.iteration
        stop = min(progress.epoch_length, progress.batch_in_epoch + remaining_iters)
        indices = range(progress.batch_in_epoch, stop)
        return (indices[start : start + accumulate] for start in range(0, len(indices), accumulate))

    def end_epoch(self) -> None:
        """After the last batch, ask the loader once more: a correct one ends, and so do its workers. Drop the iterator.

        Raises:
            UserError: the loader yields more batches than its length, from which windows are planned.
        """
        progress = self._progress
        is_last = progress.batch_in_epoch == progress.epoch_length
        if is_last and any(True for _ in self._rest or self._rest_of_epoch()):
            raise self._wrong_length("more")
        self.end()

    def end(self) -> None:
        """Drop the rest of the epoch. Also after an error: the traceback would keep the iterator and its workers."""
        self._rest = None

    def next_batch(self) -> Any:
        """Return the next batch of the epoch, on the device, and measure how long training waits for it.

        Raises:
            UserError: the loader yields fewer batches than its length.
        """
        self.asked_at = perf_counter()
        if self._rest is None:
            self._rest = self._rest_of_epoch()  # may start workers, which counts as waiting
        try:
            batch = next(self._rest)
        except StopIteration:
            raise self._wrong_length(str(self._progress.batch_in_epoch)) from None
        self.waited = perf_counter() - self.asked_at
        return batch

    def _rest_of_epoch(self) -> Iterator[Any]:
        """Return the batches from the position of the run on, on the device."""
        loader = self.train_loader
        assert loader is not None  # check_trainable
        progress = self._progress
        first = progress.batch_in_epoch
        # Without a limit, the loader is read to its end, which shows whether its length is right.
        count = progress.epoch_length - first if progress.epoch_length < len(loader) else None
        return self.on_device(self.loaders.train, loader.begin(first, progress.iteration), count)

    def _wrong_length(self, got: str) -> UserError:
        return UserError(
            f"the loader has a length of {len(self.train_loader or ())} batches and yielded {got}",
            key="data.train",
            remedy="Let __len__ of the data set (or loader) return the number that it yields.",
        )
