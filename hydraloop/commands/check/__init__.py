"""`python train.py check`: tests the data, the model and the task of the project."""

from __future__ import annotations

from hydraloop.errors import UserError
from hydraloop.plan import Draft
from hydraloop.sweeps.planning import SweepDraft
from hydraloop.validate.config import hydra_config


def run(draft: Draft) -> int:
    """Print a line for each check. Return the exit code: 1 if there is a problem.

    Raises:
        UserError: the config is that of a sweep.
    """
    if isinstance(draft, SweepDraft):
        raise UserError("a sweep has several configs", remedy="Leave -m out, and give one value to each option.")
    from hydraloop.commands.check.all_checks import check  # imports torch
    from hydraloop.commands.check.short_runs import Project

    with hydra_config(draft.cfg):
        return check(Project.of(draft))
