"""Attributes that `Engine` had earlier still work, with a warning that names the new one."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from hydraloop.engine.deprecated_names import NEW_NAMES
from tests.helpers import make_engine


@pytest.mark.parametrize(("old", "new"), NEW_NAMES.items())
def test_an_earlier_name_warns_and_reads_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    engine = make_engine(tmp_path)
    with pytest.warns(DeprecationWarning, match=rf"engine\.{old} is deprecated .* use engine\.{new}$"):
        found = getattr(engine, old)
    assert found == attrgetter(new)(engine)
