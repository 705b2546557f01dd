"""The jobs that a sweep has and gets."""

from __future__ import annotations

import time

from hydraloop.sweeps.axes import Axis, first_jobs
from hydraloop.sweeps.sweep_directory import Jobs


def axis(key: str, *values: str) -> Axis:
    return Axis((key,), tuple((f"{key}={value}",) for value in values))


def test_the_last_axis_changes_fastest_and_each_value_is_checked_once() -> None:
    axes = [axis("a", "1", "2"), axis("b", "x"), axis("c", "3", "4", "5")]
    jobs = Jobs.of_axes(axes)
    assert [" ".join(lines) for lines in jobs.listed[:4]] == [
        "a=1 b=x c=3",
        "a=1 b=x c=4",
        "a=1 b=x c=5",
        "a=2 b=x c=3",
    ]
    assert (jobs.count, jobs.swept) == (6, ("a", "c"))
    assert [" ".join(lines) for lines in first_jobs(axes, 2)] == ["a=1 b=x c=3", "a=2 b=x c=3", "a=1 b=x c=4"]


def test_10_000_jobs_take_a_moment() -> None:
    axes = [axis("a", *map(str, range(100))), axis("b", *map(str, range(100)))]
    began = time.process_time()
    listed = Jobs.of_axes(axes)
    assert listed.joined(listed)[0] == listed
    assert len(set(listed.listed)) == 10_000
    assert time.process_time() - began < 1


def grid(*listed: str) -> Jobs:
    lines = tuple(tuple(one.split()) for one in listed)
    return Jobs(lines, tuple(dict.fromkeys(line.partition("=")[0] for one in lines for line in one)))


def test_a_3x3_grid_that_becomes_4x4_has_7_new_jobs_and_keeps_its_numbers() -> None:
    old = grid(*(f"a={a} b={b}" for a in "123" for b in "xyz"))
    new = grid(*(f"a={a} b={b}" for a in "0123" for b in "xyzw"))
    joined, named = old.joined(new)
    assert joined.listed[:9] == old.listed
    assert (joined.count, len(set(joined.listed)), sorted(named)) == (16, 16, [*range(16)])
    assert all(named[number] == joined.listed[number] for number in named)


def test_jobs_that_a_command_line_does_not_name_stay() -> None:
    joined, named = grid("a=1", "a=2", "a=3").joined(grid("a=3", "a=4", "b=1 a=1"))
    assert joined.listed == (("a=1",), ("a=2",), ("a=3",), ("a=4",), ("b=1", "a=1"))
    assert named == {2: ("a=3",), 3: ("a=4",), 4: ("b=1", "a=1")}
    assert joined.swept == ("a", "b")


def test_the_order_of_overrides_makes_no_other_job_and_the_same_job_twice_is_two() -> None:
    assert grid("a=1 b=2").joined(grid("b=2 a=1"))[1] == {0: ("b=2", "a=1")}
    assert sorted(grid("a=1", "a=1").joined(grid("a=2", "a=1", "a=1"))[1]) == [0, 1, 2]


def test_secrets_are_not_compared_but_counted() -> None:
    stored = grid("api_key=9f86d081884c a=1", "api_key=7d659a2feaa0 a=1").masked()
    assert stored.listed == (("api_key=***", "a=1"),) * 2
    _, named = stored.joined(grid("api_key=aaaaaaaaaaaa a=1", "api_key=bbbbbbbbbbbb a=1"))
    assert named == {0: ("api_key=aaaaaaaaaaaa", "a=1"), 1: ("api_key=bbbbbbbbbbbb", "a=1")}


def test_a_pause_that_is_not_swept_makes_no_other_job() -> None:
    pause = "engine.pause_after"
    old = Jobs(((f"{pause}=1", "a=1"),), ("a",))
    assert old.joined(Jobs((("a=1",), ("a=2",)), ("a",)))[1] == {0: ("a=1",), 1: ("a=2",)}
    swept = Jobs(((f"{pause}=1",), (f"{pause}=2",)), (pause,))
    assert sorted(swept.joined(Jobs(((f"{pause}=2",), (f"{pause}=3",)), (pause,)))[1]) == [1, 2]
