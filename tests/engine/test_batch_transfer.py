"""Batches on their way to the device: their form and layout, and one batch ahead."""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from hydraloop.data import build_loader
from hydraloop.engine.batch_transfer import (
    has_streams,
    leaves_of,
    mover,
    one_ahead,
    prefetched,
    reads_ahead,
    tensors_of,
)
from hydraloop.tasks import Task
from tests.data.streams import Plain, stream_loader

CPU = torch.device("cpu")
META = torch.device("meta")
"""A device that every torch has, whose tensors have no memory. Batches can be moved to it."""


def test_on_the_cpu_a_batch_is_left_as_it_is() -> None:
    given = {"image": torch.zeros(2), "other": (torch.ones(2), None)}
    assert mover(CPU)(given) is given


def test_a_tensor_alone_is_a_batch() -> None:
    tensor = torch.zeros(2)
    assert mover(META)(tensor).device == META
    assert list(tensors_of(tensor)) == [tensor]
    assert list(tensors_of("no tensor")) == []


@pytest.mark.parametrize("device", [CPU, META])
def test_images_and_volumes_are_laid_out_channels_last(device: torch.device) -> None:
    images, volumes = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5, 6)
    moved = mover(device, channels_last=True)({"images": images, "volumes": volumes})
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert moved["volumes"].is_contiguous(memory_format=torch.channels_last_3d)
    assert (moved["images"].shape, moved["volumes"].shape) == (images.shape, volumes.shape)
    assert images.is_contiguous(), "the batch of the loader stays as it is"
    if device == CPU:
        assert torch.equal(moved["images"], images)


@pytest.mark.parametrize("other", [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 5, dtype=torch.int64), torch.zeros(2)])
def test_channels_last_is_for_floating_images(other: Tensor) -> None:
    assert mover(CPU, channels_last=True)(other) is other


class CopiesTo(TorchFunctionMode):
    """Stands for an accelerator that this machine lacks: notes `non_blocking` of each copy to it, and does not copy."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)
        self.non_blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.to or args[1] != self._device:
            return func(*args, **(kwargs or {}))
        self.non_blocking.append(bool((kwargs or {}).get("non_blocking")))
        return args[0]


@pytest.mark.parametrize(("device", "expected"), [("mps", False), ("cuda:0", True)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_copies_to_mps_block_since_it_may_read_freed_memory(device: str, expected: bool, channels_last: bool) -> None:
    """Tests the decision only: the copy itself needs a Mac."""
    with CopiesTo(device) as copies:
        mover(torch.device(device), channels_last)({"images": torch.rand(2, 3, 4, 5), "labels": torch.ones(2)})
    assert copies.non_blocking == [expected, expected]


class Pair(NamedTuple):
    """A named tuple."""

    inputs: Tensor
    name: str
    targets: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself, as transformers' BatchEncoding."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        """Move the tensors."""
        return Encoding({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})


class Graph:
    """Moves itself."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def to(self, device: torch.device) -> Graph:
        """Move the tensors."""
        return Graph(self.inputs.to(device), self.targets.to(device))


def packed(x: Tensor) -> PackedSequence:
    """Each sample as a sequence of its numbers."""
    return pack_padded_sequence(x.unsqueeze(-1), torch.full((len(x),), x.size(1)), batch_first=True)


def unpacked(sequences: PackedSequence) -> Tensor:
    """What `packed` was given, with the same layout in memory, on which the last bits of a product depend."""
    return pad_packed_sequence(sequences, batch_first=True)[0][..., 0].contiguous()


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
FORMS: dict[str, tuple[Pack, Unpack]] = {
    "tuple": (lambda x, y: (1, "a", None, x, b"x", y), lambda b: (b[3], b[5])),
    "named tuple": (lambda x, y: Pair(x, "a", y), lambda b: (b.inputs, b.targets)),
    "OrderedDict": (lambda x, y: OrderedDict(n=1.5, x=x, y=y), lambda b: (b["x"], b["y"])),
    "mapping that moves itself": (lambda x, y: Encoding(x=x, y=y), lambda b: (b["x"], b["y"])),
    "PackedSequence": (lambda x, y: (packed(x), y), lambda b: (unpacked(b[0]), b[1])),
    "object and tensor": (lambda x, y: {"graph": Graph(x, y), "n": torch.ones(len(x))}, lambda b: pair(b["graph"])),
    "nested": (
        lambda x, y: {"views": [{"meta": [None, "a", (2, b"x")]}, {"x": Pair(x, "a", y)}]},
        lambda b: pair(b["views"][1]["x"]),
    ),
}  # fmt: skip


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """The inputs and targets of an object with these attributes."""
    return batch.inputs, batch.targets


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_moved_and_keeps_its_form(form: str) -> None:
    pack, unpack = FORMS[form]
    batch = pack(torch.zeros(4, 3), torch.zeros(4, 1))
    moved = mover(META)(batch)
    assert type(moved) is type(batch)
    assert [type(leaf) for leaf in leaves_of(moved)] == [type(leaf) for leaf in leaves_of(batch)]
    if form != "PackedSequence":  # cannot be unpacked without memory
        assert {tensor.device for tensor in (*unpack(moved), *tensors_of(moved))} == {META}
    assert {tensor.device.type for tensor in unpack(batch)} == {"cpu"}, "the batch of the loader stays as it is"
    assert Task(nn.Linear(3, 1), nn.MSELoss()).num_samples(moved) == 4


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
