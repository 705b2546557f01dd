"""The option `checkpoints` of tracker hooks."""

from __future__ import annotations

import pytest

from hydraloop.errors import UserError
from hydraloop.tracking.description import check_choice


@pytest.mark.parametrize("choice", [None, "best", "last", "all"])
def test_choices_of_checkpoints(choice: str | None) -> None:
    check_choice(choice)


def test_another_choice_is_refused() -> None:
    with pytest.raises(UserError, match="'none' is not one of best, last, all") as caught:
        check_choice("none")
    assert (caught.value.key, caught.value.remedy) == ("checkpoints", "Known: all, best, last.")
