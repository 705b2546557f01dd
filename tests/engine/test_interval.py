"""Every: the one interval rule, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from hydraloop.engine.interval import Every
from hydraloop.errors import UserError


@pytest.mark.parametrize(
    ("interval", "begin", "fires"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2, 0, [2, 4, 6, 8, 10]),
        (2, 1, [2, 4, 6, 8, 10]),  # begin 1 is begin 0: "from the start"
        (3, 0, [3, 6, 9]),
        (2, 5, [5, 7, 9]),  # MMEngine's example of save_begin
        (1, 4, [4, 5, 6, 7, 8, 9, 10]),
        (5, 10, [10]),
        (11, 0, []),
        (None, 0, []),
    ],
)
def test_when_it_fires_in_the_first_ten(interval: int | None, begin: int, fires: list[int]) -> None:
    assert [n for n in range(1, 11) if Every(interval, begin).fires_at(n)] == fires


def test_it_never_fires_before_the_first() -> None:
    assert not Every(1).fires_at(0)
    assert not Every(1, 1).fires_at(0)
    assert not Every(2, 0).fires_at(-2)


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(UserError, match="below 1") as caught:
        Every(interval)
    assert "null for never" in str(caught.value)


@pytest.mark.parametrize("arguments", [(2.5,), (2.0,), ("2",), (2, 1.5)])
def test_what_is_no_whole_number_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="is not a whole number"):
        Every(*arguments)


def test_a_negative_begin_is_refused() -> None:
    with pytest.raises(UserError, match="-3 is negative"):
        Every(2, -3)


@pytest.mark.parametrize("interval", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("begin", [0, 1, 2, 5])
def test_the_times_until_n_count_each_time_that_it_fires(interval: int | None, begin: int) -> None:
    every = Every(interval, begin)
    for n in range(20):
        assert every.times_until(n) == sum(every.fires_at(one) for one in range(1, n + 1))
