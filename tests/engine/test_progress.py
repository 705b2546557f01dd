"""Progress: counters that have moved when the closing mount points are called, and that survive a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.engine.engine import Engine
from tests.helpers import at, batches, make_engine


def test_counters_move_before_the_closing_points(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, int]]] = []

    def look(point: str) -> tuple[str, object]:
        return point, at(point, lambda engine: seen.append((point, engine.progress.state_dict())), nth=0)

    points = ["before_train_iter", "before_optimizer_step", "after_train_iter", "after_train_epoch", "after_val_epoch"]
    hooks = dict(look(point) for point in points)
    make_engine(tmp_path, hooks, train=batches(3, last=1), val=batches(1), accumulate=2).train()  # type: ignore[arg-type]

    def counters(
        epoch: int, iteration: int, step: int, samples: int, batch: int, validation: int = 0
    ) -> dict[str, int]:
        return {
            "epoch": epoch,
            "iteration": iteration,
            "optimizer_step": step,
            "samples": samples,
            "batch_in_epoch": batch,
            "last_validation": validation,
        }

    assert seen == [
        ("before_train_iter", counters(0, 0, 0, 0, 0)),
        ("after_train_iter", counters(0, 1, 0, 4, 1)),
        ("before_train_iter", counters(0, 1, 0, 4, 1)),
        ("before_optimizer_step", counters(0, 1, 0, 4, 1)),
        ("after_train_iter", counters(0, 2, 1, 8, 2)),
        ("before_train_iter", counters(0, 2, 1, 8, 2)),
        ("before_optimizer_step", counters(0, 2, 1, 8, 2)),
        ("after_train_iter", counters(0, 3, 2, 9, 3)),
        ("after_train_epoch", counters(1, 3, 2, 9, 0)),
        ("after_val_epoch", counters(1, 3, 2, 9, 0, 3)),
    ]


@pytest.mark.parametrize(
    ("settings", "horizon"),
    [
        ({"max_epochs": 3}, (12, 3)),
        ({"max_iters": 8, "max_epochs": 50}, (8, 2)),
        ({"max_iters": 9}, (9, 3)),
        ({"max_iters": 1}, (1, 1)),
    ],
)
def test_the_whole_run_is_known_in_iterations_and_epochs(
    tmp_path: Path, settings: dict[str, int], horizon: tuple[int, int]
) -> None:
    engine: Engine = make_engine(tmp_path, train=batches(4), **settings)
    assert (engine.max_iters, engine.max_epochs) == horizon
    engine.train()
    assert engine.progress.iteration == horizon[0]
