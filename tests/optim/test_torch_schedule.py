"""A scheduler of torch or another package by `_target_`: only for the lr, and only as the only schedule."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import hydraloop
from hydraloop import build
from hydraloop.errors import UserError
from hydraloop.optim import TorchSchedule
from tests.config.composed import REPOSITORY
from tests.optim.scheduled import EPOCHS, STEPS, of, resumed, run, two_groups, values


def warm_up(optimizer: Optimizer, num_warmup_steps: int) -> torchs.LambdaLR:
    """Like the functions of transformers."""
    return torchs.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / num_warmup_steps))


def torchs_values(factory: Any, steps: int) -> list[list[Any]]:
    optimizer = two_groups()
    scheduler = factory(optimizer)
    seen = [values(optimizer)]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append(values(optimizer))
    return seen


@pytest.mark.parametrize(
    ("given", "full"),
    [
        (partial(torchs.CosineAnnealingLR), partial(torchs.CosineAnnealingLR, T_max=STEPS)),
        (partial(torchs.CosineAnnealingLR, T_max=None), partial(torchs.CosineAnnealingLR, T_max=STEPS)),
        (partial(torchs.PolynomialLR, total_iters=None), partial(torchs.PolynomialLR, total_iters=STEPS)),
        (partial(partial(torchs.StepLR, step_size=3), gamma=0.5), partial(torchs.StepLR, step_size=3, gamma=0.5)),
        (
            partial(torchs.OneCycleLR, max_lr=2.0, total_steps=None),
            partial(torchs.OneCycleLR, max_lr=2.0, total_steps=STEPS),
        ),
        (partial(warm_up, num_warmup_steps=9), partial(warm_up, num_warmup_steps=9)),
    ],
)
def test_its_values_are_torchs(given: Any, full: Any) -> None:
    optimizer = two_groups()
    assert run(optimizer, [of("it", given, optimizer)]) == torchs_values(full, STEPS)


def test_by_epoch_it_steps_once_an_epoch() -> None:
    optimizer = two_groups()
    seen = run(optimizer, [of("it", partial(torchs.CosineAnnealingLR), optimizer, by_epoch=True)])
    assert seen[::5] == torchs_values(partial(torchs.CosineAnnealingLR, T_max=EPOCHS), EPOCHS)


def test_a_plateau_steps_with_its_metric() -> None:
    optimizer = two_groups()
    factory = partial(torchs.ReduceLROnPlateau, patience=0, factor=0.5)
    schedule = of("it", factory, optimizer, monitor="loss")
    assert schedule.mode == "min"
    assert run(optimizer, [schedule], 15, losses=[1.0, 2.0, 3.0])[-1][0] == 0.25


@pytest.mark.parametrize("cut", [0, 7, 30])
@pytest.mark.parametrize(
    "factory",
    [partial(torchs.CosineAnnealingLR), partial(warm_up, num_warmup_steps=9), partial(torchs.StepLR, step_size=7)],
)
def test_it_resumes_to_the_last_bit(factory: Any, cut: int) -> None:
    optimizer = two_groups()
    whole = run(optimizer, [of("it", factory, optimizer)])
    optimizer = two_groups()
    schedules = [of("it", factory, optimizer)]
    run(optimizer, schedules, cut)
    again, made = resumed(optimizer, schedules, lambda fresh: [of("it", factory, fresh)])
    assert run(again, made, first=cut + 1) == whole[cut:]


def test_without_the_optimizers_state_the_lr_is_that_of_the_scheduler() -> None:
    optimizer, fresh = two_groups(), two_groups()
    schedule, made = (of("it", partial(torchs.StepLR, step_size=7), one) for one in (optimizer, fresh))
    run(optimizer, [schedule], 20)
    made.load_state_dict(schedule.state_dict())
    assert values(fresh) == values(optimizer)


def test_another_lr_is_refused() -> None:
    optimizer = two_groups()
    schedule = of("it", partial(torchs.StepLR, step_size=7), optimizer)
    state = schedule.state_dict()
    optimizer.param_groups[0]["initial_lr"] = 5.0
    with pytest.raises(UserError, match=r"base_lrs=\[1.0, 0.2\], this run \[5.0, 0.2\]") as caught:
        schedule.load_state_dict(state)
    assert caught.value.key == "scheduler.it"


def test_another_length_is_refused() -> None:
    optimizer = two_groups()
    schedule = of("it", partial(torchs.CosineAnnealingLR), optimizer)
    longer = of("it", partial(torchs.CosineAnnealingLR), two_groups(), epochs=24)
    with pytest.raises(UserError, match="the checkpoint has T_max=60, this run 120") as caught:
        longer.load_state_dict(schedule.state_dict())
    assert caught.value.key == "scheduler.it"


@pytest.mark.parametrize(
    "factory",
    [partial(torchs.OneCycleLR, max_lr=1.0, total_steps=9), partial(torchs.CyclicLR, base_lr=0.1, max_lr=1.0)],
)
def test_its_state_is_saved_without_pickle(factory: Any) -> None:
    optimizer = two_groups()
    schedule = of("it", factory, optimizer)
    run(optimizer, [schedule], 3)
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize(
    "ours",
    [{"param": "momentum"}, {"begin": 3}, {"end": 3}, {"by_epoch": True, "convert_to_iter_based": True}],
)
def test_other_uses_are_refused(ours: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be the only schedule of its optimizer, and changes the lr") as caught:
        of("mine", partial(torchs.StepLR, step_size=3), two_groups(), **ours)
    assert caught.value.key == "scheduler.mine"
    assert "hydraloop.optim.MultiStep" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("factory", "ours", "key"),
    [
        (partial(torchs.StepLR, step_size=3), {"monitor": "loss"}, "scheduler.mine.monitor"),
        (partial(torchs.ReduceLROnPlateau), {}, "scheduler.mine.monitor"),
        (torchs.StepLR, {}, "scheduler.mine"),
    ],
)
def test_a_mistake_names_its_key(factory: Any, ours: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        of("mine", factory, two_groups(), **ours)
    assert caught.value.key == key


def test_the_remedy_of_a_missing_argument_works(tmp_path: Path) -> None:
    lines = ["engine.device=cpu", "default_hooks=[]", "scheduler=[]", MINE.replace(",step_size:2", "")]
    with pytest.raises(UserError) as caught:
        build(hydraloop.compose(lines, folder=REPOSITORY), run_dir=tmp_path)
    remedy = str(caught.value.remedy)
    assert remedy == "Give it the argument: +scheduler.mine.NAME=…"
    lines.append(remedy.rpartition(" ")[2].replace("NAME=…", "step_size=2"))
    assert build(hydraloop.compose(lines, folder=REPOSITORY), run_dir=tmp_path / "again").run.schedules.keys() == {
        "mine"
    }


MINE = "+scheduler.mine={_target_:torch.optim.lr_scheduler.StepLR,_partial_:true,step_size:2}"


def test_it_is_built_from_the_config(tmp_path: Path) -> None:
    lines = ["engine.device=cpu", "default_hooks=[param_scheduler]", "engine.max_epochs=1"]
    cfg = hydraloop.compose([*lines, "scheduler=[]", MINE], folder=REPOSITORY)
    schedule: Any = build(cfg, run_dir=tmp_path).run.schedules["mine"]
    assert isinstance(schedule, TorchSchedule)
    assert schedule.scheduler.step_size == 2
    cfg = hydraloop.compose([*lines, "scheduler=[cosine]", MINE], folder=REPOSITORY)
    with pytest.raises(UserError, match="another schedule is not possible with a scheduler of torch"):
        build(cfg, run_dir=tmp_path / "other")
