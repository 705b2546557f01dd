"""Every: the one interval rule, as a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydraloop.engine.interval import Every
from hydraloop.errors import UserError


@pytest.mark.parametrize(
    ("interval", "begin", "due"),
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
def test_due_in_the_first_ten(interval: int | None, begin: int, due: list[int]) -> None:
    assert [n for n in range(1, 11) if Every(interval, begin).due(n)] == due


def test_nothing_is_due_before_the_first() -> None:
    assert not Every(1).due(0)
    assert not Every(1, 1).due(0)
    assert not Every(2, 0).due(-2)


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(UserError, match="below 1") as caught:
        Every(interval)
    assert "null for never" in str(caught.value)


@pytest.mark.parametrize("arguments", [(2.5,), (2.0,), ("2",), (2, 1.5)])
def test_what_is_no_whole_number_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="is not a whole number"):
        Every(*arguments)


def test_any_kind_of_whole_number_will_do() -> None:
    two = torch.tensor(2).numpy()[()]  # numpy's
    assert Every(two).due(4)


def test_a_negative_begin_is_refused() -> None:
    with pytest.raises(UserError, match="-3 is negative"):
        Every(2, -3)


@pytest.mark.parametrize("interval", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("begin", [0, 1, 2, 5])
def test_what_was_missed_since_it_was_done_is_due(interval: int | None, begin: int) -> None:
    every = Every(interval, begin)
    for done in range(20):
        for n in range(done, 20):
            assert every.due(n, done=done) is any(every.due(one) for one in range(done + 1, n + 1))


@pytest.mark.parametrize("interval", [None, 1, 3])
def test_the_last_is_due_unless_it_was_done(interval: int | None) -> None:
    every = Every(interval)
    assert every.due(7, last=True)
    assert every.due(7, done=6, last=True)
    assert not every.due(7, done=7, last=True)
