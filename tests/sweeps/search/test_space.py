"""The space of a search: from the command line to dimensions, conditions and the jobs that are validated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.sweeps.search.conditions import with_conditions
from tests.config.composed import composer
from tests.sweeps.search.played import Search
from tests.sweeps.test_planning import planned

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
FIVE = f"{LR} sweep.trials=5"


def test_numbers_choices_and_constants_are_dimensions_and_their_ends_are_validated() -> None:
    line = f"-m {LR} hooks=[],[ema] engine.max_epochs=int(interval(3,9)) optimizer.weight_decay=range(0.0,0.3,0.1) "
    with composer() as opened:
        plan, checked = planned(f"{line} data=spirals seed=0,1 sweep.trials=7", opened)
    assert plan.jobs.search is not None
    assert [str(one) for one in plan.jobs.search.space.searched] == [
        "optimizer.lr=tag(log,interval(0.0001,0.1))",
        "hooks=[],[ema]",
        "engine.max_epochs=int(interval(3,9))",
        "optimizer.weight_decay=range(0.0,0.3,0.1)",
    ]
    assert plan.jobs.count == 14
    assert {cfg.optimizer.lr for cfg in checked} == {1e-4, 1e-1}
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
    momentum = next(one for one in plan.jobs.search.space.searched if one.key == "optimizer.momentum")
    assert momentum.only == {"optimizer": ("sgd",)}
    assert ["momentum" in cfg.optimizer for cfg in checked].count(True) >= 2
    lines = plan.jobs.search.space.lines({"optimizer": "adamw", "optimizer.lr": 0.01})
    assert lines == ("optimizer=adamw", "optimizer.lr=0.01")


def test_a_key_may_depend_on_two_groups(tmp_path: Path) -> None:
    typed = ("model=cnn,mlp", "norm=batch,none,group", "norm.groups=1,2", "model.norm.rate=interval(0,1)", "a=1")
    space = Search(tmp_path, typed).space

    def has(lines: Sequence[str], key: str) -> bool:
        """The default model has no norm."""
        chosen = {"model": "mlp", "norm": "batch", **dict(line.split("=") for line in lines)}
        return key != "model.norm.rate" or (chosen["model"] == "cnn" and chosen["norm"] != "none")

    rate = next(one for one in with_conditions(space, ("model", "norm"), has).dimensions if one.only)
    assert (rate.key, rate.only) == ("model.norm.rate", {"model": ("cnn",), "norm": ("batch", "group")})


@pytest.mark.parametrize(
    ("typed", "key", "problem", "remedy"),
    [
        (LR, "optimizer.lr", "has no end", "sweep.trials=50"),
        ("sweep.trials=5", "sweep.trials", "no key has several values", "interval(1e-4,1e-1)"),
        ("optimizer.lr=interval(0,1e400) sweep.trials=5", "optimizer.lr", "is too wide", "interval(1e-4,1e-1)"),
        ("optimizer.lr=interval(1,0) sweep.trials=5", "optimizer.lr", "is empty", "smaller end first"),
        ("optimizer.lr=tag(log,interval(0,1)) sweep.trials=5", "optimizer.lr", "no logarithm", "interval(1e-4,1e-1)"),
        ("engine.max_epochs=interval(3,9) sweep.trials=5", "engine.max_epochs", "to Integer", "=int(interval(3,9))"),
        (f"{FIVE} sweep.sampler=cma", "sweep.sampler", "'cma' is unknown", "tpe"),
        (f"{LR} sweep.trials=500 sweep.sampler=gp", "sweep.sampler", "takes seconds", "sweep.trials=200"),
        (f"{FIVE} sweep.retry_failed=true", "sweep.retry_failed", "does not run failed trials", "sweep.max_retries=2"),
        (f"{FIVE} sweep.prune=median engine.val_interval=null", "sweep.prune", "not known", "val_interval=1"),
        (f"{FIVE} sweep.promote=asha sweep.rung=20", "sweep.rung", "a run has 20", "sweep.rung=1"),
        (f"{FIVE} sweep.promote=asha sweep.prune=median", "sweep.prune", "either prunes", "Leave"),
        (f"{LR} seed=0,1 sweep.trials=5 sweep.promote=asha", "sweep.promote", "single jobs", "Leave"),
        (f"{FIVE} sweep.promote=asha sweep.objectives={{a:max,b:min}}", "sweep.promote", "one objective", ""),
        (f"{FIVE} sweep.objectives={{a:up}}", "sweep.objectives.a", "neither max nor min", "max"),
        (f"{FIVE} engine.max_epochs=5,9 sweep.promote=asha", "sweep.promote", "different numbers", "length"),
        ("optimizer.lr=1e-3,1e-2 sweep.prune=median", "sweep.prune", "this sweep is a grid", "sweep.trials=50"),
        (f"{FIVE} sweep.zip=[[optimizer.lr,seed]]", "sweep.zip", "by itself", "Leave"),
        (f"{FIVE} data.val=null", "sweep.trials", "compares validations", "data.val"),
        (f"{FIVE} engine.pause_after=2", "engine.pause_after", "does not continue", "sweep.promote=asha"),
        (f"{LR} sweep.trials=0", "sweep.trials", "below 1", "null for a grid"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_before_a_job_starts(typed: str, key: str, problem: str, remedy: str) -> None:
    with composer() as opened, pytest.raises(UserError) as caught:
        planned(f"-m {typed}", opened)
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert remedy in (caught.value.remedy or "")


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
    for wrong in (10, 64, 8.5, float("inf"), float("nan"), "a"):
        with pytest.raises(UserError, match=r"is not in task\.width=range\(8,64,8\)"):
            Search(tmp_path / "b", overrides, {"enqueue": [{"task.width": wrong}]}).run()
