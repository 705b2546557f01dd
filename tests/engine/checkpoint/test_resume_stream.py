"""Resume of a run on a stream: cut several times, it ends with the same bits as one that was not cut.

Dropout, an average, a clipped optimizer, windows of three batches, and streams with and without a state.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.batch_transfer import one_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.engine.seeding import rng_state, seed_everything, set_rng_state
from hydraloop.hooks import CheckpointHook, EMAHook, GradClipHook, LoggerHook, RuntimeInfoHook
from hydraloop.tasks.per_sample import Classification
from tests.data.streams import stream_loader
from tests.helpers import EngineWithNeededHooks, differences
from tests.ranks import on_ranks

EPOCHS, STEPS, SAMPLES = 4, 7, 25
Sample = tuple[Tensor, int]


@pytest.fixture(autouse=True)
def _generators_restored() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


class Points:
    """A generator class: points in another order in each pass, with noise. An epoch ends inside a pass."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(samples, 5, generator=generator)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, number: int) -> Sample:
        """A point with noise on all coordinates but the first."""
        point = self.points[number]
        return point + 0.1 * torch.randn(5) * (torch.arange(5) > 0), int(point[:3].argmax())

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(len(self.points)), len(self.points))

    def __iter__(self) -> Iterator[Sample]:
        for number in self.order():
            yield self.sample(number)


