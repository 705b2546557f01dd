"""Sweeps of which processes are killed at random moments, and which are resumed until they have ended."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.e2e.projects import Project
from tests.e2e.warm import Script
from tests.processes import command_line, running_in, until

CONFIG = """# @package _global_
defaults:
  - spirals
  - override /hooks: [ema]
experiment_name: kills
engine: {max_iters: 24, val_interval: 6, val_by_epoch: false, test: false, sanity_val_steps: 0}
default_hooks:
  logger: {interval: 8}
  checkpoint: {interval: 6, by_epoch: false, save_best: accuracy}
hooks:
  ledger: {_target_: my_project.kills.Ledger, path: "${hydra:sweep.dir}/ledger", job: "${hydra:job.num}"}
"""
PATIENCE = 900.0
"""Seconds for a sweep on a busy machine."""
Event = tuple[int, int, str]
"""Job, process and what has happened."""


@dataclass(frozen=True)
class Kill:
    """A signal 9."""

    victim: str
    phase: str
    """An event of the ledger; `written`: `job.json` says that a job runs, which has not begun."""
    count: int = 1
    """How many such events are waited for."""
    delay: float = 0.0
    """Seconds after that event."""


@dataclass
class Sweep:
    """A sweep with MLflow, the controllers that run, and what was killed."""

    project: Project
    name: str
    line: tuple[str, ...]
    """Axes and options."""
    draws: random.Random = field(default_factory=random.Random)
    controllers: list[Script] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Controllers that have ended because another one was running."""
    synced: int = 0
    """1 if the last output named a command that sends the rest to MLflow. The command is run."""
    is_over: bool = False
    printed: str = ""
    """By controllers that have ended."""
    last: str = ""
    """By the controller that has ended the sweep."""

    VICTIMS: ClassVar[tuple[str, ...]] = ("controller", "fork server", "job", "sender", "everything")
    PHASES: ClassVar[tuple[str, ...]] = ("written", "begin", "iteration", "save", "trained", "done")
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Where the jobs run."""

    def __post_init__(self) -> None:
        self.path = self.project.path / self.name
        self.store = self.project.path / f"store_{self.name}"
        self.temporary = self.project.path / f"tmp_{self.name}"
        for folder in (self.store, self.temporary):
            folder.mkdir()

    @classmethod
    def kills(cls, draws: random.Random, count: int) -> deque[Kill]:
        """Return random kills, with each victim and each phase equally often."""
        victims = [cls.VICTIMS[number % len(cls.VICTIMS)] for number in range(count)]
        phases = [cls.PHASES[number % len(cls.PHASES)] for number in range(count)]
        draws.shuffle(victims)
        draws.shuffle(phases)
        return deque(
            Kill(victim, phase, draws.randint(1, 6) if phase == "iteration" else 1, draws.random() * 0.05)
            for victim, phase in zip(victims, phases, strict=True)
        )

    def words(self) -> list[str]:
        """Return the command line of a controller."""
        words = ["-m", "experiment=kills", "hooks=[ema,mlflow]", *self.line, *self.OPTIONS]
        words += [f"hydra.sweep.dir={self.name}", f"hooks.mlflow.tracking_uri=sqlite:///{self.store}/mlflow.db"]
        return words + ([f"sweep.resume={self.name}"] if (self.path / "sweep.json").exists() else [])

    def start(self, together: int = 1) -> None:
        """Start controllers at the same moment."""
        words = self.words()
        self.controllers += [self.project.begin(*words, TMPDIR=str(self.temporary)) for _ in range(together)]

    def running(self) -> Sequence[Any]:
        """Return the controllers that have not ended."""
        for script in [script for script in self.controllers if script.poll() is not None]:
            self.controllers.remove(script)
            text, _ = script.communicate()
            self.printed += f"--- exit code {script.returncode}\n{text}"
            self.last = self.last if script.returncode else text
            assert script.returncode in (0, 1, 2, -signal.SIGKILL), self.printed
            self.is_over = self.is_over or script.returncode == 0
            if script.returncode == 2:
                assert text.count("error: ") == 1, self.printed
                self.refused += 1
        return self.controllers

    def events(self) -> list[Event]:
        """Return the complete lines of the ledger."""
        return events(self.path)

    def written(self, since: int) -> list[Event]:
        """Return the jobs of which `job.json` says since a time that they run."""
        found = []
        for file in self.path.glob("*/job.json"):
            with contextlib.suppress(OSError, ValueError):
                if file.stat().st_mtime_ns > since and json.loads(file.read_text())["state"] == "running":
                    found.append((int(file.parent.name), 0, "written"))
        return found

    def kill(self, kill: Kill) -> bool:
        """Wait for the moment of a kill, and kill. Return whether there was a living process before the sweep ended."""
        before, since, deadline = len(self.events()), time.time_ns(), time.monotonic() + PATIENCE
        while self.running():
            assert time.monotonic() < deadline, f"{kill}: the moment does not come\n{self.printed}"
            found = [event for event in self.events()[before:] if event[2].startswith(kill.phase)]
            found = self.written(since) if kill.phase == "written" else found
            if len(found) >= kill.count:
                time.sleep(kill.delay)
                return self.strike(kill, found[-1])
            time.sleep(0.005)
        return False

    def strike(self, kill: Kill, event: Event) -> bool:
        """Kill the processes. Return whether one was alive."""
        found = [process for process in self.victims(kill.victim, event) if command_line(process)]
        self.draws.shuffle(found)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return bool(found)

    def victims(self, victim: str, event: Event) -> list[psutil.Process]:
        """Return the processes to be killed."""
        owners = [psutil.Process(script.pid) for script in self.running()]
        forks = {owner: [each for each in _children(owner) if same(each, owner)] for owner in owners}
        assert sum(map(bool, forks.values())) <= 1, f"two controllers run jobs\n{self.printed}"
        servers = [server for found in forks.values() for server in found]
        jobs = [job for server in servers for job in _children(server)]
        if victim == "rank":
            return [
                process for server in servers for process in server.children(recursive=True) if process.pid == event[1]
            ]
        if victim == "job":
            begun = {pid for _, pid, _ in self.events()}
            return [job for job in jobs if (job.pid == event[1] if event[1] else job.pid not in begun)][:1]
        senders = [process for process in running_in(self.project.path) if "--follow" in command_line(process)]
        return {
            "controller": [owner for owner, found in forks.items() if found],
            "fork server": servers,
            "sender": senders,
            "everything": [*owners, *servers, *jobs, *senders],
        }[victim]

    def train(self, kills: deque[Kill], together: int = 1) -> None:
        """Run the sweep to its end, and the command that sends the rest if the last output names one.

        Kills that have not found a living process are appended again.

        Args:
            together: controllers that start at the same moment, at first.

        Raises:
            AssertionError: it does not end, leaves processes, or names a command that does not send the rest.
        """
        deadline = time.monotonic() + PATIENCE
        self.start(together)
        while self.running() or not self.is_over:
            assert time.monotonic() < deadline, f"the sweep does not end\n{self.printed}"
            if not self.running():
                self.start(self.draws.choice((1, 1, 2)))
            elif not kills:
                time.sleep(0.1)
            else:
                kill = kills.popleft()
                if self.kill(kill):
                    self.killed[kill.victim] += 1
                    self.killed[kill.phase] += 1
                else:
                    kills.append(replace(kill, delay=kill.delay / 2))
        until(lambda: not self.processes(), f"processes are left: {self.processes()}")
        for command in re.findall(r"^warning: mlflow: .*; (hydraloop .*) sends the rest$", self.last, re.MULTILINE):
            done = self.project.python("-m", *shlex.split(command))
            assert done.code == 0, f"{self.printed}--- {command}\n{done.text}"
            self.synced = 1

    def processes(self) -> list[list[str]]:
        """Return the command lines of the processes in the project."""
        return [command_line(process) for process in running_in(self.project.path)]

    def answer(self, command: str) -> dict[str, Any]:
        """Return what `status` or `results` says."""
        done = self.project.python("-m", "hydraloop", command, self.name, "--json")
        assert done.code == 0, done.text
        answer: dict[str, Any] = json.loads(done.out)
        return answer


def make(path: Path, *, before: str = "") -> Project:
    """Return the project of the sweeps.

    Args:
        before: code at the top of `train.py`.
    """
    project = Project.make(path)
    project.write("conf/experiment/kills.yaml", CONFIG)
    shutil.copy(Path(__file__).with_name("in_project.py"), project.path / "my_project" / "kills.py")
    project.write("train.py", before + (project.path / "train.py").read_text())
    return project


def events(path: Path) -> list[Event]:
    """Return the complete lines of the ledger in the directory of a sweep."""
    with contextlib.suppress(FileNotFoundError):
        lines = (path / "ledger").read_text().splitlines(keepends=True)
        found = [line.split(maxsplit=2) for line in lines if line.endswith("\n")]
        return [(int(job), int(pid), event.strip()) for job, pid, event in found]
    return []


def same(process: psutil.Process, other: psutil.Process) -> bool:
    """Return whether a process is a fork of another one."""
    return command_line(process) == command_line(other)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []
