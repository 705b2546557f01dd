"""Loaders of streams: sets that are only iterated, without indices and often without a length."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from hydraloop.data.batching import Collate, CollateError, as_is, dataloader_options
from hydraloop.data.stream_worker import (
    BatchedStream,
    NoSamples,
    StreamPlace,
    WorkerBatch,
    WorkerPosition,
    split,
    steps_of,
)
from hydraloop.engine.loaders import end_now
from hydraloop.engine.signals import ended_at_exit
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


class StreamLoader:
    """Batches of a stream: a set that can only be iterated. Each iteration reads each sample once, from the first one.

    With `steps_per_epoch` or `drop_last`, an iteration ends after `len(loader)` batches. Without, it reads all samples,
    and `len(loader)` is an estimate: each worker may end with a short batch.

    Args:
        dataset: anything iterable. An iteration begins at the first sample, or after the one at
            which `state_dict` returned the state that was loaded.
        options: by name; see `LoaderConf`.
        place: where the stream is read.

    Raises:
        UserError: the set has no length, does not say how it is split, or has an option of sets with indices.
    """

    calls_set_epoch = True
    """Sets get the number of the pass, not of the epoch."""

    def __init__(self, dataset: Any, options: Mapping[str, Any], place: StreamPlace) -> None:
        key, keys, self._world_size = place.key, place.keys, place.ranks.world_size
        for name in ("sampler", "batch_sampler"):
            if options[name] is not None:
                raise UserError(f"{key} is a stream: it has no indices", key=keys[name], remedy="Leave it out.")
        self.dataset, self.num_workers, self.batch_size = dataset, options["num_workers"], options["batch_size"]
        self._key, self._workers_key = key, keys["num_workers"]
        self._collate = Collate(options["collate_fn"], keys["collate_fn"], key)
        self._source = split(dataset, options, place)
        self._steps = steps_of(dataset, options, self.batch_size * self._world_size, key)
        self._ends = options["steps_per_epoch"] is not None or options["drop_last"]
        self._options = dataloader_options(options, place.device)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank, each sample once.

        Raises:
            UserError: this rank has no samples.
        """
        drawn = None
        for drawn in islice(self._drawn(), len(self) if self._ends else None):
            yield drawn.batch
        if drawn is None:
            raise UserError(
                "the stream has no samples for this rank",
                key=self._key,
                remedy="Check its path and its split, use fewer ranks, or store the data in more shards.",
            )

    def _drawn(self, positions: Sequence[WorkerPosition] | None = None, first: int = 0) -> Iterator[WorkerBatch]:
        """Yield the batches of the workers in turn; see `BatchedStream`."""
        seeds = torch.Generator()  # torch draws the seed of the workers from it, instead of the global generator
        stream = BatchedStream(self._source, self._collate, self.batch_size, positions, first)
        batches = None
        try:
            loader = DataLoader(stream, batch_size=None, collate_fn=as_is, generator=seeds, **self._options)
            batches = ended_at_exit(loader)
            for drawn in batches:
                if isinstance(drawn, NoSamples):
                    raise self._no_samples(drawn.copy)
                if drawn is not None:
                    yield drawn
        except CollateError as error:
            raise self._collate.mistake(error) from error
        finally:
            end_now(batches)  # a traceback has torch's frames, which would keep the workers

    def _no_samples(self, number: int) -> UserError:
        """Return the error for a copy without samples."""
        copies = self._source.copies[1]
        return UserError(
            f"part {number + 1} of {copies} of the stream (ranks times workers) has no samples",
            key=self._key,
            remedy=f"Check its path and its split. Use fewer workers ({self._workers_key}) or ranks, or store the data "
            "in more shards.",
        )


