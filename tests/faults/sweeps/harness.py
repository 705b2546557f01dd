"""Sweeps of which processes are killed at random moments, and which are resumed until they have ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hydraloop.run_files import lock
from hydraloop.run_files.processes import is_alive, started
from hydraloop.sweeps import states
from hydraloop.sweeps.sweep_description import FILENAME
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.e2e.warm import Script
from tests.processes import children, until

CONFIG = """# @package _global_
defaults:
  - spirals
  - override /hooks: [ema]
experiment_name: kills
engine: {max_iters: 24, val_interval: 12, val_by_epoch: false, test: false, sanity_val_steps: 0}
default_hooks:
  logger: {interval: 8}
  checkpoint: {interval: 6, by_epoch: false, save_best: accuracy}
hooks:
  ledger: {_target_: my_project.kills.Ledger, path: "${hydra:sweep.dir}/ledger", job: "${hydra:job.num}"}
  nowhere: {_target_: my_project.kills.Nowhere}
"""
PHASES = ("begin", "iteration", "save", "trained", "done")
"""When a process is killed: events of the ledger. A random delay follows. A paused trial has no `done`."""
VICTIMS = ("controller", "fork server", "job", "follower", "everything")
"""What is killed. After `everything`, as after a power failure, a file may be torn."""
ON_RAY = ("controller", "actor", "node", "job")
"""The same for jobs on Ray: the parents of a job are the worker of an actor, and the raylet."""
PATIENCE = 300
"""Seconds for a sweep on a busy machine."""
_ROUNDS = 10
"""Controllers after the last kill."""


@dataclass(frozen=True)
class Kill:
    """A signal 9."""

    victim: str
    phase: str
    count: int
    """How many such events are waited for."""
    delay: float
    torn: str | None = None
    """The file that is cut at a random byte: `job.json` of any job, or `sweep.json`."""

    @classmethod
    def draw(
        cls,
        draws: random.Random,
        victims: Sequence[str] = (*VICTIMS, "job", "job"),
        phases: Sequence[str] = PHASES,
    ) -> Kill:
        """Return a random one."""
        victim = draws.choice(victims)
        torn = draws.choice((None, states.FILENAME, FILENAME)) if victim == "everything" else None
        phase = draws.choice(phases)
        return cls(victim, phase, draws.randint(1, 6) if phase == "iteration" else 1, draws.random() * 0.05, torn)


@dataclass
class Sweep:
    """A sweep, its controllers and what was killed."""

    project: Project
    path: Path
    overrides: tuple[str, ...]
    draws: random.Random
    workers: int
    kills: list[Kill] = field(default_factory=list)
    controllers: list[Script] = field(default_factory=list)
    processes: set[tuple[int, float | None]] = field(default_factory=set)
    """Every process that was seen."""

    @property
    def line(self) -> list[str]:
        """The overrides."""
        return [
            "-m",
            "experiment=kills",
            *self.overrides,
            f"hydra.sweep.dir={self.path.name}",
            f"sweep.max_workers={self.workers}",
        ]

    def start(self) -> None:
        """Start a controller."""
        options = [f"sweep.max_retries={self.draws.choice((0, 9))}"]
        options += [f"sweep.resume={self.path.name}"] if (self.path / FILENAME).exists() else []
        self.controllers.append(self.project.begin(*self.line, *options))

    def running(self) -> list[Script]:
        """Return the controllers that have not ended."""
        return [script for script in self.controllers if script.poll() is None]

    def events(self) -> list[tuple[int, int, str]]:
        """Return the complete lines of the ledger: job, process, event."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "ledger").read_text().splitlines(keepends=True)
            found = [line.split(maxsplit=2) for line in lines if line.endswith("\n")]
            return [(int(job), int(pid), event.strip()) for job, pid, event in found]
        return []

    def wait(self, happened: Callable[[], bool], what: str) -> bool:
        """Wait until something has happened. Returns False if all controllers have ended before."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE} s\n{self.printed()}"
            if not self.running():
                return happened()
            time.sleep(0.002)
        return True

    def printed(self) -> str:
        """Return what the controllers have printed."""
        return "\n".join(
            f"--- {script.pid}, exit code {script.returncode}\n{script.printed}" for script in self.controllers
        )

    def kill(self, kill: Kill) -> None:
        """Wait for the moment of a kill, and kill, unless the sweep ends before."""
        before = len(self.events())

        def seen() -> list[tuple[int, int, str]]:
            return [one for one in self.events()[before:] if one[2].startswith(kill.phase)]

        if not self.wait(lambda: len(seen()) >= kill.count, f"{kill}"):
            return
        time.sleep(kill.delay)
        pids = list(self.victims(kill, seen()[kill.count - 1]))
        self.note(*pids)
        hits = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                hits += 1
        for script in self.running():
            if script.pid in pids:
                script.wait(PATIENCE)
        if kill.victim == "everything":
            self.tear(kill)
        if hits:
            self.kills.append(kill)

    def victims(self, kill: Kill, event: tuple[int, int, str]) -> Iterator[int]:
        """Yield the processes to be killed."""
        controllers = self.running()
        if kill.victim == "job":
            trees = [_tree(pid) for number, pid in self.alive() if number == event[0]]
            pids = [pid for tree in trees for pid in tree if pid in (tree[0], event[1])]  # it has several with ranks
            yield from self.draws.sample(pids, min(1, len(pids)))
        if kill.victim in ("actor", "node"):
            roots = [pid for number, pid in self.alive() if number == event[0]]
            with contextlib.suppress(psutil.Error, IndexError):
                parents = [psutil.Process(pid).parents() for pid in roots[:1]]
                found = [parent.pid for each in parents for parent in each if parent.pid > 1]  # 1 adopts orphans
                yield found[("actor", "node").index(kill.victim)]
        if kill.victim == "controller" and controllers:
            yield self.draws.choice(controllers).pid
        if kill.victim == "fork server" and controllers:
            script = self.draws.choice(controllers)
            yield from (process.pid for process in children() if process.ppid() == script.pid)
        if kill.victim == "follower":
            deadline = time.monotonic() + 1.0
            while not (pids := self.followers()) and time.monotonic() < deadline:
                time.sleep(0.002)
            yield from pids[:1]
        if kill.victim == "everything":
            self.note()
            yield from (script.pid for script in controllers)
            yield from (pid for pid, since in self.processes if is_alive(pid, since))
            yield from self.followers()

    def alive(self) -> list[tuple[int, int]]:
        """Return the numbers and the processes of jobs that hold their lock, if their state is readable."""
        folders = [file.parent for file in self.files(states.FILENAME)]
        found = [(states.read(folder), lock.holder(folder)) for folder in folders]
        return [(state.number, held.pid) for state, held in found if state is not None and held is not None]

    def files(self, pattern: str) -> list[Path]:
        """Return files of jobs: in their run directories, which may be in other folders, and beside their states."""
        return [path for folders in ("*", "*/*") for path in self.path.glob(f"{folders}/{pattern}")]

    def followers(self) -> list[int]:
        """Return the followers that run."""
        pids = []
        for path in self.files("tracking/*.pid"):
            with contextlib.suppress(OSError, ValueError):
                _, (pid, since), _ = json.loads(path.read_text())
                pids += [pid] if is_alive(pid, since) else []
        return self.draws.sample(pids, len(pids))

    def tear(self, kill: Kill) -> None:
        """Cut a file at a random byte. A damaged `sweep.json` is refused; then it is put back, as the message asks."""
        files = [path for path in self.files(kill.torn) if path.stat().st_size] if kill.torn else []
        if kill.torn == FILENAME:
            files = [self.path / FILENAME]
        if not files:
            return
        file = self.draws.choice(sorted(files))
        content = file.read_bytes()
        file.write_bytes(content[: self.draws.randrange(len(content))])
        if kill.torn == FILENAME:
            done = self.project.train(*self.line, f"sweep.resume={self.path.name}")
            assert done.code == 2, done.text
            assert done.err.count("error: ") == 1, done.text
            file.write_bytes(content)

    def note(self, *pids: int) -> None:
        """Remember processes, to see at the end that none is left."""
        self.processes.update((pid, started(pid)) for pid in pids)
        roots = [script.pid for script in self.running()]
        roots += [pid for _, pid in self.alive()]
        self.processes.update((pid, started(pid)) for root in roots for pid in _tree(root))


def make(path: Path, *, before: str = "") -> Project:
    """Return the project of the sweeps.

    Args:
        before: code at the top of `train.py`.
    """
    project = Project.make(path)
    project.write("conf/experiment/kills.yaml", CONFIG)
    for name, target in (("in_project.py", "kills.py"), ("in_follower.py", "kills_follower.py")):
        shutil.copy(Path(__file__).with_name(name), project.path / "my_project" / target)
    project.write("train.py", before + (project.path / "train.py").read_text())
    return project


def train(
    project: Project,
    name: str,
    overrides: tuple[str, ...],
    draws: random.Random,
    kills: list[Kill],
    controllers: int = 1,
) -> Sweep:
    """Run a sweep with these kills until all of its jobs have ended.

    Args:
        overrides: axes and options.
        controllers: that are started at once.

    Raises:
        AssertionError: it hangs, does not end, or leaves processes.
    """
    sweep = Sweep(project, project.path / name, overrides, draws, workers=draws.randint(1, 3))
    sweep.start()
    for _ in range(1, controllers):
        assert sweep.wait((sweep.path / FILENAME).exists, "no sweep has begun")
        sweep.start()
    for kill in kills:
        if not sweep.running():
            if is_over(sweep):
                break
            sweep.start()
        sweep.kill(kill)
    for _ in range(_ROUNDS):  # a job that was killed is interrupted, and continued by the next controller
        for script in sweep.running():
            sweep.note()
            script.wait(PATIENCE)
        if is_over(sweep):
            break
        sweep.start()
    assert is_over(sweep), f"the jobs have not ended:\n{sweep.printed()}"
    try:
        until(lambda: not any(is_alive(*one) for one in sweep.processes), "no process is left", seconds=PATIENCE)
    except AssertionError as error:
        left = [psutil.Process(pid).cmdline() for pid, since in sweep.processes if is_alive(pid, since)]
        raise AssertionError(f"processes are left: {left}") from error
    return sweep


def is_over(sweep: Sweep) -> bool:
    """Return whether all jobs have an outcome."""
    if not (sweep.path / FILENAME).exists():
        return False
    return all(state.is_over for state in SweepDirectory.load(sweep.path).states())


def _tree(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    with contextlib.suppress(psutil.Error):
        return [pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))]
    return []
