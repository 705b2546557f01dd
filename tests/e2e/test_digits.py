"""The default task is learnt: real digits, with the command line."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.e2e.projects import Project
from tests.marks import nightly, slow


@pytest.mark.parametrize(("hooks", "seeds"), [slow("[ema]", "0"), nightly("[]", "0,1,2"), nightly("[ema]", "0,1,2")])
def test_98_percent_of_the_test_images(hooks: str, seeds: str, project: Project) -> None:
    done = project.train("-m", f"hooks={hooks}", f"seed={seeds}")
    assert done.code == 0, done.text
    assert [list(job.config.hooks) for job in project.jobs] == [["ema"] if "ema" in hooks else []] * len(
        seeds.split(",")
    )
    accuracies = [job.result["test_metrics"]["accuracy"] for job in project.jobs]
    assert mean(accuracies) >= 0.98, accuracies