class StatefulPoints(Points, IterableDataset[Sample]):
    """As `Points`, with a state and a split."""

    def __init__(self) -> None:
        super().__init__()
        self._part, self._read, self._start = (0, 1), 0, 0

    def split(self, index: int, count: int) -> StatefulPoints:
        part = StatefulPoints()
        part._part = (index, count)
        return part

    def state_dict(self) -> dict[str, int]:
        return {"read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["read"]

    def __iter__(self) -> Iterator[Sample]:
        index, count = self._part
        order = self.order()[index::count]
        self._read, self._start = self._start, 0
        while self._read < len(order):
            self._read += 1
            yield self.sample(order[self._read - 1])


class Recorder(Hook):
    """Records the first coordinates of the points in each batch."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.batches.append(batch[0][:, 0].tolist())


def _engine(
    run_dir: Path,
    seed: int,
    stream: Any,
    *,
    options: dict[str, Any],
    distributed: Distributed | None = None,
    recorder: Recorder | None = None,
    **settings: Any,
) -> Engine:
    """A run whose data and draws are the same for any `seed`; the initial weights are not."""
    seed_everything(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    points = Points().points
    hooks: dict[str, Hook] = {
        "runtime_info": RuntimeInfoHook(),
        "grad_clip": GradClipHook(max_norm=1.0),
        "ema": EMAHook(momentum=0.05),
        "logger": LoggerHook(interval=3),
        "checkpoint": CheckpointHook(interval=1, by_epoch=False),
    } | ({} if recorder is None else {"recorder": recorder})
    ranks: dict[str, Any] = (
        {} if distributed is None else {"rank": distributed.rank, "world_size": distributed.world_size}
    )
    val = build_loader(InMemoryDataset(points, points[:, :3].argmax(1)), shuffle=False, batch_size=10, **ranks)
    return EngineWithNeededHooks(
        task=Classification(model, nn.CrossEntropyLoss()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        loaders=Loaders(
            stream_loader(stream, train=True, seed=7, **{"steps_per_epoch": STEPS, **options}, **ranks), val
        ),
        distributed=distributed,
        hooks=hooks,
        settings=Settings(**{"device": "cpu", "max_epochs": EPOCHS, "accumulate": 3, **settings}),
        run_dir=run_dir,
        seed=7,
    )


def _last(run_dir: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(run_dir / "checkpoints" / f"iter_{EPOCHS * STEPS}.pth", weights_only=True)
    del checkpoint["meta"]["time"], checkpoint["meta"]["records"], checkpoint["hooks"]["checkpoint"]
    return checkpoint


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("stream", "skip"), [(StatefulPoints, False), (Points, True)])
def test_a_run_that_was_cut_three_times_ends_with_the_same_bits(
    tmp_path: Path, stream: type[Points], skip: bool, workers: int
) -> None:
    options = {"num_workers": workers, "skip_on_resume": skip}
    runs = [tmp_path / str(number) for number in range(4)]
    for run_dir in runs:
        run_dir.mkdir()
    uncut = _engine(runs[0], 1, stream(), options=options)
    before = set(multiprocessing.active_children())  # the ranks of other tests
    uncut.train()
    assert set(multiprocessing.active_children()) <= before, "workers end with the run"
    expected = _last(runs[0])
    earlier = runs[0]
    for number, cut in enumerate((3, 14, 20), start=1):  # inside an epoch, at its end, and inside another one
        resume = earlier / "checkpoints" / f"iter_{cut}.pth"
        engine = _engine(runs[number], number + 1, stream(), options=options, resume=resume)
        engine.train()
        assert list(differences(_last(runs[number]), expected)) == [], cut
        assert engine.metrics == uncut.metrics
        earlier = runs[number]
    assert any(differences(expected["state_dict"], expected["hooks"]["ema"]["averaged"])), "the average is another one"


def _one_ahead(batches: Any, move: Any, device: torch.device, *, ahead: bool) -> Iterator[Any]:
    """Fetch one batch ahead, as on a device with streams."""
    return one_ahead(iter(batches), move, lambda moved: moved) if ahead else map(move, batches)


@pytest.mark.parametrize("accumulate", [2, 4, 6])
def test_no_batch_is_lost_if_one_is_fetched_ahead(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is that of the first of three windows."""
    monkeypatch.setattr("hydraloop.engine.batches.prefetched", _one_ahead)
    options = {"num_workers": 1, "steps_per_epoch": 3 * accumulate}
    whole, rest = Recorder(), Recorder()
    points = StatefulPoints()
    settings: dict[str, Any] = {"accumulate": accumulate, "max_epochs": 1}
    _engine(tmp_path, 1, points, options=options, recorder=whole, **settings).train()
    cut = tmp_path / "checkpoints" / f"iter_{accumulate}.pth"
    _engine(tmp_path / "resumed", 2, points, options=options, recorder=rest, resume=cut, **settings).train()
    assert len(whole.batches) == 3 * accumulate
    assert rest.batches == whole.batches[accumulate:]


def _on_rank(distributed: Distributed, folder: str, stream: type[Points]) -> tuple[list[list[float]], int, list[str]]:
    """Train, then resume twice; return the batches of the rank, its iterations, and what differs after the resumes."""
    run_dirs = [Path(folder) / name for name in ("uncut", "first", "second")]
    if distributed.is_main:
        for run_dir in run_dirs:
            run_dir.mkdir()
    distributed.barrier()
    recorder = Recorder()
    engine = _engine(run_dirs[0], 1, stream(), options={}, distributed=distributed, recorder=recorder)
    engine.train()
    found: list[str] = []
    for number, cut in ((1, 6), (2, 13)):
        resume = run_dirs[number - 1] / "checkpoints" / f"iter_{cut}.pth"
        resumed = _engine(
            run_dirs[number], number + 1, stream(), options={"skip_on_resume": True}, distributed=distributed,
            recorder=Recorder(), resume=resume,
        )  # fmt: skip
        resumed.train()
        distributed.barrier()
        found += differences(_last(run_dirs[number]), _last(run_dirs[0]))
    return recorder.batches, engine.progress.iteration, found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [StatefulPoints, Points])
def test_two_ranks_take_equally_many_steps_share_each_pass_and_resume(tmp_path: Path, stream: type[Points]) -> None:
    results = on_ranks(2, _on_rank, str(tmp_path), stream)
    points = Points().points[:, 0].tolist()
    for batches, iterations, found in results:
        assert iterations == len(batches) == EPOCHS * STEPS
        assert {len(batch) for batch in batches} == {3}
        assert found == []
    parts = [list(chain(*batches)) for batches, *_ in results]
    one_pass = [part[: SAMPLES // 2] for part in parts]
    assert len(set(chain(*one_pass))) == 2 * (SAMPLES // 2), "no point twice within a pass"
    assert set(chain(*parts)) == set(points)
