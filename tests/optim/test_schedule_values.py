"""Schedules that MMEngine does not have, compared with their formulas, and how several act together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer

from hydraloop.optim import Constant, Cosine, Exponential, Function
from hydraloop.schemas.scheduler import OPTIONS
from tests.optim.scheduled import LRS, STEPS, STEPS_PER_EPOCH, of, option, run, two_groups

Formula = Callable[[int, float], float]
"""(step from 0, the group's lr) -> the lr of that step."""
N = STEPS_PER_EPOCH


def half_cosine(share: float, high: float, low: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


def warmup_cosine(n: int, lr: float) -> float:
    # A line over 3 = 60 // 20 steps (Goyal et al. 2017), then SGDR's half cosine over the rest.
    n = min(n, STEPS - 1)
    if n < 3:
        return lr * (0.01 + 0.99 * n / 3)
    return half_cosine((n - 3) / (STEPS - 3), lr, 0.1 * lr)


def yolox(warm_up: int, last: int) -> Formula:
    """MMDetection 2.28, mmdet/core/hook/yolox_lrupdater_hook.py, with warmup_ratio 1 and min_lr_ratio 0.05.

    `k = self.warmup_ratio * pow((cur_iters + 1) / float(self.warmup_iters), 2)`, then, with `progress += 1`,
    `target_lr if progress >= max_progress - last_iter else annealing_cos(base_lr, target_lr,
    (progress - self.warmup_iters) / (max_progress - self.warmup_iters - last_iter))`.
    """

    def lr_of(n: int, lr: float) -> float:
        if n < warm_up:
            return lr * ((n + 1) / warm_up) ** 2
        progress = n + 1
        if progress >= STEPS - last:
            return lr * 0.05
        return half_cosine((progress - warm_up) / (STEPS - warm_up - last), lr, lr * 0.05)

    return lr_of


CASES: list[tuple[str, dict[str, Any], Formula]] = [
    ("warmup_cosine", {"min_lr_ratio": 0.1}, warmup_cosine),
    ("yolox", {}, yolox(1, 3)),
    ("yolox", {"warmup": 3, "num_last_epochs": 2}, yolox(3 * N, 2 * N)),
    ("yolox", {"by_epoch": False, "convert_to_iter_based": False, "warmup": 7, "num_last_epochs": 9},
     yolox(7, 9)),
]  # fmt: skip
MMENGINES = {
    "constant",
    "cosine",
    "exponential",
    "linear",
    "multistep",
    "poly",
    "plateau",
}
"""The schedules that MMEngine has too: test_mmengine_values.py compares them."""


def test_every_option_is_compared() -> None:
    assert {name for name, _, _ in CASES} | MMENGINES | {"momentum"} == set(OPTIONS)


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(("name", "changes", "formula"), CASES)
def test_an_option_follows_its_formula(
    name: str, changes: dict[str, Any], formula: Formula, kind: type[Optimizer]
) -> None:
    optimizer = two_groups(kind)
    seen = run(optimizer, [option(name, optimizer, **changes)])
    for n, lrs in enumerate(seen):
        assert lrs == pytest.approx([formula(n, lr) for lr in LRS], rel=1e-9, abs=1e-15), n


@pytest.mark.parametrize("reverse", [False, True])
def test_schedules_are_applied_in_the_order_of_begin_then_of_the_config(reverse: bool) -> None:
    optimizer = two_groups()
    pair = [of("down", Cosine(eta_min=0.5), optimizer, begin=10), of("half", Constant(0.5), optimizer)]
    assert run(optimizer, pair[::-1] if reverse else pair)[20][0] == pytest.approx(0.5)  # from 0.5 to eta_min 0.5
    optimizer = two_groups()
    pair = [of("half", Constant(0.5), optimizer), of("down", Cosine(eta_min=0.5), optimizer)]
    found = run(optimizer, pair[::-1] if reverse else pair)[30][0]
    assert found == pytest.approx(0.75 * 0.5 if reverse else 0.5)


def test_a_custom_function_is_a_schedule() -> None:
    class Sawtooth(Function):
        def value(self, k: int, length: int, value: float, initial: float) -> float:
            return value * (1 - k % 4 / 4)

    optimizer = two_groups()
    assert [lrs[0] for lrs in run(optimizer, [of("saw", Sawtooth(), optimizer, begin=2)], 8)] == [
        1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 1.0, 0.75, 0.5,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["warmup_cosine", "yolox"])
def test_ours_stay_at_the_lowest_value(name: str) -> None:
    optimizer = two_groups()
    schedule = option(name, optimizer, total_iters=4, by_epoch=False, convert_to_iter_based=False, min_lr_ratio=0.0)
    assert run(optimizer, [schedule], 9)[4:] == [[0.0, 0.0]] * 6


def test_nothing_happens_before_begin_and_after_end() -> None:
    optimizer = two_groups()
    schedule = of("it", Exponential(0.5), optimizer, begin=4, end=7)
    assert [lrs[0] for lrs in run(optimizer, [schedule])] == [1.0] * 5 + [0.5] + [0.25] * (STEPS - 5)


def test_a_begin_after_the_end_of_a_short_run_never_begins() -> None:
    optimizer = two_groups()
    assert run(optimizer, [of("late", Cosine(), optimizer, begin=STEPS + 5)]) == [list(LRS)] * (STEPS + 1)


@pytest.mark.parametrize(
    ("mode", "losses", "expected"),
    [
        ("min", [1.0, 0.9, 0.95, 0.95, 0.8, 0.8, 0.8], [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]),
        ("max", [1.0, 1.1, 1.05, 1.05, 1.2, 1.2, 1.2], [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]),
        ("min", [float("nan"), 1.0, 0.5, 0.4, 0.3, 0.2, 0.1], [1.0] * 7),
    ],
)
def test_a_plateau_follows_its_metric(mode: str, losses: list[float], expected: list[float]) -> None:
    optimizer = two_groups()
    schedule = option("plateau", optimizer, mode=mode, patience=1, factor=0.5)
    seen = run(optimizer, [schedule], 7 * N, losses=losses)
    assert [lrs[0] for lrs in seen[N::N]] == expected


def test_a_plateau_looks_at_its_metric_from_begin_to_end() -> None:
    optimizer = two_groups()
    schedule = option("plateau", optimizer, mode="min", patience=1, factor=0.5, begin=3, end=7)
    assert [lrs[0] for lrs in run(optimizer, [schedule])[N::N]] == [1.0] * 4 + [0.5] * 8
