"""Attributes that `Engine` had earlier still work, with a warning that names the new one."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from hydraloop.engine.deprecated_names import NEW_NAMES
from hydraloop.engine.loaders import Loaders
from tests.helpers import batches, make_engine


@pytest.mark.parametrize(("old", "new"), NEW_NAMES.items())
def test_an_earlier_name_warns_and_reads_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    engine = make_engine(tmp_path)
    with pytest.warns(DeprecationWarning, match=rf"engine\.{old} is deprecated .* use engine\.{new}$"):
        found = getattr(engine, old)
    assert found == attrgetter(new)(engine)


def test_loaders_that_are_assigned_warn_and_are_used(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    with pytest.warns(DeprecationWarning, match=r"use engine\.batches\.use\(…\)$"):
        engine.loaders = Loaders(batches(3))
    engine.progress.set_length(engine.settings, engine.batches.epoch_length)
    assert engine.train().progress["iteration"] == 3
