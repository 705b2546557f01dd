"""Hydra's own suites for launchers and sweepers, run with ours by `test_hydra_suites`."""

from __future__ import annotations

import pytest
from hydra.core.plugins import Plugins
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

Plugins.instance()  # a fixture of the suites saves the ConfigStore: our options have to be in it

LAUNCHERS = [("pool", []), ("basic", ["hydra/sweeper=hydraloop"]), ("pool", ["hydra/sweeper=hydraloop"])]
"""Name and overrides."""


@pytest.mark.parametrize(("launcher_name", "overrides"), LAUNCHERS)
class TestLauncher(LauncherTestSuite):
    """Launchers in the process of the test, with closures as task functions."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [(name, [*lines, "hydra.sweeper.max_batch_size=2"]) for name, lines in LAUNCHERS]
)
class TestBatches(BatchedSweeperTestSuite):
    """Several batches of jobs."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", f"hydra/launcher={name}", *lines]) for name, lines in LAUNCHERS],
)
class TestIntegration(IntegrationTestSuite):
    """Scripts with `@hydra.main`."""
