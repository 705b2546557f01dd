"""Kills jobs, controllers and nodes of a real Slurm: `python -m tests.faults.sweeps.on_slurm [kills] [seed]`.

All controllers are jobs of Slurm, too (`detach=true`). Takes about 20 minutes for 20 kills on two processors.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil
from hydra.core.utils import env_override

from hydraloop.launch.detach import CONTROLLER_LOG
from tests.faults.sweeps import suite
from tests.faults.sweeps.harness import Event, Kill, Sweep
from tests.processes import command_line, until
from tests.slurm import Slurm, running

_SBATCH = """#!/bin/sh
if mv {flag} {flag}.used 2>/dev/null; then
    {sbatch} "$@" >&2
    echo "Socket timed out" >&2
    exit 1
fi
exec {sbatch} "$@"
"""
"""Fails once after Slurm has taken the job, if there is a file."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


@dataclass
class OnSlurm(Sweep):
    """A sweep whose jobs are those of Slurm, as are its controllers."""

    ids: list[str] = field(default_factory=list)
    """The jobs of the controllers that run."""
    read: int = 0
    """Characters of the log of all controllers that were read."""

    VICTIMS = ("job", "controller", "controller of waiting jobs", "time limit", "sbatch", "slurmd")
    """`time limit`: what Slurm does then to a controller. `sbatch`: fails after Slurm has taken the job."""
    PHASES = ("begin", "iteration", "save", "trained")
    OPTIONS = ("sweep.executor=submitit", "sweep.submitit.timeout_min=60", "detach=true")
    SLURM: ClassVar[Slurm]

    def start(self, together: int = 1) -> None:
        """Submit controllers at the same moment."""
        super().start(together)
        for script in self.controllers:
            text, _ = script.communicate()
            self.printed += f"--- submitted, exit code {script.returncode}\n{text}"
            if script.returncode == 0:
                self.ids += re.findall(r"is job (\d+) of Slurm", text)
            else:
                assert text.count("error: ") == 1, self.printed
                self.refused += 1
        self.controllers.clear()

    def running(self) -> list[str]:
        """Return the jobs of the controllers that have not ended."""
        for job in list(self.ids):
            shown = dict(re.findall(r"(JobState|ExitCode)=(\S+)", self.SLURM.run("scontrol", "show", "job", job)))
            if shown["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"):
                self.ids.remove(job)
                text = (self.path / CONTROLLER_LOG).read_text()
                new, self.read = text[self.read :], len(text)
                self.printed += f"--- controller {job}: {shown}\n{new}"
                self.last = new if shown["JobState"] == "COMPLETED" else self.last
                self.is_over = self.is_over or shown["JobState"] == "COMPLETED"
                self.refused += shown["ExitCode"] == "2:0"
        return self.ids

    def strike(self, kill: Kill, event: Event) -> bool:
        """Kill what is needed. Return whether it was there."""
        if kill.victim == "sbatch":
            return self._refuse_once()
        if kill.victim == "time limit":
            return any(self.SLURM.run("scancel", "--signal=TERM", job) == "" for job in self.running())
        if kill.victim == "controller of waiting jobs":
            while not self._waiting():
                if not self.running():
                    return False
        if kill.victim.startswith("controller"):
            return any(self._kill(job) for job in self.running())
        job = str(event[1] // 10**8)
        if kill.victim == "job":
            return self._kill(job)
        node = self.SLURM.run("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip() if event[1] else ""
        if node not in self.SLURM.nodes:
            return False
        self.SLURM.kill_slurmd(node)
        if self.draws.random() < 0.5:  # Slurm sees that the node is dead, and starts its jobs on the other one
            until(lambda: "down" in self.SLURM.run("sinfo", "--noheader", "--Node", "--format=%T"), "a node is down")
        self.SLURM.start()
        return True

    def _waiting(self) -> bool:
        jobs = self.SLURM.run("squeue", "--noheader", "--format=%i %T").splitlines()
        return any(state in _WAITING for job, state in map(str.split, jobs) if job not in self.ids)

    def _kill(self, job: str) -> bool:
        """Kill the process of a job of Slurm."""
        found = [process for process in self._trees() if _is_of(process, job)]
        for process in found[:1]:
            process.kill()
        return bool(found)

    def _trees(self) -> Iterator[psutil.Process]:
        for node in self.SLURM.nodes:
            yield from self.SLURM.processes(node)

    def _refuse_once(self) -> bool:
        """Let the next `sbatch` of a controller fail after Slurm has taken the job."""
        flag = self.SLURM.folder / "flag"
        flag.touch()
        while self.running() and flag.exists():
            pass
        was_used = not flag.exists()
        flag.unlink(missing_ok=True)
        return was_used


def _is_of(process: psutil.Process, job: str) -> bool:
    with suppress(psutil.Error):
        return "train.py" in command_line(process) and process.environ().get("SLURM_JOB_ID") == job
    return False


def main(count: int = 20, seed: int = 0) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slurm = OnSlurm.SLURM = stack.enter_context(running(folder))
        sbatch = shutil.which("sbatch", path=slurm.environment["PATH"])
        (folder / "bin").mkdir()
        (folder / "bin" / "sbatch").write_text(_SBATCH.format(flag=folder / "flag", sbatch=sbatch))
        (folder / "bin" / "sbatch").chmod(0o755)
        path = f"{folder}/bin:{slurm.environment['PATH']}"
        stack.enter_context(env_override({**slurm.environment, "PATH": path}))
        return suite.main(count, seed, OnSlurm, suite.FEW)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    sys.exit(main(*map(int, sys.argv[1:])))
