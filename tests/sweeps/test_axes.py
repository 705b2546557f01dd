from __future__ import annotations

import time

import pytest

from hydraloop.errors import UserError
from hydraloop.sweeps.axes import Axes, Axis


def axis(key: str, *values: str) -> Axis:
    return Axis((key,), tuple((f"{key}={value}",) for value in values))


def jobs(axes: Axes) -> list[tuple[str, ...]]:
    return [axes.lines(number) for number in range(axes.count)]


def test_the_last_axis_changes_fastest() -> None:
    axes = Axes.product([axis("a", "1", "2"), axis("b", "x"), axis("c", "3", "4")])
    assert jobs(axes) == [
        ("a=1", "b=x", "c=3"),
        ("a=1", "b=x", "c=4"),
        ("a=2", "b=x", "c=3"),
        ("a=2", "b=x", "c=4"),
    ]
    assert axes.swept_lines(1) == ("a=1", "c=4")
    assert [found.keys for found in axes.swept] == [("a",), ("c",)]


def test_no_axis_is_one_job() -> None:
    assert jobs(Axes.product([])) == [()]


def test_the_first_job_with_each_value() -> None:
    axes = Axes.product([axis("a", "1", "2"), axis("b", "1", "2", "3")])
    assert axes.first_jobs() == [{0: 0, 1: 3}, {0: 0, 1: 1, 2: 2}]
    assert Axes(axes.axes, [2, 4, 5]).first_jobs() == [{0: 0, 1: 1}, {2: 0, 1: 1}]


def test_a_3x3_grid_that_becomes_4x4_has_7_new_jobs_and_keeps_its_numbers() -> None:
    old = Axes.product([axis("a", "1", "2", "3"), axis("b", "x", "y", "z")])
    new = Axes.product([axis("a", "0", "1", "2", "3"), axis("b", "x", "y", "z", "w")]).widened(old)
    assert jobs(new)[:9] == jobs(old)
    assert new.count == 16
    assert len(set(jobs(new))) == 16
    again = Axes.product([axis("a", "0", "1", "2", "3"), axis("b", "x", "y", "z", "w", "v")]).widened(new)
    assert jobs(again)[:16] == jobs(new)
    assert len(set(jobs(again))) == 20


def test_the_same_axes_are_not_widened() -> None:
    axes = Axes.product([axis("a", "1", "2"), axis("b", "1")])
    assert list(axes.widened(axes).order) == [0, 1]


def test_a_constant_becomes_an_axis() -> None:
    old = Axes.product([axis("a", "1"), axis("b", "1", "2")])
    new = Axes.product([axis("a", "0", "1"), axis("b", "1", "2")]).widened(old)
    assert jobs(new) == [("a=1", "b=1"), ("a=1", "b=2"), ("a=0", "b=1"), ("a=0", "b=2")]


def test_the_same_value_twice_is_two_jobs() -> None:
    old = Axes.product([axis("a", "1", "1")])
    assert jobs(Axes.product([axis("a", "2", "1", "1")]).widened(old)) == [("a=1",), ("a=1",), ("a=2",)]
    with pytest.raises(UserError, match="not as often"):
        Axes.product([axis("a", "1", "2")]).widened(old)


def test_masked_values_are_equal_by_their_place() -> None:
    axes = Axes.product([axis("api_key", "9f86d081884c", "7d659a2feaa0"), axis("a", "1")])
    stored = axes.masked()
    assert jobs(stored) == [("api_key=***", "a=1")] * 2
    wider = Axes.product([axis("api_key", "9f86d081884c", "7d659a2feaa0"), axis("a", "1", "2")]).widened(stored)
    assert jobs(wider)[:2] == jobs(axes)
    assert len(set(jobs(wider))) == 4


@pytest.mark.parametrize(
    ("axes", "key", "problem"),
    [
        ([axis("a", "1", "2")], "sweep.resume", "the overrides of the sweep are a, b; this command line has a"),
        ([axis("b", "1"), axis("a", "1", "2")], "sweep.resume", "this command line has b, a"),
        ([axis("a", "1", "2"), axis("b", "1"), axis("c", "1")], "sweep.resume", "this command line has a, b, c"),
        ([axis("a", "1", "3"), axis("b", "1")], "a", "the sweep has a=2, which this command line has not"),
    ],
)
def test_axes_that_do_not_contain_the_stored_ones(axes: list[Axis], key: str, problem: str) -> None:
    stored = Axes.product([axis("a", "1", "2"), axis("b", "1")])
    with pytest.raises(UserError) as caught:
        Axes.product(axes).widened(stored)
    assert caught.value.key == key
    assert problem in caught.value.problem


def test_10_000_jobs_take_a_moment() -> None:
    axes = Axes.product([axis("a", *map(str, range(100))), axis("b", *map(str, range(100)))])
    began = time.process_time()
    assert len({axes.lines(number) for number in range(axes.count)}) == 10_000
    axes.first_jobs()
    assert Axes.product([*axes.axes]).widened(axes).count == 10_000
    assert time.process_time() - began < 1
