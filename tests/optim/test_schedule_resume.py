"""Schedules of a resumed run: equal to the last bit, and in a longer run equal to a run that had this length."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as torchs

from hydraloop.engine.checkpoint.format import peek
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.optim import build_schedules
from tests.helpers import at, batches, make_engine
from tests.optim.scheduled import EPOCHS, STEPS, apply, of, option, resumed, run, two_groups, values

KEYS = {SGD: ("lr", "momentum", "weight_decay"), AdamW: ("lr", "betas", "weight_decay")}
LOSSES = [1.0, 1.0, 0.5, 0.6, 0.4, 0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.2, *[0.2] * 12]
SETS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "constant": [("constant", {"end": 30})],
    "cosine": [("cosine", {"eta_min": 0.01})],
    "exponential": [("exponential", {})],
    "linear": [("linear", {"end": 30})],
    "multistep": [("multistep", {"milestones": [2, 4, 9]})],
    "plateau": [("plateau", {"patience": 1, "min_lr": 0.005, "mode": "min"})],
    "poly": [("poly", {})],
    "warmup_cosine": [("warmup_cosine", {"warmup": 20})],
    "yolox": [("yolox", {"warmup": 3, "num_last_epochs": 2})],
    "momentum": [("momentum", {"end": 30})],
    "char_lm's": [("linear", {"end": 20}), ("cosine", {"eta_min": 0.01})],
    "later": [("linear", {"end": 20}), ("cosine", {"begin": 20}), ("momentum", {"begin": 10, "end": 50})],
    "converted": [("multistep", {"milestones": [2, 4, 9], "convert_to_iter_based": True})],
    "two of a key": [("cosine", {"param": "weight_decay"}), ("poly", {"param": "weight_decay"})],
    "with a plateau": [("poly", {}), ("plateau", {"patience": 0, "mode": "min"})],
}


def make(name: str, optimizer: Optimizer, **length: int) -> list[Any]:
    return [option(option_name, optimizer, **length, **changes) for option_name, changes in SETS[name]]


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", SETS)
def test_a_resumed_run_has_the_same_values_to_the_last_bit(name: str, kind: type[Optimizer]) -> None:
    keys = KEYS[kind]
    optimizer = two_groups(kind)
    whole = run(optimizer, make(name, optimizer), key=keys, losses=LOSSES)
    for cut in (7, 10, 25):
        optimizer = two_groups(kind)
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut, losses=LOSSES)
        again, made = resumed(optimizer, schedules, partial(make, name))
        assert run(again, made, first=cut + 1, key=keys, losses=LOSSES) == whole[cut:]


@pytest.mark.parametrize("name", SETS)
def test_a_longer_run_has_its_own_schedules(name: str) -> None:
    epochs, steps = 2 * EPOCHS, 2 * STEPS
    optimizer = two_groups()
    expected = run(optimizer, make(name, optimizer, epochs=epochs), steps, key=KEYS[SGD], losses=LOSSES)
    for cut in (7, 30, STEPS):
        optimizer = two_groups()
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut, losses=LOSSES)
        again, made = resumed(optimizer, schedules, partial(make, name, epochs=epochs))
        assert run(again, made, steps, first=cut + 1, key=KEYS[SGD], losses=LOSSES) == expected[cut:]


def test_a_typed_value_acts_as_if_the_run_had_begun_with_it() -> None:
    """For a plateau with a lowest value too."""

    def both(optimizer: Optimizer) -> list[Any]:
        return make("plateau", optimizer)

    other = two_groups()
    other.param_groups[0]["lr"] = 0.06
    expected = run(other, both(other), losses=LOSSES)
    optimizer = two_groups()
    schedules = both(optimizer)
    run(optimizer, schedules, 35, losses=LOSSES)
    again, made = resumed(optimizer, schedules, both)
    again.param_groups[0]["initial_lr"] = 0.06  # as the engine does
    assert run(again, made, first=36, losses=LOSSES) == expected[35:]


def test_an_lr_that_is_a_tensor() -> None:
    optimizer = two_groups(AdamW)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    held = values(optimizer)
    apply(optimizer, make("poly", optimizer), 30)
    assert [float(lr) for lr in held] == pytest.approx([lr * (29 / 59) ** 0.9 for lr in (1.0, 0.2)])
    assert all(new is old for new, old in zip(values(optimizer), held, strict=True))
    assert isinstance(optimizer.param_groups[0]["initial_lr"], float)


# The length of a resumed run. ----------------------------------------------------------------------------------------

BATCHES = 10


def end(**settings: Any) -> int:
    """The step at which a cosine ends that acts until the end of the run."""
    cfg = OmegaConf.create({"scheduler": {"cosine": {"_target_": "hydraloop.optim.Cosine"}}})
    position = peek(settings["resume"], key="resume") if "resume" in settings else None
    made: Any = build_schedules(cfg, two_groups(), Settings(**settings), Loaders(batches(BATCHES)), position)
    return int(made["cosine"].end)


def checkpoint_at(run_dir: Path, iteration: int, **settings: Any) -> Path:
    """The checkpoint that a run requests in an iteration; it is written when the accumulation window closes."""
    save = at("after_train_iter", lambda engine: engine.request_checkpoint("a"), nth=iteration)
    make_engine(run_dir, {"save": save}, train=batches(BATCHES), **settings).train()
    return run_dir / "checkpoints" / "a.pth"


@pytest.mark.parametrize(
    ("length", "accumulate", "iteration"),
    [
        ({"max_epochs": 4}, 1, 20),
        ({"max_epochs": 4}, 3, 2),
        ({"max_epochs": 4}, 4, 20),
        ({"max_iters": 34}, 3, 20),
        ({"max_iters": 34}, 4, 6),
        ({"max_iters": 7}, 3, 2),
        ({"max_iters": 7}, 4, 7),
    ],
)
def test_unchanged_options_do_not_change_the_length(
    tmp_path: Path, length: dict[str, int], accumulate: int, iteration: int
) -> None:
    options = {"accumulate": accumulate, **length}
    path = checkpoint_at(tmp_path, iteration, **options)
    assert end(resume=path, **options) == end(**options)


@pytest.mark.parametrize(
    ("length", "longer", "before", "after", "iteration"),
    [
        ({"max_epochs": 2}, {"max_epochs": 4}, 1, 5, 4),
        ({"max_epochs": 2}, {"max_epochs": 4}, 2, 3, 14),
        ({"max_iters": 14}, {"max_iters": 37}, 5, 1, 10),
        ({"max_iters": 14}, {"max_iters": 37}, 2, 3, 14),
        ({"max_epochs": 2}, {"max_iters": 37}, 2, 3, 4),
        ({"max_iters": 14}, {"max_epochs": 4}, 1, 5, 14),
    ],
)
def test_schedules_end_with_the_last_step(
    tmp_path: Path, length: dict[str, int], longer: dict[str, int], before: int, after: int, iteration: int
) -> None:
    """With another length, and with another `engine.accumulate`: also if that run is resumed once more."""
    path = checkpoint_at(tmp_path, iteration, accumulate=before, **length)
    changed = {"accumulate": after, **longer}
    expected = end(resume=path, **changed)
    again = checkpoint_at(tmp_path, 3, resume=path, **changed)
    assert end(resume=again, **changed) == expected
    last = make_engine(tmp_path, train=batches(BATCHES), resume=again, **changed)
    last.train()
    assert last.progress.optimizer_step == expected


@pytest.mark.parametrize("skipped", [2, 3], ids=["2 iterations", "2 iterations, 3 steps of two optimizers"])
def test_a_skipped_step_does_not_change_the_length(skipped: int, tmp_path: Path) -> None:
    path = checkpoint_at(tmp_path, 20, max_epochs=4)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["progress"]["optimizer_step"] -= 2
    checkpoint["precision"] = {"scale": 1024.0, "good_steps": 3, "skipped": skipped}
    torch.save(checkpoint, path)
    assert end(resume=path, max_epochs=4) == end(max_epochs=4)


# The state of another schedule. --------------------------------------------------------------------------------------

STEP_LR = partial(torchs.StepLR, step_size=7)


@pytest.mark.parametrize("saved", ["cosine", "plateau", "step_lr", "lambda_lr"])
@pytest.mark.parametrize("used", ["plateau", "step_lr", "lambda_lr"])
def test_the_state_of_another_kind_is_refused(saved: str, used: str) -> None:
    def made(name: str) -> Any:
        factory = {"step_lr": STEP_LR, "lambda_lr": partial(torchs.LambdaLR, lr_lambda=lambda step: 1.0)}.get(name)
        return option(name, two_groups()) if factory is None else of(name, factory, two_groups())

    state = made(saved).state_dict()
    made("cosine").load_state_dict(state)  # it has no counts to continue
    if used == saved:
        made(used).load_state_dict(state)
        return
    with pytest.raises(UserError, match="another kind of schedule") as caught:
        made(used).load_state_dict(state)
    assert caught.value.key == f"scheduler.{used}"
    assert "resume_strict=false scheduler=[]" in str(caught.value.remedy)
    assert "load_from" in str(caught.value.remedy)
