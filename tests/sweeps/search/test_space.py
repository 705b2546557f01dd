"""The space of a search: from the command line to dimensions, conditions and the jobs that are validated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError
from hydraloop.sweeps.axes import Dimension, Space
from hydraloop.sweeps.compose_jobs import GridComposer
from hydraloop.sweeps.search import with_conditions
from tests.config.composed import composer
from tests.sweeps.search.played import Search
from tests.sweeps.test_check_sweep import planned

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
FIVE = f"{LR} sweep.trials=5"


def test_numbers_choices_and_constants_are_dimensions_and_their_ends_are_validated() -> None:
    line = f"-m {LR} hooks=[],[ema] engine.max_epochs=int(interval(3,9)) optimizer.weight_decay=range(0.0,0.3,0.1) "
    with composer() as opened:
        plan, checked = planned(f"{line} data=spirals seed=0,1 sweep.trials=7 sweep.objectives={{loss:min}}", opened)
    assert plan.jobs.search is not None
    numbers = Dimension("optimizer.lr", "optimizer.lr", (), 1e-4, 0.1, is_log=True)
    assert plan.jobs.search.space == Space(
        (
            numbers,
            Dimension("hooks", "hooks", ("[]", "[ema]")),
            Dimension("engine.max_epochs", "engine.max_epochs", (), 3, 9, is_int=True),
            Dimension("optimizer.weight_decay", "optimizer.weight_decay", (), 0.0, 0.2, 0.1),
        ),
        ("data=spirals",),
        ("seed=0", "seed=1"),
    )
    assert plan.jobs.count == 14
    assert {cfg.optimizer.lr for cfg in checked} == {1e-4, 1e-1}
    assert all(cfg.sweep.objectives == {"loss": "min"} for cfg in checked), "a job checks that its task has them"
    assert {cfg.engine.max_epochs for cfg in checked} == {3, 9}
    assert {"ema" in cfg.hooks for cfg in checked} == {True, False}
    assert {cfg.data.train._target_ for cfg in checked} == {checked[0].data.train._target_}
    assert len(checked) < 12


def test_a_key_that_only_one_option_of_a_group_has_is_only_sampled_with_it() -> None:
    with composer() as opened:
        plan, checked = planned(
            f"-m optimizer=adamw,sgd optimizer.momentum=interval(0.5,0.99) {LR} sweep.trials=9", opened
        )
    assert plan.jobs.search is not None
    momentum = next(one for one in plan.jobs.search.space.dimensions if one.key == "optimizer.momentum")
    assert momentum.only == {"optimizer": ("sgd",)}
    assert ["momentum" in cfg.optimizer for cfg in checked].count(True) >= 2
    lines = plan.jobs.search.space.lines({"optimizer": "adamw", "optimizer.lr": 0.01})
    assert lines == ("optimizer=adamw", "optimizer.lr=0.01")


def test_a_key_may_depend_on_two_groups(tmp_path: Path) -> None:
    typed = ("model=cnn,mlp", "norm=batch,none,group", "norm.groups=1,2", "model.norm.rate=interval(0,1)", "a=1")
    space = Search(tmp_path, typed).space

    class Grid:
        """The default model has no norm."""

        def choices(self, lines: Sequence[str]) -> Sequence[str]:
            return [line for line in lines if line.startswith(("model=", "norm="))]

        def compose(self, lines: Sequence[str]) -> DictConfig:
            chosen = {"model": "mlp", "norm": "batch", **dict(line.split("=") for line in lines)}
            has_rate = chosen["model"] == "cnn" and chosen["norm"] != "none"
            return OmegaConf.create({"model": {"norm": {"rate": 0} if has_rate else {}}, "norm": {"groups": 1}})

    rate = next(one for one in with_conditions(space, cast(GridComposer, Grid())).dimensions if one.only)
    assert (rate.key, rate.only) == ("model.norm.rate", {"model": ("cnn",), "norm": ("batch", "group")})


@pytest.mark.parametrize(
    ("typed", "key", "problem", "remedy"),
    [
        (LR, "optimizer.lr", "has no end", "sweep.trials=50"),
        ("sweep.trials=5", "sweep.trials", "no key has several values", "interval(1e-4,1e-1)"),
        ("optimizer.lr=interval(1,0) sweep.trials=5", "optimizer.lr", "low <= high", "smaller end first"),
        ("optimizer.lr=tag(log,interval(0,1)) sweep.trials=5", "optimizer.lr", "low > 0", "interval(1e-4,1e-1)"),
        (f"{LR} seed=interval(0,3) sweep.trials=5", "seed", "has no end", "list its values"),
        ("engine.max_epochs=interval(3,9) sweep.trials=5", "engine.max_epochs", "to Integer", ""),
        (f"{FIVE} sweep.sampler=cma", "sweep.sampler", "'cma' is not a sampler", "tpe"),
        (f"{FIVE} sweep.retry_failed=true", "sweep.retry_failed", "no such option", "Leave"),
        (f"{FIVE} engine.max_epochs=5,9 sweep.prune=median", "sweep.prune", "differ between jobs", "Leave"),
        (f"{FIVE} sweep.prune=median engine.max_epochs=1", "sweep.prune_after", "a run has 1", "leave sweep.prune"),
        (f"{FIVE} sweep.prune=median sweep.prune_after=0", "sweep.prune_after", "below 1", "null for a quarter"),
        (f"{FIVE} sweep.promote=asha sweep.prune=median", "sweep.prune", "no other way", "Leave"),
        (f"{LR} seed=0,1 sweep.trials=5 sweep.promote=asha", "sweep.promote", "trials of one job", "Leave"),
        (f"{FIVE} sweep.promote=asha sweep.objectives={{a:max,b:min}}", "sweep.promote", "single objective", ""),
        (f"{FIVE} sweep.objectives={{a:up}}", "sweep.objectives.a", "neither max nor min", "max"),
        ("optimizer.lr=1e-3,1e-2 sweep.prune=median", "sweep.prune", "a grid has no such option", "sweep.trials=50"),
        (f"{FIVE} sweep.zip=[[optimizer.lr,seed]]", "sweep.zip", "no such option", "Leave"),
        (f"{FIVE} data.val=null", "sweep.trials", "compares validations", "data.val"),
        (f"{FIVE} engine.pause_after=2", "engine.pause_after", "does not continue", "Leave"),
        (f"{FIVE} sweep.enqueue=[{{optimizer.lr:1.0}}]", "sweep.enqueue", "is not a trial", "are searched"),
        (f"{LR} sweep.trials=0", "sweep.trials", "below 1", "null for a grid"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_before_a_job_starts(typed: str, key: str, problem: str, remedy: str) -> None:
    with composer() as opened, pytest.raises(UserError) as caught:
        planned(f"-m {typed}", opened)
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("typed", "validations", "prune_after"),
    [
        ("engine.max_epochs=21", 21, 5),
        ("engine.max_epochs=3", 3, 1),
        ("engine.max_epochs=21 sweep.prune_after=9", 21, 9),
        ("engine.max_epochs=10 engine.val_interval=2 engine.val_begin=5", 4, 1),  # after epochs 5, 7, 9 and 10
        ("engine.max_epochs=10 engine.val_interval=4", 3, 1),
        ("engine.max_iters=1000 engine.val_by_epoch=false engine.val_interval=100", 10, 2),
    ],
)
def test_a_quarter_of_the_planned_validations_ends_no_job(typed: str, validations: int, prune_after: int) -> None:
    with composer() as opened:
        draft, _ = planned(f"-m {FIVE} sweep.prune=median {typed}", opened)
    assert draft.jobs.search is not None
    assert (draft.jobs.search.validations, draft.jobs.search.prune_after) == (validations, prune_after)


def test_a_trial_sets_and_deletes_what_was_typed() -> None:
    with composer() as opened:
        plan, checked = planned(
            f"-m {LR} ~default_hooks.timer optimizer.weight_decay=shuffle(range(0,9)) sweep.trials=5", opened
        )
    assert plan.jobs.search is not None
    assert "~default_hooks.timer" in plan.jobs.search.space.lines({})
    assert all("timer" not in cfg.default_hooks for cfg in checked)
    assert {0, 8} <= {cfg.optimizer.weight_decay for cfg in checked}


def test_enqueued_values_are_those_of_yaml_and_must_be_in_the_space(tmp_path: Path) -> None:
    overrides = (LR, "task.x=true,null,'a b',[1, 2]", "task.width=range(8,64,8)")
    given = [{"task.x": None}, {"task.x": "a b"}, {"task.x": True}, {"task.x": [1, 2]}, {"task.width": 56.0}]
    search = Search(tmp_path / "a", overrides, {"trials": 5, "enqueue": given})
    search.run()
    trials = search.history().trials
    assert [trial.params["task.x"] for trial in trials[:4]] == ["null", "'a b'", "True", "[1,2]"]
    assert trials[4].params["task.width"] == 56
    for wrong in (
        {"task.width": 8.5},
        {"task.width": float("nan")},
        {"task.width": "a"},
        {"task.y": 8},
        "task.width=8",
    ):
        with pytest.raises(UserError, match="is not a trial of this search"):
            Search(tmp_path / "b", overrides, {"enqueue": [wrong]}).run()


def test_a_file_has_the_space_and_the_command_line_changes_it() -> None:
    with composer() as opened:
        draft, checked = planned("-m experiment=lr_search optimizer=adamw,sgd sweep.trials=7", opened)
    assert draft.jobs.search is not None
    assert (draft.jobs.search.trials, draft.jobs.search.sampler) == (7, "tpe")
    assert draft.jobs.swept == ("optimizer.lr", "optimizer")
    assert {cfg.optimizer.lr for cfg in checked} == {1e-4, 1e-1}
