"""Two controllers, each on a machine that sees the directory of the sweep through its own caches."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.faults.shared.machines import TIMEOUT, Machine, machines
from tests.faults.sweeps.harness import Sweep, make, train
from tests.faults.sweeps.judge import problems, problems_of_search
from tests.processes import until

pytestmark = pytest.mark.nightly

GRID = ("seed=0,1,2,3", "optimizer.lr=1e-2,3e-2")
SEARCH = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "engine.val_interval=6")
LONG = ("seed=0,1", "engine.max_iters=1200", "engine.val_interval=300", "default_hooks.checkpoint.interval=100")
"""Longer than a command about the sweep takes to start on a busy machine."""
SECONDS = 250


@dataclass
class Shared:
    """A sweep in a folder that two machines share."""

    project: Project
    real: Path
    machines: tuple[Machine, Machine]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def sweep(self, *overrides: str) -> Sweep:
        """The sweep, as the server of the files has it."""
        return Sweep(self.project, self.real / "sweep", overrides, Random(0), workers=1)

    def start(self, number: int, *overrides: str) -> subprocess.Popen[str]:
        """Start a controller on a machine, which continues the sweep if there is one."""
        one = self.machines[number]
        line = ["-m", "experiment=kills", *overrides, f"hooks.ledger.path={self.real}/sweep/ledger"]
        has_begun = (self.real / "sweep" / "sweep.json").exists()
        line += [f"{'sweep.resume' if has_begun else 'hydra.sweep.dir'}={one.view}/sweep", "sweep.max_workers=1"]
        self.processes.append(self.project.start(*line, environment=dict(one.environment), before=one.command))
        return self.processes[-1]

    def hydraloop(self, number: int, command: str) -> str:
        """Run a command about the sweep on a machine. Returns what it prints."""
        one = self.machines[number]
        process = self.project.start(
            command, f"{one.view}/sweep", environment=dict(one.environment), before=one.command, module="hydraloop"
        )
        self.processes.append(process)
        return process.communicate(timeout=SECONDS)[0]


@contextlib.contextmanager
def shared(tmp_path: Path, *, shares_flock: bool) -> Iterator[Shared]:
    """A project, and two machines. In the end, no process is left."""
    with machines(tmp_path, shares_flock=shares_flock) as both:
        one = Shared(make(tmp_path / "project"), tmp_path / "real", both)
        try:
            yield one
        finally:
            for process in one.processes:
                process.kill()
                process.communicate()


def ends(process: subprocess.Popen[str]) -> None:
    """Wait until a controller has ended without an error."""
    printed = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, printed


def run_on_both(one: Shared, line: tuple[str, ...], begun: str) -> Sweep:
    """Run a sweep with a controller on each machine. The second one starts when the file `begun` exists."""
    sweep = one.sweep(*line)
    first = one.start(0, *line)
    until((sweep.path / begun).exists, "the sweep has begun", process=first)
    for process in (first, one.start(1, *line)):
        ends(process)
    assert len({state.host for state in SweepDirectory.load(sweep.path).states()}) == 2, "one machine has run all jobs"
    return sweep


def states(sweep: Sweep) -> dict[int, str]:
    return {state.number: state.state for state in SweepDirectory.load(sweep.path).states()}


@pytest.mark.parametrize("shares_flock", [True, False])
def test_two_controllers_share_a_grid(tmp_path: Path, shares_flock: bool) -> None:
    with shared(tmp_path, shares_flock=shares_flock) as one:
        whole = train(one.project, "whole", GRID, Random(0), [])
        sweep = run_on_both(one, GRID, "sweep.json")
        assert list(problems(sweep, whole)) == []
        assert [state.attempts for state in SweepDirectory.load(sweep.path).states()] == [1] * 8
        tables = [one.hydraloop(number, "results") for number in (0, 1)]
        assert tables[0].replace("first", "second") == tables[1]


@pytest.mark.parametrize("shares_flock", [True, False])
def test_two_controllers_share_a_search(tmp_path: Path, shares_flock: bool) -> None:
    with shared(tmp_path, shares_flock=shares_flock) as one:
        sweep = run_on_both(one, (*SEARCH, "sweep.trials=12", "sweep.prune=median"), "search.jsonl")
        assert list(problems_of_search(sweep)) == []


def test_a_sweep_that_is_stopped_continues_at_once_on_the_other_machine(tmp_path: Path) -> None:
    with shared(tmp_path, shares_flock=False) as one:
        whole = train(one.project, "whole", LONG, Random(0), [])
        sweep = one.sweep(*LONG)
        first = one.start(0, *LONG)
        until((sweep.path / "sweep.json").exists, "the sweep has begun", process=first)
        until(lambda: states(sweep)[0] == "running", "the first job runs", process=first)
        assert "1 running" in one.hydraloop(1, "status"), "and what it has seen is now in its caches"
        assert "run the command there, too" in one.hydraloop(1, "stop")
        assert "processes ended" in one.hydraloop(0, "stop")
        first.communicate(timeout=TIMEOUT)
        assert "No controller is running" in one.hydraloop(1, "status")
        ends(one.start(1, *LONG))
        assert list(problems(sweep, whole)) == []
        assert [state.attempts for state in SweepDirectory.load(sweep.path).states()] == [2, 1]
