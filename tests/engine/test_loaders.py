"""Workers end with an epoch or with the run, also after an error. Nothing of them is left: no pipe, no thread."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.data.stream_loader import StreamLoader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from tests.data.streams import stream_loader
from tests.helpers import at, failing, make_engine


def loader(*, workers: int = 1, persistent: bool = True) -> GlobalBatchLoader:
    data = InMemoryDataset(torch.randn(8, 3), torch.randn(8, 1))
    return build_loader(data, shuffle=True, batch_size=2, num_workers=workers, persistent_workers=persistent)


def engine_of(run_dir: Path, hooks: dict[str, Hook], loaders: Loaders | None = None, **settings: Any) -> Engine:
    loaders = loaders or Loaders(loader(workers=2), loader())
    sets = {"train": loaders.train, "val": loaders.val, "test": loaders.test}
    return make_engine(run_dir, hooks, **{"max_epochs": 2, **sets, **settings})


def test_they_outlive_an_epoch_and_end_with_the_run(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    seen: list[set[int | None]] = []

    def look(engine: Engine) -> None:
        seen.append({child.pid for child in set(multiprocessing.active_children()) - before})

    engine = engine_of(tmp_path, {"look": at("after_val", look, nth=0)})
    for _ in range(2):  # an engine that is used again starts new ones
        engine.train()
        assert set(multiprocessing.active_children()) == before
        engine.progress.max_iters, engine.progress.max_epochs = 16, 4
    assert len(seen) == 4
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3
    assert seen[2] == seen[3]
    assert not seen[0] & seen[2]


class Points:
    """A stream of eight samples; or a data set that fails at sample 5."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5:
            raise RuntimeError("on purpose")
        return torch.zeros(3), torch.zeros(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.zeros(3), torch.zeros(1)) for _ in range(8))


def fresh() -> GlobalBatchLoader:
    return loader(persistent=False)


def from_torch(*, persistent: bool = False) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    return DataLoader(data, batch_size=2, num_workers=1, persistent_workers=persistent)


def stream(*, train: bool = False) -> StreamLoader:
    return stream_loader(Points(), train=train, batch_size=2, num_workers=1, split_stream="samples")


def failing_samples() -> GlobalBatchLoader:
    return build_loader(Points(), shuffle=False, batch_size=2, num_workers=1, persistent_workers=False)  # type: ignore[arg-type,return-value]


LOADERS: dict[str, Callable[[], Loaders]] = {
    "kept": lambda: Loaders(loader(), {"a": loader(), "b": loader()}, loader()),
    "not kept": lambda: Loaders(fresh(), fresh(), fresh()),
    "torch's": lambda: Loaders(from_torch(), from_torch(persistent=True), from_torch()),
    "streams": lambda: Loaders(stream(train=True), stream(), stream()),
}


def running() -> tuple[int, ...]:
    """Return the numbers of threads and child processes."""
    return threading.active_count(), len(multiprocessing.active_children())


def in_use() -> tuple[int, ...]:
    """Return the numbers of open files (without batches in shared memory), threads and child processes."""
    files = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files += "torch_" not in os.readlink(f"/proc/self/fd/{number}")
    return files, *running()


def at_most(expected: tuple[int, ...], count: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the counts once none is higher than expected, at the latest after 10 s: threads of queues end later."""
    deadline = time.monotonic() + 10
    while any(now > then for now, then in zip(count(), expected, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()


@pytest.fixture
def not_collected() -> Iterator[None]:
    """Python's collector, which runs at any time or not at all, frees nothing."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux only")
@pytest.mark.usefixtures("not_collected")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("kept", {"limit_train_batches": 3, "limit_val_batches": 1}),
        ("not kept", {"val_by_epoch": False, "val_interval": 3}),
        ("torch's", {"limit_train_batches": 3, "limit_val_batches": 1}),
        ("streams", {"limit_train_batches": 3, "limit_val_batches": 1}),
    ],
)
def test_epochs_leave_nothing_open(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """A run with a limit of 256 open files failed after 20 epochs: a cycle kept the pipes of ended workers."""
    seen: list[tuple[int, ...]] = []
    before = running()

    def look(engine: Engine) -> None:
        seen.append(at_most(seen[1], in_use) if len(seen) > 1 else in_use())

    engine_of(
        tmp_path, {"look": at("before_train_epoch", look, nth=0)}, LOADERS[kind](), max_epochs=4, **settings
    ).train()
    assert len(seen) == 4
    assert all(now <= then for later in seen[2:] for now, then in zip(later, seen[1], strict=True)), seen
    assert at_most(before, running) == before


@pytest.mark.usefixtures("not_collected")
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("kept", "after_train_iter"),
        ("not kept", "after_val_iter"),
        ("torch's", "after_test_iter"),
        ("streams", "after_train_iter"),
        ("kept", "after_run"),
    ],
)
def test_an_error_leaves_no_workers(tmp_path: Path, kind: str, point: str) -> None:
    before = running()
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        engine_of(tmp_path, {"failing": failing(point)}, LOADERS[kind]()).train()
    assert at_most(before, running) == before
    assert caught.traceback, "it was not the end of the traceback that ended them"


@pytest.mark.usefixtures("not_collected")
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_error_in_a_worker_leaves_no_workers(tmp_path: Path, split: str) -> None:
    before, loaders = running(), {"train": loader(persistent=False), split: failing_samples()}
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        engine_of(tmp_path, {}, Loaders(**loaders)).train()
    assert at_most(before, running) == before
    assert caught.traceback
