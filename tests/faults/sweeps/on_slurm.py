"""Kills jobs, nodes and controllers of sweeps on a real Slurm: `python -m tests.faults.sweeps.on_slurm [kills] [seed]`.

A grid and a random search give the same results as with `pool`. A TPE search with ASHA decides again as it has decided.
Each job has one run in MLflow, with each of its records once. Takes about ten minutes for 20 kills on two processors.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from hydra.core.utils import env_override

from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.faults.sweeps import harness
from tests.faults.sweeps.harness import PHASES, Kill, Sweep
from tests.faults.sweeps.judge import problems, problems_in_mlflow, problems_of_search
from tests.processes import until
from tests.slurm import Slurm, running

VICTIMS = ("job", "job", "node", "slurmd", "controller")
"""`slurmd`: the jobs of the node keep running, and Slurm starts them on the other node."""
_SEARCH = ("optimizer.lr=tag(log,interval(1e-4,1e-1))",)
KINDS = {
    "a grid": ("seed=0,1,2", "optimizer.lr=1e-2,3e-2"),
    "a random search": (*_SEARCH, "sweep.sampler=random", "sweep.trials=6"),
    "TPE and ASHA": (
        *_SEARCH,
        "sweep.promote=asha",
        "sweep.trials=12",
        "engine.max_iters=480",
        "engine.val_interval=120",
    ),
}
_TRACKED = ("hooks=[ema,mlflow]", "hooks.mlflow.flush_timeout=60")
_ON_SLURM = ("sweep.executor=submitit", "sweep.submitit.timeout_min=60")
_ROUNDS = 10
PATIENCE = 1500.0
"""Seconds for a sweep: a node's death is seen after half a minute, and its job's lock is free after another one."""


@dataclass
class OnSlurm(Sweep):
    """A sweep whose jobs are those of Slurm."""

    slurm: Slurm | None = None

    def strike(self, kill: Kill, number: int) -> bool:
        """Kill what a job needs. Return whether it was there."""
        assert self.slurm is not None
        if kill.victim == "controller":
            for script in self.running():
                script.kill()
            return True
        for node in self.slurm.nodes:
            for process in self.slurm.processes(node):
                if _is_of(process, self.path / str(number)):
                    self._kill(kill.victim, node, process)
                    return True
        return False

    def _kill(self, victim: str, node: str, process: psutil.Process) -> None:
        assert self.slurm is not None
        if victim == "job":
            process.kill()
            return
        if victim == "slurmd":
            self.slurm.kill_slurmd(node)
        else:
            self.slurm.kill_node(node)
        if self.draws.random() < 0.5:  # Slurm sees that the node is dead
            until(lambda: "down" in self.slurm.run("sinfo", "--noheader", "--Node", "--format=%T"), "a node is down")
        self.slurm.start()


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        job = process.environ().get("HYDRALOOP_SWEEP_JOB")
        return job == str(folder / "request.json") and process.status() != psutil.STATUS_ZOMBIE
    return False


def train(sweep: OnSlurm, kills: Iterator[Kill], count: int) -> Counter[str]:
    """Run a sweep with so many kills. Return what was killed."""
    done = Counter[str]()
    deadline = time.monotonic() + PATIENCE
    sweep.start()
    while not harness.is_over(sweep) or sweep.running():
        assert time.monotonic() < deadline, sweep.printed()
        if not sweep.running():
            assert len(sweep.controllers) < count + _ROUNDS, sweep.printed()
            sweep.start()
        if done.total() == count:
            time.sleep(0.2)
            continue
        kill, before = next(kills), len(sweep.events())
        while sweep.running() and time.monotonic() < deadline:
            seen = [event for event in sweep.events()[before:] if event[2].startswith(kill.phase)]
            if len(seen) >= kill.count:
                time.sleep(kill.delay)
                done[kill.victim] += sweep.strike(kill, seen[-1][0])
                break
            time.sleep(0.01)
    return done


def _drawn(draws: random.Random, phases: Sequence[str]) -> Iterator[Kill]:
    while True:
        for victim in draws.sample(VICTIMS, len(VICTIMS)):
            phase = draws.choice(phases)
            yield Kill(victim, phase, draws.randint(1, 6) if phase == "iteration" else 1, draws.random() * 0.3)


def main(count: int = 20, seed: int = 0) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    began, draws, wrong, total = time.monotonic(), random.Random(seed), [], Counter[str]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        slurm = stack.enter_context(running(_made(Path(folder, "slurm"))))
        stack.enter_context(env_override(slurm.environment))
        for place, (name, line) in enumerate(KINDS.items()):
            own = count * (place + 1) // len(KINDS) - count * place // len(KINDS)
            project = harness.make(Path(folder) / f"project_{place}")
            whole = harness.train(project, "whole", line, draws, []) if "promote" not in str(line) else None
            sweep = OnSlurm(project, project.path / "killed", (*line, *_TRACKED, *_ON_SLURM), draws, 4, slurm=slurm)
            kills = train(sweep, _drawn(draws, PHASES[:-1] if whole is None else PHASES), own)
            found = list(problems_of_search(sweep) if whole is None else problems(sweep, whole))
            found += problems_in_mlflow(sweep)
            attempts = sum(state.attempts for state in SweepDirectory.load(sweep.path).states())
            print(f"{name}: {dict(kills)} killed, {attempts} attempts, {found or 'nothing is wrong'}", flush=True)
            wrong, total = wrong + found, total + kills
            slurm.cancel_all()
    print(f"\n{total.total()} kills: {dict(total)}. Seed {seed}. {(time.monotonic() - began) / 60:.0f} minutes.")
    return int(bool(wrong))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    sys.exit(main(*map(int, sys.argv[1:])))
