"""`hydraloop doctor`: tests this machine, and the config of the project in the working directory."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial

from hydraloop.commands.check.findings import Finding, end, judge
from hydraloop.commands.check.project import composed
from hydraloop.plan import Draft
from hydraloop.validate import hydra_config


def run(args: argparse.Namespace) -> int:
    """Print a line for each test. Return the exit code: 1 if there is a problem."""
    with ExitStack() as stack:
        drafts: list[Draft] = []

        def config() -> Finding:
            draft = stack.enter_context(composed(args))
            if draft is None:
                return Finding(
                    "ok", "no project here, only the machine is tested: there is no train.py and no folder conf"
                )
            stack.enter_context(hydra_config(draft.cfg))
            drafts.append(draft)
            return Finding("ok", f"{draft.cfg.experiment_name}: it composes, and its keys and types are right")

        findings = [judge("config", config)]
        from hydraloop.commands.doctor import machine, slurm, trackers  # imports torch

        cfg = drafts[0].cfg if drafts else None
        tests = {test.__name__: partial(test, cfg) for test in machine.TESTS} | trackers.tests(cfg) | slurm.tests(cfg)
        findings += [judge(name, test) for name, test in tests.items()]
    return end("doctor", findings)
