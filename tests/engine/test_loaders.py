"""Workers that outlive an epoch end with the run, also after an error."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders, end_workers, keeps_workers
from hydraloop.engine.settings import Settings
from tests.helpers import EngineWithNeededHooks, at, failing, tiny_task


def loader(*, workers: int = 2, persistent: bool = True) -> GlobalBatchLoader:
    data = InMemoryDataset(torch.randn(8, 3), torch.randn(8, 1))
    return build_loader(data, shuffle=True, batch_size=2, num_workers=workers, persistent_workers=persistent)


def engine_of(run_dir: Path, hooks: dict[str, Hook]) -> Engine:
    task = tiny_task()
    return EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.1),
        loaders=Loaders(loader(), loader(workers=1)),
        hooks=hooks,
        settings=Settings(device="cpu", max_epochs=2),
        run_dir=run_dir,
    )


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


@pytest.mark.parametrize("point", ["after_train_iter", "after_val_iter", "after_run"])
def test_they_end_with_a_run_that_fails(tmp_path: Path, point: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        engine_of(tmp_path, {"failing": failing(point)}).train()
    assert set(multiprocessing.active_children()) == before
    assert caught.traceback, "it was not the end of the traceback that ended them"


def test_a_loader_without_them_is_left_alone() -> None:
    data = torch.zeros(4, 1)
    assert keeps_workers(DataLoader(data, num_workers=1, persistent_workers=True))
    for other in (DataLoader(data, num_workers=1), loader(persistent=False), loader(workers=0), [1, 2], None):
        assert not keeps_workers(other)
        end_workers(other)
