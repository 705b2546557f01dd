from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.errors import UserError
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.axes import jobs_of
from hydraloop.sweeps.overrides_to_axes import select
from tests.config.composed import composer


def jobs(*typed: str, params: tuple[str, ...] = (), **options: Any) -> list[list[str]]:
    merged = OmegaConf.merge(OmegaConf.structured(SweepConf), options)
    assert isinstance(merged, DictConfig)
    axes = select(arguments.parse(typed), arguments.parse(params), merged)
    assert isinstance(axes, list)
    return list(map(list, jobs_of(axes)))


def refused(*typed: str, params: tuple[str, ...] = (), **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        jobs(*typed, params=params, **options)
    return caught.value


def test_a_number_is_written_like_a_value_of_a_sweep() -> None:
    """So it can become one when a sweep is widened."""
    assert jobs() == [[]]
    assert jobs("optimizer.lr=1e-3", "name='a b'", "+new={a: [1, 'b c']}") == [
        ["optimizer.lr=0.001", "name='a b'", "+new={a: [1, 'b c']}"]
    ]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hooks=ema,profiler", ["hooks=ema", "hooks=profiler"]),
        ("+hooks=ema,profiler", ["+hooks=ema", "+hooks=profiler"]),
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=choice(4,2)", ["seed=4", "seed=2"]),
        ("seed=sort(4,2)", ["seed=2", "seed=4"]),
        ("name='a,b','c'", ["name='a,b'", "name='c'"]),
    ],
)
def test_what_stands_for_several_values(typed: str, expected: list[str]) -> None:
    assert [line for (line,) in jobs(typed)] == expected


def test_a_constant_that_is_given_twice_has_the_last_value() -> None:
    """As in a single run."""
    assert jobs("seed=1", "hooks=[],[ema]", "seed=3") == [["seed=3", "hooks=[]"], ["seed=3", "hooks=[ema]"]]
    assert jobs("~data.val", "+data.val={n: 1}") == [["~data.val", "+data.val={n: 1}"]]


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (("optimizer.lr=1e-3,1e-2", "optimizer.lr=1e-1,1"), "optimizer.lr"),
        (("seed=2", "hooks=[],[ema]", "seed=0,1"), "seed"),
        (("seed=0,1", "++seed=2,3"), "seed"),
        (("seed=0,1", "~seed"), "seed"),
        (("optimizer=sgd,adam", "optimizer=lion"), "optimizer"),
        (("optimizer.lr=interval(0,1)", "optimizer.lr=tag(log,interval(1e-3,1))"), "optimizer.lr"),
        (("task.model.width=8,16", "task.model={width: 4}"), "task.model.width"),
        (("task.model={width: 8},{width: 16}", "task.model.width=4"), "task.model.width"),
    ],
)
def test_a_swept_key_that_is_given_again_is_refused(typed: tuple[str, ...], key: str) -> None:
    """The last override would win, and the values of the other one would be missing without a word."""
    for given in ({"typed": typed}, {"params": typed}):
        error = refused(*given.get("typed", ()), params=given.get("params", ()))
        assert error.key == key
        assert "given twice" in error.problem


def test_keys_need_values_and_their_package_counts() -> None:
    with composer():
        assert "has no values" in refused("optimizer.lr=glob(*)").problem
    assert len(jobs("db@src=a,b", "db@dst=a,a")) == 4


def test_the_axes_of_a_config_file_are_swept_too() -> None:
    expected = [["seed=5", "experiment_name=x"], ["seed=6", "experiment_name=x"]]
    assert jobs("seed=5,6", params=("seed=1,2", "experiment_name=x")) == expected
    assert jobs("++seed=7", params=("seed=1,2",)) == [["++seed=7"]], "what is typed replaces the axis of a file"


def test_the_jobs_do_not_get_the_options_of_the_sweep() -> None:
    typed = ("seed=1,2", "sweep.max_workers=2", "detach=true", "hydra.verbose=true")
    assert jobs(*typed) == [["seed=1"], ["seed=2"]]


@pytest.mark.parametrize("typed", ["sweep.max_workers=1,2", "detach=true,false"])
def test_the_options_of_the_sweep_are_not_swept(typed: str) -> None:
    error = refused(typed)
    assert error.key == typed.partition("=")[0]
    assert "whole sweep" in error.problem
    assert "hydra.sweeper.params has sweep.gpus=[1]" in refused(params=("sweep.gpus=[1]",)).problem


def test_zipped_axes_advance_together_at_the_place_of_the_first() -> None:
    assert jobs("optimizer.lr=1,2", "hooks=[],[ema]", "+engine.x=3,4", zip=[["engine.x", "optimizer.lr"]]) == [
        ["optimizer.lr=1", "+engine.x=3", "hooks=[]"],
        ["optimizer.lr=1", "+engine.x=3", "hooks=[ema]"],
        ["optimizer.lr=2", "+engine.x=4", "hooks=[]"],
        ["optimizer.lr=2", "+engine.x=4", "hooks=[ema]"],
    ]
    assert len(jobs("a=1,2", "b=1,2", "c=1,2,3", "d=1,2,3", zip=[["a", "b"], ["c", "d"]])) == 6


@pytest.mark.parametrize(
    ("groups", "problem", "remedy"),
    [
        ([["a", "c"]], "zipped axes need equally many values: a has 2, c has 3", "one value for each job"),
        (["a", "b"], "a is not a list of keys", "Write a list of lists"),
        ([["a", "bb"]], "bb is not swept", "Did you mean b?"),
        ([["a", "e"]], "e is not swept", "Known: a, b, c."),
        ([["a", "b"], ["b", "a"]], "is not swept, or is zipped already", "Known: c."),
    ],
)
def test_zipped_axes_that_do_not_fit(groups: list[Any], problem: str, remedy: str) -> None:
    error = refused("a=1,2", "b=1,2", "c=1,2,3", "e=1", zip=groups)
    assert error.key == "sweep.zip"
    assert problem in error.problem
    assert remedy in str(error.remedy)


def test_a_file_has_a_job_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "jobs.txt"
    file.write_text(
        "\ufeff# two baselines\nhooks=[ema] optimizer.lr=1e-3\n\noptimizer.lr=0.1 'name=\"a b\"'  # the other\n"
    )
    assert jobs("seed=0,1", jobs=str(file)) == [
        ["hooks=[ema]", "optimizer.lr=1e-3", "seed=0"],
        ["hooks=[ema]", "optimizer.lr=1e-3", "seed=1"],
        ["optimizer.lr=0.1", 'name="a b"', "seed=0"],
        ["optimizer.lr=0.1", 'name="a b"', "seed=1"],
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no jobs"),
        ("a=1\nhooks=a,b", "line 2 of"),
        ("hydra.verbose=true", "line 1 of"),
        ("sweep.gpus=[1]", "line 1 of"),
        ("seed=1", "and the command line both set seed"),
        ("'a", "No closing quotation"),
        ("a", "'a' is not key=value"),
    ],
)
def test_files_of_jobs_that_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.txt"
    assert "No such file" in refused(jobs=str(file)).problem
    file.write_text(text)
    assert problem in refused("seed=0,1", jobs=str(file)).problem
