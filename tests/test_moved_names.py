"""Classes that have moved: configs and runs with their earlier names work."""

from __future__ import annotations

import pytest

from hydraloop.moved_names import MOVED
from hydraloop.run_files.checkpoint_to_resume import _identity
from hydraloop.safety.allowlist import Allowlist
from tests.config.composed import composer, job


@pytest.mark.parametrize("earlier", MOVED)
def test_a_config_may_use_an_earlier_name(earlier: str) -> None:
    allowlist = Allowlist()
    assert allowlist.locate(earlier, "data.train") is allowlist.locate(MOVED[earlier], "data.train")


def test_resume_auto_finds_a_run_with_earlier_names() -> None:
    with composer() as opened:
        now, before = job(["experiment=char_lm"], opened), job(["experiment=char_lm"], opened)
    before.task.model._target_ = "hydraloop.models.GPT"
    for split in ("train", "val", "test"):
        before.data[split]._target_ = "hydraloop.data.PythonSources"
    assert _identity(before) == _identity(now)
