"""Every option in a resumed run: equal to the last bit, and along its own length where that is another."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, MultiplicativeLR, StepLR

from hydraloop.optim import Schedule
from hydraloop.optim.overlap import introduce
from tests.optim.scheduled import EPOCHS, STEPS, STEPS_PER_EPOCH, of, option, resumed, run, two_groups, values

KEYS = {SGD: ("lr", "momentum", "weight_decay"), AdamW: ("lr", "betas", "weight_decay")}
SETS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "cosine": [("cosine", {})],
    "linear": [("linear", {"end": 30})],
    "multistep": [("multistep", {"milestones": [2, 4, 9]})],
    "onecycle": [("onecycle", {})],
    "plateau": [("plateau", {"patience": 1})],
    "poly": [("poly", {})],
    "warmup_cosine": [("warmup_cosine", {"warmup_iters": 20})],
    "yolox": [("yolox", {"warmup_iters": 3, "num_last_epochs": 2})],
    "momentum": [("momentum", {"end": 30})],
    "char_lm's": [("linear", {"end": 20}), ("cosine", {})],
    "later": [("linear", {"end": 20}), ("cosine", {"begin": 20}), ("momentum", {"begin": 10, "end": 50})],
    "converted": [("multistep", {"milestones": [2, 4, 9], "convert_to_iter_based": True})],
    "two of a key": [("cosine", {"param": "weight_decay"}), ("poly", {"param": "weight_decay"})],
    "onecycle of another key": [("onecycle", {"param": "weight_decay", "begin": 10})],
    "all betas": [("linear", {"param": "betas", "end": 40})],
}


def make(name: str, optimizer: Optimizer, **length: int) -> list[Schedule]:
    return [option(option_name, optimizer, **length, **changes) for option_name, changes in SETS[name]]


@pytest.mark.parametrize("cut", [7, 10, 25])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", SETS)
def test_a_resumed_run_has_the_same_values_to_the_last_bit(name: str, kind: type[Optimizer], cut: int) -> None:
    if name == "all betas" and kind is SGD:
        pytest.skip("SGD has none")
    for key in KEYS[kind]:
        optimizer = two_groups(kind)
        whole = run(optimizer, make(name, optimizer), key=key)
        optimizer = two_groups(kind)
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut, key=key)
        again, made = resumed(optimizer, schedules, partial(make, name))
        assert run(again, made, first=cut + 1, key=key) == whole[cut:]


def test_a_cycle_of_another_key_keeps_its_own_numbers() -> None:
    def cyclic(optimizer: Optimizer) -> list[Schedule]:
        factory = partial(CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=4)
        return [of("it", factory, optimizer, param="weight_decay")]

    optimizer = two_groups()
    whole = run(optimizer, cyclic(optimizer), key="weight_decay")
    optimizer = two_groups()
    schedules = cyclic(optimizer)
    run(optimizer, schedules, 10)
    again, made = resumed(optimizer, schedules, cyclic)
    assert run(again, made, first=11, key="weight_decay") == whole[10:]


@pytest.mark.parametrize("cut", [7, 30, STEPS])
@pytest.mark.parametrize(
    "name", ["cosine", "onecycle", "poly", "warmup_cosine", "yolox", "char_lm's", "later", "converted", "linear"]
)
def test_a_longer_run_goes_on_along_its_own_schedule(name: str, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    epochs, steps = 2 * EPOCHS, 2 * STEPS
    for key in ("lr", "momentum"):
        optimizer = two_groups()
        expected = run(optimizer, make(name, optimizer, epochs=epochs), steps, key=key)
        optimizer = two_groups()
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut)
        again, made = resumed(optimizer, schedules, partial(make, name, epochs=epochs))
        for found, wanted in zip(run(again, made, steps, first=cut + 1, key=key), expected[cut:], strict=True):
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    begun = not (name == "later" and cut < 20)
    assert ("had another length" in caplog.text) == (begun and name not in ("converted", "linear"))


def test_of_another_key_too(caplog: pytest.LogCaptureFixture) -> None:
    def cosine(optimizer: Optimizer, epochs: int = EPOCHS) -> list[Schedule]:
        return [of("it", partial(CosineAnnealingLR), optimizer, param="momentum", epochs=epochs)]

    optimizer = two_groups()
    expected = run(optimizer, cosine(optimizer, 24), 2 * STEPS, key="momentum")
    optimizer = two_groups()
    schedules = cosine(optimizer)
    run(optimizer, schedules, 30)
    with caplog.at_level(logging.WARNING):
        again, made = resumed(optimizer, schedules, partial(cosine, epochs=24))
    assert "T_max=120" in caplog.text
    assert "momentum [0.76" in caplog.text
    for found, wanted in zip(run(again, made, 2 * STEPS, first=31, key="momentum"), expected[30:], strict=True):
        assert found == pytest.approx(wanted)


def test_converted_lengths_follow_the_steps_of_an_epoch() -> None:
    """A batch half as large: the milestone of epoch 4 comes after twice as many steps."""
    convert: dict[str, Any] = {"by_epoch": True, "convert_to_iter_based": True}

    def steps(optimizer: Optimizer, per_epoch: int = STEPS_PER_EPOCH) -> list[Schedule]:
        factory = partial(StepLR, step_size=4, gamma=0.5)
        return [of("it", factory, optimizer, steps_per_epoch=per_epoch, **convert)]

    optimizer = two_groups()
    schedules = steps(optimizer)
    run(optimizer, schedules, 5)
    again, made = resumed(optimizer, schedules, partial(steps, per_epoch=10))
    seen = [lrs[0] for lrs in run(again, made, 80, first=6)]
    assert [seen[n - 5] for n in (20, 39, 40, 79, 80)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_schedule_that_had_not_begun_begins_in_the_resumed_run() -> None:
    def late(optimizer: Optimizer) -> list[Schedule]:
        return [of("late", partial(CosineAnnealingLR), optimizer, param="momentum", begin=20)]

    optimizer = two_groups()
    schedules = late(optimizer)
    run(optimizer, schedules, 10)
    again, made = resumed(optimizer, schedules, late)
    assert made[0].scheduler is None
    assert values(again, "momentum") == [0.9, 0.9]
    assert run(again, made, first=11, key="momentum")[-1] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("name", ["linear", "cosine", "onecycle"])
def test_an_end_that_is_moved_takes_the_schedule_along(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped at 20, resumed at 40 with an end at 60: it goes on where it would be, not 20 steps late."""

    def ending(optimizer: Optimizer, end: int) -> list[Schedule]:
        return [option(name, optimizer, end=end)]

    optimizer = two_groups()
    expected = run(optimizer, ending(optimizer, 60))
    optimizer = two_groups()
    schedules = ending(optimizer, 20)
    run(optimizer, schedules, 40)
    again, made = resumed(optimizer, schedules, partial(ending, end=60))
    for found, wanted in zip(run(again, made, first=41), expected[40:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert "had another length" in caplog.text


def test_a_state_from_before_the_steps_were_counted_is_taken_as_it_is() -> None:
    optimizer = two_groups()
    schedule = option("cosine", optimizer)
    expected = run(optimizer, [schedule], 20)
    old = {"scheduler": schedule.state_dict()["scheduler"]}
    again = option("cosine", optimizer)
    again.load_state_dict(old)
    assert values(optimizer) == expected[-1]
    assert again.state_dict()["scheduler"] == old["scheduler"]


def plateau_and(name: str, optimizer: Optimizer, *, reverse: bool = False, **length: int) -> list[Schedule]:
    """Down to 0, and times 0.1 in each epoch but the first."""
    plateau = option("plateau", optimizer, patience=0, **length)
    made = [option(name, optimizer, **length), plateau]
    introduce(made)
    return made[::-1] if reverse else made


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["poly", "cosine", "warmup_cosine"])
def test_a_longer_run_from_a_0_keeps_what_other_schedules_did(name: str, reverse: bool) -> None:
    """The 0 hides the plateau's reductions, the one at the 0 itself included."""
    optimizer = two_groups()
    expected = run(optimizer, plateau_and(name, optimizer, epochs=6), 30)
    optimizer = two_groups()
    schedules = plateau_and(name, optimizer, reverse=reverse, epochs=3)
    assert run(optimizer, schedules, 15)[-1] == [0.0, 0.0]
    again, made = resumed(optimizer, schedules, partial(plateau_and, name, reverse=reverse, epochs=6))
    for found, wanted in zip(run(again, made, 30, first=16), expected[15:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=0)


def test_the_same_for_another_key() -> None:
    def both(optimizer: Optimizer, epochs: int) -> list[Schedule]:
        names = ("poly", "cosine")
        return [option(name, optimizer, epochs=epochs, param="weight_decay") for name in names]

    optimizer = two_groups()
    expected = run(optimizer, both(optimizer, 6), 30, key="weight_decay")
    optimizer = two_groups()
    schedules = both(optimizer, 3)
    run(optimizer, schedules, 15)
    again, made = resumed(optimizer, schedules, partial(both, epochs=6))
    for found, wanted in zip(run(again, made, 30, first=16, key="weight_decay"), expected[15:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_the_same_with_an_lr_that_is_a_tensor() -> None:
    def tensors() -> Optimizer:
        optimizer = two_groups(AdamW)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        return optimizer

    optimizer = tensors()
    schedules = plateau_and("poly", optimizer, epochs=3)
    run(optimizer, schedules, 15)
    again = tensors()
    made = plateau_and("poly", again, epochs=6)
    again.load_state_dict(optimizer.state_dict())
    for schedule, other in zip(made, schedules, strict=True):
        schedule.load_state_dict(other.state_dict())
    assert [float(lr) for lr in values(again)] == pytest.approx([0.5**0.9 * 0.01, 0.2 * 0.5**0.9 * 0.01])
    assert all(isinstance(lr, torch.Tensor) for lr in values(again))


def test_what_a_plateau_counts_at_a_0_ends_at_its_lowest_value() -> None:
    optimizer = two_groups()
    schedules = [option("poly", optimizer, end=3), option("plateau", optimizer, patience=0, min_lr=0.05)]
    assert run(optimizer, schedules)[-1] == [0.0, 0.0]
    assert schedules[1].state_dict()["product"] == pytest.approx([0.05, 0.25])


def test_without_another_length_a_0_stays() -> None:
    optimizer = two_groups()
    schedules = plateau_and("poly", optimizer)
    run(optimizer, schedules)
    again, _ = resumed(optimizer, schedules, partial(plateau_and, "poly"))
    assert values(again) == [0.0, 0.0]


def test_what_is_not_known_of_a_0_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def with_lambda(optimizer: Optimizer, epochs: int) -> list[Schedule]:
        restarts = of("restarts", partial(MultiplicativeLR, lr_lambda=lambda n: 0.9), optimizer, epochs=epochs)
        return [option("poly", optimizer, epochs=epochs), restarts]

    optimizer = two_groups()
    schedules = with_lambda(optimizer, 3)
    run(optimizer, schedules, 15)
    resumed(optimizer, schedules, partial(with_lambda, epochs=3))
    assert caplog.text == ""
    again, _ = resumed(optimizer, schedules, partial(with_lambda, epochs=6))
    assert "a value was 0, and what scheduler.restarts had made of it is not known" in caplog.text
    assert values(again)[0] == pytest.approx(0.5**0.9)


def test_where_another_schedule_sets_the_value_a_closed_form_of_0_divides_nothing() -> None:
    def both(optimizer: Optimizer, epochs: int) -> list[Schedule]:
        return [option(name, optimizer, epochs=epochs, end=15 if name == "cosine" else None) for name in names]

    names = ("cosine", "onecycle")
    optimizer = two_groups()
    schedules = both(optimizer, 6)
    run(optimizer, schedules, 20)

    def later(optimizer: Optimizer) -> list[Schedule]:
        return [option("cosine", optimizer, epochs=6, end=25), option("onecycle", optimizer, epochs=6)]

    again, _ = resumed(optimizer, schedules, later)
    assert values(again) == values(optimizer)


@pytest.mark.parametrize("eta_min", [0.0, 0.01])
def test_a_cosine_that_does_not_multiply_says_so(eta_min: float, caplog: pytest.LogCaptureFixture) -> None:
    def both(optimizer: Optimizer, epochs: int) -> list[Schedule]:
        linear = option("linear", optimizer, end=20, epochs=epochs)
        return [linear, option("cosine", optimizer, eta_min=eta_min, epochs=epochs)]

    optimizer = two_groups()
    schedules = both(optimizer, 6)
    run(optimizer, schedules, 10)
    resumed(optimizer, schedules, partial(both, epochs=12))
    assert caplog.text.count("its eta_min is above 0 and another schedule overlaps it") == (eta_min > 0)