class TrainStreamLoader(StreamLoader):
    """Full batches of a stream that begins again when it ends. An epoch continues where the last one ended.

    A `TrainLoader`: it knows the position after each batch that was consumed. The workers live for the whole run. With
    the option `skip_on_resume`, a set is read forward to its position.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any], place: StreamPlace) -> None:
        super().__init__(dataset, options, place)
        self._skip = options["skip_on_resume"]
        self._positions = [WorkerPosition() for _ in range(max(self.num_workers, 1))]
        """Of each worker, after the batches that were consumed."""
        self._next = 0
        """The worker with the first batch that was not consumed."""
        self._fetched: deque[tuple[int, WorkerBatch]] = deque()
        """Batches that may not have been consumed yet, with their numbers in the run."""
        self._running: Iterator[WorkerBatch] | None = None
        self._reported = not place.ranks.is_main  # whether the end of the stream is

    def begin(self, first: int, iteration: int) -> Iterator[Any]:
        """Yield the batches of the epoch from index `first` on; see `TrainLoader`."""
        self._consume(iteration)
        again = [drawn.batch for _, drawn in self._fetched]  # fetched before a stop, and not consumed
        for number in range(iteration + 1, iteration + 1 + len(self) - first):
            yield again.pop(0) if again else self._fetch(number)

    def state_at(self, first: int, iteration: int) -> dict[str, Any]:
        """Return the positions of this rank's workers; see `TrainLoader`."""
        self._consume(iteration)
        return {"ranks": self._world_size, "next": self._next, "workers": [vars(one) for one in self._positions]}

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Restore the positions; see `TrainLoader`.

        Inside an epoch, a set without a state is an error, unless it is read forward (`skip_on_resume`). At the end of
        an epoch, it begins again, and a warning says so.
        """
        positions = [WorkerPosition(**one) for one in state["workers"]] if state else []
        layout = (state["ranks"], len(positions)) if state else (0, 0)
        mine = (self._world_size, len(self._positions))
        if state is None or layout != mine:
            raise UserError(
                "the checkpoint has the position of a stream on {} ranks, with {} workers on each; this run has {} "
                "ranks and {} workers".format(*layout, *mine),
                key=self._key,
                remedy="Use the data, data.loader.num_workers and the number of ranks of that run, or set "
                "resume_strict=false to begin the stream again.",
            )
        positions = [self._restored(position, inside=first > 0) for position in positions]
        self._running = None
        self._fetched.clear()
        self._positions, self._next = positions, state["next"]

    def end_workers(self) -> None:
        """End the workers. The next ones begin after the batches that were consumed."""
        if self.num_workers:
            self._running = None
            self._fetched.clear()

    def _fetch(self, number: int) -> Any:
        self._consume(number - 2)  # at most one batch is fetched ahead
        running = self._running or self._drawn(self._positions, self._next)
        drawn = next(running)
        self._running = running
        self._fetched.append((number, drawn))
        if drawn.position.passes > self._positions[drawn.worker].passes and not self._reported:
            log.info("%s: the stream has ended in iteration %d and begins again; reported once", self._key, number)
            self._reported = True
        return drawn.batch

    def _consume(self, iteration: int) -> None:
        while self._fetched and self._fetched[0][0] <= iteration:
            _, drawn = self._fetched.popleft()
            self._positions[drawn.worker] = drawn.position
            self._next = (drawn.worker + 1) % len(self._positions)

    def _restored(self, position: WorkerPosition, *, inside: bool) -> WorkerPosition:
        """Return where a worker begins."""
        if self._skip:
            return replace(position, state=None)
        if position.samples == 0 or position.state is not None:
            return position
        lacks = f"{type(self.dataset).__name__} has no state_dict"
        remedy = "Set data.loader.skip_on_resume=true to read it forward to its position"
        if inside:
            raise UserError(
                f"{lacks}, so it cannot continue inside an epoch",
                key=self._key,
                remedy=f"{remedy}, or resume from the end of an epoch.",
            )
        log.warning("%s: %s, so it begins again. %s", self._key, lacks, remedy)
        return WorkerPosition(position.passes + 1)
