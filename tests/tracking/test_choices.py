"""What the hooks of several trackers refuse in the same way."""

from __future__ import annotations

import pytest

from hydraloop.errors import UserError
from hydraloop.tracking.choices import check_checkpoints


@pytest.mark.parametrize("choice", [None, "best", "last", "all"])
def test_choices_of_checkpoints(choice: str | None) -> None:
    check_checkpoints(choice)


def test_another_choice_is_refused() -> None:
    with pytest.raises(UserError, match="there is no choice 'none'") as caught:
        check_checkpoints("none")
    assert (caught.value.key, caught.value.remedy) == ("checkpoints", "Known: all, best, last.")
