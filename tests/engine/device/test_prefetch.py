"""One batch ahead: the order of fetching and yielding, where errors are raised, and when the source is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hydraloop.data import build_loader
from hydraloop.engine.batch_transfer import has_streams, mover, one_ahead, prefetched, reads_ahead
from tests.data.streams import Plain, stream_loader

CPU = torch.device("cpu")
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True) or CPU
needs_streams = pytest.mark.skipif(not has_streams(ACCELERATOR), reason="no accelerator with streams on this machine")


class Squares(Dataset[Tensor]):
    """8 numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index**2))


class Source:
    """Numbers from 0; notes what is fetched, and can fail at one of them."""

    def __init__(self, events: list[str], length: int, fails_at: int | None = None, error: type = OSError) -> None:
        self.events, self.length, self.fails_at, self.error = events, length, fails_at, error
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == self.fails_at:
            raise self.error(f"batch {self.next}")
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        self.events.append(f"fetch {self.next - 1}")
        return self.next - 1


def trace(source: Source, events: list[str]) -> Iterator[int]:
    def start(batch: int) -> int:
        events.append(f"start {batch}")
        return batch

    def finish(batch: int) -> int:
        events.append(f"finish {batch}")
        return batch

    return one_ahead(source, start, finish)


def train(batch: int, events: list[str]) -> None:
    events.append(f"train {batch}")


def test_the_next_batch_is_started_before_the_current_one_is_handed_over() -> None:
    events: list[str] = []
    for batch in trace(Source(events, 3), events):
        train(batch, events)
    assert events == [
        *("fetch 0", "start 0", "finish 0"),
        *("fetch 1", "start 1", "train 0", "finish 1"),
        *("fetch 2", "start 2", "train 1", "finish 2"),
        "train 2",
    ]


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_every_batch_comes_once_and_in_order(length: int) -> None:
    assert list(trace(Source([], length), [])) == list(range(length))


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_error_arrives_in_place_of_its_batch(fails_at: int) -> None:
    events: list[str] = []
    seen, error = read(trace(Source(events, 5, fails_at), events))
    assert seen == list(range(fails_at))
    assert isinstance(error, OSError)
    assert str(error) == f"batch {fails_at}"
    assert events[-1:] == ([f"finish {fails_at - 1}"] if fails_at else [])


def test_an_interrupt_is_not_held_back() -> None:
    iterator = trace(Source([], 5, fails_at=2, error=KeyboardInterrupt), [])
    assert next(iterator) == 0
    with pytest.raises(KeyboardInterrupt):
        next(iterator)


def test_leaving_the_loop_closes_a_generator() -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    source = numbers()  # held here: the loop's end has to close it, not its last reference
    for batch in one_ahead(source, lambda batch: batch, lambda batch: batch):
        if batch == 1:
            break
    assert closed == [True]


def test_the_source_is_let_go_even_while_its_error_is_held() -> None:
    source = Source([], 3)
    alive = weakref.ref(source)
    iterator = one_ahead(iter(source), lambda batch: 6 // (batch - 1), lambda batch: batch)
    del source
    seen, error = read(iterator)
    assert isinstance(error, ZeroDivisionError)
    assert seen == [-6]
    assert alive() is None, "the error's traceback holds it"


def read(iterator: Iterator[Any]) -> tuple[list[Any], Exception | None]:
    """What comes until the end, and the error that ended it."""
    seen = []
    try:
        for batch in iterator:
            seen.append(batch)  # noqa: PERF402  # list() would lose what came before the error
    except Exception as error:
        return seen, error
    return seen, None


def test_on_the_cpu_nothing_is_fetched_ahead() -> None:
    events: list[str] = []
    for batch in prefetched(Source(events, 2), mover(CPU), CPU, ahead=True):
        train(batch, events)
    assert events == ["fetch 0", "train 0", "fetch 1", "train 1"]


def test_only_what_worker_processes_make_is_read_ahead() -> None:
    assert reads_ahead(build_loader(Squares(), shuffle=True, num_workers=1))
    assert reads_ahead(DataLoader(Squares(), num_workers=2))
    assert reads_ahead(stream_loader(Plain(), train=True, steps_per_epoch=1, num_workers=1))
    assert not reads_ahead(stream_loader(Plain(), train=True, steps_per_epoch=1))
    assert not reads_ahead(build_loader(Squares(), shuffle=True))
    assert not reads_ahead([torch.zeros(1)])
    assert not reads_ahead(None)


@needs_streams
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_arrive_whole_on_an_accelerator(channels_last: bool) -> None:
    images = [torch.rand(8, 3, 64, 64).pin_memory() for _ in range(20)]
    sums = []
    for batch in prefetched(images, mover(ACCELERATOR, channels_last), ACCELERATOR, ahead=True):
        assert batch.device.type == ACCELERATOR.type
        assert batch.is_contiguous(memory_format=torch.channels_last) is channels_last
        work = torch.rand(1024, 1024, device=ACCELERATOR)
        for _ in range(20):  # queued before the batch is read, so that its memory must outlive its reference
            work = work @ work / work.norm()
        sums.append((batch.double() + 0 * work.sum()).sum())
        del batch
    assert torch.stack(sums).tolist() == pytest.approx([image.double().sum().item() for image in images])


@needs_streams
def test_tensors_that_are_still_computed_on_the_device_are_waited_for() -> None:
    def computed() -> Iterator[Tensor]:
        for number in range(5):
            value = torch.full((1, 3, 256, 256), float(number), device=ACCELERATOR)
            for _ in range(100):
                value = value + 1
            yield value

    moved = prefetched(computed(), mover(ACCELERATOR, channels_last=True), ACCELERATOR, ahead=True)
    assert [batch.mean().item() for batch in moved] == [100, 101, 102, 103, 104]


@pytest.mark.skipif(ACCELERATOR.type != "cuda", reason="only CUDA can make a host sync an error")
def test_the_host_waits_for_no_copy() -> None:
    images = [torch.rand(8, 3, 64, 64).pin_memory() for _ in range(5)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = list(prefetched(images, mover(ACCELERATOR), ACCELERATOR, ahead=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(batch.cpu(), image) for batch, image in zip(moved, images, strict=True))
