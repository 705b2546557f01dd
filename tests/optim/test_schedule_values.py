"""Every option of the group `scheduler`, step by step, against its formula, with SGD and AdamW and two groups."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from hydraloop.schemas.scheduler import OPTIONS
from tests.optim.scheduled import LRS, STEPS, STEPS_PER_EPOCH, of, option, run, two_groups

Formula = Callable[[int, float], float]
"""(step from 0, the group's lr) -> the lr of that step."""
N = STEPS_PER_EPOCH


def half_cosine(share: float, high: float, low: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


def cosine(n: int, lr: float) -> float:
    # Loshchilov & Hutter 2016 (SGDR), equation 5, without restarts.
    return half_cosine(n / STEPS, lr, 0.01)


def linear(n: int, lr: float) -> float:
    # torch.optim.lr_scheduler.LinearLR, closed form.
    return lr * (0.25 + 0.75 * min(n, 20) / 20)


def multistep(n: int, lr: float) -> float:
    # torch.optim.lr_scheduler.MultiStepLR, closed form.
    return lr * 0.5 ** bisect_right([3, 7], n // N)


def poly(n: int, lr: float) -> float:
    # Chen et al. 2016 (DeepLab), section 4.1: (1 - iter / max_iter) ** power.
    return lr * (1 - n / STEPS) ** 0.9


def onecycle(n: int, lr: float) -> float:
    # Smith & Topin 2017; fastai's and torch's two cosines: up for 30 %, down to a 10,000th of the first.
    n = min(n, STEPS - 1)
    top = 0.3 * STEPS - 1
    if n <= top:
        return half_cosine(n / top, lr / 25, lr)
    return half_cosine((n - top) / (STEPS - 1 - top), lr, lr / 25 / 1e4)


def warmup_cosine(n: int, lr: float) -> float:
    # A line over 3 = 60 // 20 steps (Goyal et al. 2017), then SGDR's half cosine over the rest.
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


def plateau(n: int, lr: float) -> float:
    # The metric never changes: the first validation is the best, the fourth after it is one too many, and so on.
    return lr * 0.1 ** max(0, (n // N - 1) // 4)


CASES: list[tuple[str, dict[str, Any], Formula]] = [
    ("cosine", {"eta_min": 0.01}, cosine),
    ("linear", {"start_factor": 0.25, "end": 20}, linear),
    ("multistep", {"milestones": [3, 7], "gamma": 0.5}, multistep),
    ("onecycle", {}, onecycle),
    ("plateau", {}, plateau),
    ("poly", {}, poly),
    ("warmup_cosine", {"min_lr_ratio": 0.1}, warmup_cosine),
    ("yolox", {}, yolox(1, 3)),
    ("yolox", {"warmup_iters": 3, "num_last_epochs": 2}, yolox(3 * N, 2 * N)),
    ("yolox", {"by_epoch": False, "convert_to_iter_based": False, "warmup_iters": 7, "num_last_epochs": 9},
     yolox(7, 9)),
]  # fmt: skip


def test_every_option_is_compared() -> None:
    assert {name for name, _, _ in CASES} | {"momentum"} == set(OPTIONS)


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(("name", "changes", "formula"), CASES)
def test_an_option_follows_its_formula(
    name: str, changes: dict[str, Any], formula: Formula, kind: type[Optimizer]
) -> None:
    optimizer = two_groups(kind)
    seen = run(optimizer, [option(name, optimizer, **changes)])
    for n, lrs in enumerate(seen):
        assert lrs == pytest.approx([formula(n, lr) for lr in LRS], rel=1e-9, abs=1e-15), n


def test_warmup_cosine_is_the_chain_of_torchs_two() -> None:
    optimizer, other = two_groups(), two_groups()
    chain = [
        of("up", partial(LinearLR, start_factor=0.1), other, end=12),
        of("down", partial(CosineAnnealingLR, eta_min=0.0), other, begin=12),
    ]
    chain[0].scheduler.total_iters = 12  # type: ignore[union-attr]
    for one, two in zip(
        run(optimizer, [option("warmup_cosine", optimizer, warmup_iters=12, start_factor=0.1)]),
        run(other, chain),
        strict=True,
    ):
        assert one == pytest.approx(two, abs=1e-12)


def test_ours_multiply_with_another_schedule_as_torchs_do() -> None:
    optimizer, alone = two_groups(), two_groups()
    both = [option("yolox", optimizer), option("multistep", optimizer, milestones=[4], gamma=0.5)]
    expected = run(alone, [option("yolox", alone)])
    for n, lrs in enumerate(run(optimizer, both)):
        assert lrs == pytest.approx([lr * (0.5 if n >= 4 * N else 1) for lr in expected[n]]), n


@pytest.mark.parametrize("name", ["warmup_cosine", "yolox"])
def test_ours_stay_at_the_lowest_value(name: str) -> None:
    optimizer = two_groups()
    schedule = option(name, optimizer, total_iters=4, by_epoch=False, convert_to_iter_based=False, min_lr_ratio=0.0)
    assert run(optimizer, [schedule], 9)[4:] == [[0.0, 0.0]] * 6


def test_onecycle_moves_the_momentum_the_other_way() -> None:
    for kind, key in ((SGD, "momentum"), (AdamW, "betas")):
        optimizer = two_groups(kind)
        seen = run(optimizer, [option("onecycle", optimizer)], key=key)
        first = [values[0] if key == "momentum" else values[0][0] for values in seen]
        top = round(0.3 * STEPS) - 1
        assert (first[0], first[top], first[-1]) == pytest.approx((0.95, 0.85, 0.95))


def test_onecycle_takes_another_highest_lr_and_holds_its_last() -> None:
    optimizer = two_groups()
    schedule = option("onecycle", optimizer, max_lr=[3.0, 5.0], total_steps=10, pct_start=0.3)
    seen = run(optimizer, [schedule])
    assert seen[2] == [3.0, 5.0]
    assert seen[9] == pytest.approx([3 / 25e4, 5 / 25e4])
    assert seen[9:] == [seen[9]] * (STEPS - 8)


def test_the_highest_lr_of_onecycle_is_not_what_a_warm_up_has_made_of_it() -> None:
    optimizer = two_groups()
    schedules = [option("linear", optimizer, end=5), option("onecycle", optimizer, begin=5)]
    assert max(lrs[0] for lrs in run(optimizer, schedules)) == pytest.approx(LRS[0], rel=1e-2)
