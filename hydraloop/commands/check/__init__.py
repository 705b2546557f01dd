"""`hydraloop check`: tests the data, the model and the task of the project in the working directory."""

from __future__ import annotations

import argparse

from hydraloop.commands.check.project import composed
from hydraloop.processes.termination_signals import terminable
from hydraloop.validate.config import hydra_config


def run(args: argparse.Namespace) -> int:
    """Print a line for each check. Return the exit code: 1 if there is a problem.

    Raises:
        UserError: there is no project, or a mistake in its config.
    """
    with terminable(), composed(args) as draft:
        from hydraloop.commands.check.all_checks import check  # imports torch
        from hydraloop.commands.check.short_runs import Project

        with hydra_config(draft.cfg):
            return check(Project.of(draft))
