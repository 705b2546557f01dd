"""Controllers contend for the jobs of a sweep, and all processes are killed at random. Prints what became of the jobs.

`python claims_program.py <folder> <seed>`, in a project. Claims, states and locks are real; the training is a file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

from hydraloop.cli.compose import opened
from hydraloop.cli.error_reports import Reports
from hydraloop.plan import Draft, RunPlan
from hydraloop.processes.peers import Peers
from hydraloop.processes.run_starter import RunStarter
from hydraloop.processes.termination_signals import leave
from hydraloop.run_files.result import Result
from hydraloop.sweeps import queue, states
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.jobs import Jobs
from hydraloop.sweeps.sweep_description import Description
from hydraloop.sweeps.sweep_directory import SweepDirectory

JOBS, CONTROLLERS = 60, 4
write = states.write


def sometimes_killed(chance: float) -> None:
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def write_or_die(folder: Path, state: states.JobState, *, flush: bool) -> None:
    sometimes_killed(0.05)
    write(folder, state, flush=flush)
    sometimes_killed(0.1)


class Played(RunStarter):
    """Writes a file instead of training."""

    def train_by(self, plan: RunPlan) -> float | None:
        sometimes_killed(0.1)
        time.sleep(random.random() * 0.02)
        assert plan.run_dir is not None
        with (plan.run_dir / "ends").open("a") as ends:
            ends.write("x")
        Result("finished", val_metrics={"loss": 0.5}).write(plan.run_dir)
        sometimes_killed(0.1)
        return None


class Contender(SweepJob):
    """Has one config for all jobs."""

    config: DictConfig

    def _composed(self, lines: Any, number: int) -> DictConfig:
        cfg = self.config
        cfg.hydra.job.num = number
        return cfg


def control(directory: SweepDirectory, worker: SweepJob) -> NoReturn:
    """Run jobs until all have ended, or until it is killed."""
    directory.controller = str(os.getpid())
    left = list(range(JOBS))
    random.shuffle(left)
    starts = 0
    while left:
        sometimes_killed(0.02)
        number = left.pop()
        state = queue.end(directory, number, None)
        if state.is_over:
            continue
        left.insert(0, number)
        if state.state == "running":
            time.sleep(0.005)
            continue
        pid = os.fork()
        if pid == 0:
            random.seed(os.getpid())
            states.write = write_or_die
            leave(worker.run(Request(number, (), str(directory.folder(number)), state.attempts, directory.controller)))
        starts += 1
        sometimes_killed(0.02)
        queue.end(directory, number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), state.attempts + 1)
    leave(0)


def main(path: Path, seed: int) -> None:
    random.seed(seed)
    with opened(Path("conf"), "config") as composer:
        grid = GridComposer(composer, composer.compose_sweep([]))
        listed = Jobs(tuple((f"seed={number}",) for number in range(JOBS)), ("seed",))
        description = Description("uid", 0.0, ("python",), (), {}, "${hydra.job.num}", listed, "seed", {})
        directory = SweepDirectory.create(path, description)
        cfg = grid.compose(listed.listed[0], number=0)
        cfg.hydra.sweep.dir = str(path)
        Contender.config = cfg
        jobs = Played(Reports(with_traceback=False), Peers())
        worker = Contender(directory, Draft(overrides=[], cfg=cfg, typed=[]), jobs, grid)
        controllers: set[int] = set()
        killed = 0
        while True:
            while len(controllers) < CONTROLLERS:
                pid = os.fork()
                if pid == 0:
                    random.seed(os.getpid())
                    control(directory, worker)
                controllers.add(pid)
            pid, status = os.wait()
            controllers.discard(pid)
            killed += status != 0
            if status == 0:
                break
        for pid in controllers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    found = [queue.end(directory, number, None) for number in range(JOBS)]
    ends = [(directory.folder(number) / "ends").read_text() for number in range(JOBS)]
    attempts = sum(state.attempts for state in found)
    print(
        json.dumps({"states": [state.state for state in found], "ends": ends, "attempts": attempts, "killed": killed})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]))
