"""The default task is learnt: real digits, with the command line."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.e2e.projects import Project


@pytest.mark.slow
@pytest.mark.parametrize("hooks", ["[]", "[ema]"])
def test_98_percent_of_the_test_images(hooks: str, project: Project) -> None:
    done = project.train("-m", f"hooks={hooks}", "seed=0,1,2")
    assert done.code == 0, done.text
    assert [list(job.config.hooks) for job in project.jobs] == [["ema"] if "ema" in hooks else []] * 3
    accuracies = [job.result["test_metrics"]["accuracy"] for job in project.jobs]
    assert mean(accuracies) >= 0.98, accuracies
