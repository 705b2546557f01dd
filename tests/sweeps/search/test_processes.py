"""Searches whose jobs are processes: kills, several controllers, a pause, ranks, a background process."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from hydraloop.commands.command_line import view as main
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project, Run
from tests.faults.comparison import differences_of_files
from tests.faults.sweeps.harness import Kill, Sweep, make
from tests.faults.sweeps.judge import problems_of_jobs
from tests.marks import nightly
from tests.processes import running_in, until

pytestmark = pytest.mark.slow

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
SHORT = ("-m", "experiment=spirals", LR, "engine.test=false", "hydra.sweep.dir=all")
BEST = "default_hooks.checkpoint.save_best=accuracy"
SLOW = """
import time
import hydraloop

class Slow(hydraloop.Hook):
    def __init__(self, *, rate: float) -> None:
        self.rate = rate
    def after_val(self, engine: hydraloop.Engine) -> None:
        time.sleep(0.5 if self.rate < 1e-3 else 0.0)
"""


def found(project: Project, name: str = "all") -> SweepDirectory:
    return SweepDirectory.load(project.path / name)


def test_under_kills_each_trial_ends_once(tmp_path: Path) -> None:
    """With several slots, kills change what the search asks for."""
    sweep = Sweep(make(tmp_path / "project"), "killed", (LR, "sweep.trials=20", "sweep.promote=asha"))
    sweep.train(deque(Kill(victim, "iteration", 9) for victim in ("job", "controller", "everything", "job")))
    jobs = sweep.answer("status")["jobs"]
    assert (len(jobs), list(problems_of_jobs(jobs, sweep.events()))) == (20, [])


@pytest.mark.parametrize("ranks", [1, nightly(2)])
def test_a_promoted_trial_equals_one_that_was_never_paused(tmp_path: Path, ranks: int) -> None:
    project = Project.make(tmp_path / "project")
    options = ("sweep.promote=asha", f"distributed.nproc_per_node={ranks}")
    done = project.train(*SHORT, BEST, "sweep.trials=3", "engine.max_epochs=2", *options)
    assert done.code == 0, done.text
    (state,) = (state for state in found(project).states() if state.state == "finished")
    assert state.attempts == 2
    lines = [line for line in state.overrides if not line.startswith("engine.pause_after")]
    alone = project.train(*lines, "hydra.run.dir=alone")
    assert alone.code == 0, alone.text
    assert differences_of_files(Run(found(project).run_dir(state)), Run(project.path / "alone")) == []


def test_a_job_with_ranks_is_pruned_and_the_others_go_on(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("my_project/slow.py", SLOW)
    jobs = [("1e-2", 1)] * 5 + [("1e-4", 2), ("1e-2", 1)]
    trials = [f"{{optimizer.lr: {rate}, distributed.nproc_per_node: {ranks}}}" for rate, ranks in jobs]
    options = ("distributed.nproc_per_node=1,2", "sweep.trials=7", "sweep.prune=median", "engine.max_epochs=4")
    options = (*options, "sweep.objectives={accuracy: max}")
    hook = "+hooks.slow={_target_: my_project.slow.Slow, rate: '${optimizer.lr}'}"
    done = project.train(*SHORT, *options, f"sweep.enqueue=[{','.join(trials)}]", hook)
    assert done.code == 0, done.text
    assert [state.state for state in found(project).states()] == ["finished"] * 5 + ["pruned", "finished"]
    assert found(project).states()[5].reason == "by median at validation 1"
    pruned = Run(project.path / "all" / "5")
    assert pruned.config.sweep.objectives == {"accuracy": "max"}
    assert (pruned.result["status"], pruned.result["reason"]) == ("interrupted", "preempted by SIGTERM")
    assert running_in(project.path) == []


def test_a_search_in_the_background_is_stopped_and_continued_with_more_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project.make(tmp_path / "project")
    line = [one for one in SHORT if not one.startswith("hydra.sweep.dir")] + ["engine.max_epochs=1"]
    done = project.train(*line, "sweep.trials=1000", "detach=true")
    assert (done.code, "continues in the background" in done.out) == (0, True), done.text
    (path,) = project.path.glob("multirun/*/*")
    until(lambda: any(state.is_over for state in SweepDirectory.load(path).states()), "a job has ended")
    assert main(["stop", str(path)]) == 0
    assert running_in(project.path) == []
    asked = SweepDirectory.load(path).count
    done = project.train(*line, f"sweep.trials={asked + 3}", "sweep.resume=auto")
    assert done.code == 0, done.text
    sweep = SweepDirectory.load(path)
    assert [state.state for state in sweep.states()] == ["finished"] * (asked + 3)
