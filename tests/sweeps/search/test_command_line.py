"""The command line of a search: a file may have the space."""

from __future__ import annotations

from pathlib import Path

from tests.config.composed import composer
from tests.sweeps.test_planning import OURS, planned

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


def test_a_file_has_the_space_and_the_command_line_changes_it() -> None:
    with composer() as opened:
        draft, checked = planned(f"-m search=lr optimizer=adamw,sgd sweep.trials=7 {OURS}", opened)
    assert draft.jobs.search is not None
    assert (draft.jobs.search.trials, draft.jobs.search.settings.sampler) == (7, "tpe")
    assert [str(one) for one in draft.jobs.search.space.searched] == [
        "optimizer.lr=tag(log,interval(0.0001,0.1))",
        "optimizer=adamw,sgd",
    ]
    assert {cfg.optimizer.lr for cfg in checked} == {1e-4, 1e-1}


def test_a_file_of_a_project_needs_no_entry_in_the_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [hydraloop, hydraloop/project, _self_]\n")
    params = "hydra: {sweeper: {params: {optimizer.lr: 'interval(0.1,0.2)', seed: '0,1'}}}"
    (tmp_path / "search" / "mine.yaml").write_text(f"# @package _global_\n{params}\nsweep: {{trials: 3}}\n")
    with composer(tmp_path) as opened:
        draft, _ = planned(f"-m +search=mine data=digits task=classification model=small_cnn {OURS}", opened)
    assert draft.jobs.search is not None
    assert (draft.jobs.count, draft.jobs.search.repeats) == (6, 2)
