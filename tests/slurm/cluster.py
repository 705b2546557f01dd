"""Slurm: a cluster whose nodes are namespaces of process ids on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.processes import until
from tests.slurm.packages import unpacked

CPUS = 4
"""CPUs that each node says it has."""
_CONF = """ClusterName=hydraloop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=15
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
KillWait=30
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.{number} Port={port} CPUs={cpus} RealMemory=2000 "
    "State=UNKNOWN\n"
)
_INIT = 'hostname "$1"; slurmd-wlm -D -f "$2" -N "$1" -d "$(command -v slurmstepd-wlm)" & sleep infinity & wait'
"""The first process of a node. It stays when slurmd is killed."""
_TIED = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: the process ends with the tests, also if they are killed."""


class Slurm:
    """A cluster.

    Args:
        folder: for its files; empty.
        nodes: their names.
        lines: further lines of slurm.conf, such as `MaxArraySize=11`.
        root: the folder with the packages of Slurm; by default, those that a cluster without accounting needs.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = ("n1", "n2"),
        lines: Sequence[str] = (),
        root: Path | None = None,
    ) -> None:
        root, (first, *ports) = root or unpacked(), free_ports(1 + len(nodes))
        libraries = root / "usr/lib/x86_64-linux-gnu"
        plugins = libraries / "slurm-wlm"
        self.folder, self.nodes, self._conf = folder, tuple(nodes), folder / "slurm.conf"
        (folder / "state").mkdir()
        (folder / "slurmctld").symlink_to(root / "usr/sbin/slurmctld-wlm")  # with its own name, accounting crashes it
        text = _CONF.format(host=socket.gethostname(), ports=[first, *ports], plugins=plugins, folder=folder)
        text += "".join(f"{line}\n" for line in lines)
        text += "".join(
            _NODE.format(name=name, port=port, cpus=CPUS, number=number)
            for number, (name, port) in enumerate(zip(nodes, ports, strict=True), start=1)
        )
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        self._conf.write_text(text)
        self.environment = {
            "SLURM_CONF": str(self._conf),
            "PATH": f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{plugins}:{root}/lib/x86_64-linux-gnu",
        }
        """Variables of processes that call Slurm's commands."""
        self._controller: subprocess.Popen[bytes] | None = None
        self._alive: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *words: str) -> str:
        """Run a command, such as `squeue`, and return its output."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, such as `RUNNING`; of the first task of an array."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").split()[0]

    def start(self) -> None:
        """Start what does not run, and wait until all nodes take jobs."""
        if self._controller is None or self._controller.poll() is not None:
            self._controller = self._started(str(self.folder / "slurmctld"), "-D", "-f", str(self._conf))
        for name in self.nodes:
            if name in self._alive and self._slurmd(name) is None:
                self.kill_node(name)
            if name not in self._alive:
                words = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", _INIT, "sh")
                spool = self.folder / f"spool-{name}"  # with its earlier contents, Slurm holds the jobs of a dead node
                shutil.rmtree(spool, ignore_errors=True)
                spool.mkdir()
                self._alive[name] = self._started(*words, name, str(self._conf))
        until(self._is_ready, f"Slurm is not ready, see {self.folder}/*.log")

    def _is_ready(self) -> bool:
        with suppress(AssertionError):  # the controller does not answer yet
            states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
            return len(states) == len(self.nodes) and set(states) <= {"idle", "mixed", "allocated"}
        return False

    def _started(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "started.log").open("ab") as log:
            return subprocess.Popen(
                [*_TIED, *words],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # at its end, slurmctld ends its process group
            )

    def _slurmd(self, name: str) -> psutil.Process | None:
        for process in self.processes(name):
            with suppress(psutil.Error):
                if process.name() == "slurmd-wlm" and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of a node."""
        with suppress(psutil.Error):
            return psutil.Process(self._alive[name].pid).children(recursive=True)
        return []

    def kill_slurmd(self, name: str) -> None:
        """Kill the daemon of a node. Its jobs keep running, and Slurm starts them elsewhere after SlurmdTimeout."""
        slurmd = self._slurmd(name)
        assert slurmd is not None
        slurmd.kill()

    def kill_slurmctld(self) -> None:
        """Kill what answers all commands, until `start`. Jobs keep running."""
        if self._controller is not None:
            self._controller.kill()
            self._controller.wait()

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node."""
        processes, node = self.processes(name), self._alive.pop(name)
        node.kill()
        node.wait()
        psutil.wait_procs(processes, timeout=10)

    def cancel_all(self) -> None:
        """End all jobs of the cluster, and the processes in the background that know it."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("SLURM_CONF") == str(self._conf)
                if is_ours and psutil.Process() not in process.parents():
                    process.kill()
        self.start()
        for words in (["--full", "--signal=KILL"], []):
            subprocess.run(["scancel", "--me", *words], env={**os.environ, **self.environment}, check=False)
        until(lambda: not self.run("squeue", "--noheader"), "Slurm does not end its jobs")

    def stop(self) -> None:
        """Kill all that belongs to the cluster."""
        for name in list(self._alive):
            self.kill_node(name)
        self.kill_slurmctld()


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]
