"""Progress: counters that move before the closing mount points; and the one rule of intervals, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.engine import Engine
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
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


@pytest.mark.parametrize(
    ("interval", "begin", "fires"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2, 0, [2, 4, 6, 8, 10]),
        (2, 1, [2, 4, 6, 8, 10]),  # begin 1 is begin 0: "from the start"
        (3, 0, [3, 6, 9]),
        (2, 5, [5, 7, 9]),  # MMEngine's example of save_begin
        (1, 4, [4, 5, 6, 7, 8, 9, 10]),
        (5, 10, [10]),
        (11, 0, []),
        (None, 0, []),
    ],
)
def test_when_it_fires_in_the_first_ten(interval: int | None, begin: int, fires: list[int]) -> None:
    assert [n for n in range(1, 11) if Every(interval, begin).fires_at(n)] == fires


def test_it_never_fires_before_the_first() -> None:
    assert not Every(1).fires_at(0)
    assert not Every(1, 1).fires_at(0)
    assert not Every(2, 0).fires_at(-2)


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(UserError, match="below 1") as caught:
        Every(interval)
    assert "null for never" in str(caught.value)


@pytest.mark.parametrize("arguments", [(2.5,), (2.0,), ("2",), (2, 1.5)])
def test_what_is_no_whole_number_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="is not a whole number"):
        Every(*arguments)


def test_a_negative_begin_is_refused() -> None:
    with pytest.raises(UserError, match="-3 is negative"):
        Every(2, -3)


@pytest.mark.parametrize("interval", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("begin", [0, 1, 2, 5])
def test_the_times_until_n_count_each_time_that_it_fires(interval: int | None, begin: int) -> None:
    every = Every(interval, begin)
    for n in range(20):
        assert every.times_until(n) == sum(every.fires_at(one) for one in range(1, n + 1))
