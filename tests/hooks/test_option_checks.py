"""Checks of options that several hooks have."""

from __future__ import annotations

import pytest

from hydraloop.errors import UserError
from hydraloop.option_checks import CHECKPOINTS, check_choice


@pytest.mark.parametrize("choice", [None, "best", "last", "all"])
def test_choices_of_checkpoints(choice: str | None) -> None:
    check_choice(CHECKPOINTS, checkpoints=choice)


def test_another_choice_is_refused() -> None:
    with pytest.raises(UserError, match="'none' is not one of best, last, all") as caught:
        check_choice(CHECKPOINTS, checkpoints="none")
    assert (caught.value.key, caught.value.remedy) == ("checkpoints", "Known: all, best, last.")
