"""What each job of a sweep gets of this machine: GPUs and CPU threads.

nvidia-smi lists the GPUs. torch is never asked: a process that has opened a GPU cannot be forked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hydraloop.errors import UserError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHERS = {"submitit": ("Slurm", "+sweep.submitit.gpus_per_node"), "ray": ("Ray", "sweep.ray.num_gpus")}
"""What else chooses the GPUs of a job, and its option for them, by executor."""
_PATIENCE = 60.0
"""Seconds for nvidia-smi, which initializes all GPUs if the driver's persistence mode is off."""
SUBMITTED = 32
"""Jobs that are given to Slurm at a time, by default. Slurm decides which of them run."""


class Slots:
    """The GPUs that jobs may use, and which jobs have them.

    Args:
        gpus: for CUDA_VISIBLE_DEVICES: numbers or UUIDs.
        per_job: a whole number; or a fraction, then jobs share a GPU.

    Raises:
        UserError: a job cannot have so many.
    """

    def __init__(self, gpus: Sequence[str], per_job: float) -> None:
        if not 0 < per_job <= len(gpus) or (per_job > 1 and per_job % 1):
            problem = f"{per_job:g} is neither a fraction of a GPU nor a number of the GPUs of this sweep ({len(gpus)})"
            remedy = "Use 0.5, 1 or more. Without GPUs, leave it out, and use sweep.max_workers=2."
            raise UserError(problem, key="sweep.gpus_per_job", remedy=remedy)
        self._each = max(1, int(per_job))
        self._free = [*gpus] * max(1, int(1 / per_job))
        """A GPU is listed once for each further job that it may have."""
        self._taken: dict[int, list[str]] = {}
        self.most = len(self._free) // self._each
        """Jobs that can run at a time."""

    @property
    def are_free(self) -> bool:
        """Whether there are GPUs for another job."""
        return len(self._free) >= self._each

    def take(self, number: int) -> tuple[str, ...] | None:
        """Return the GPUs for a job, those with the fewest jobs first; None if too few are free."""
        if not self.are_free:
            return None
        self._taken[number] = []
        for _ in range(self._each):
            gpu = max(self._free, key=self._free.count)
            self._free.remove(gpu)
            self._taken[number].append(gpu)
        return tuple(self._taken[number])

    def give(self, number: int) -> None:
        """Take back the GPUs of a job that has ended, if it has any."""
        self._free += self._taken.pop(number, [])


@dataclass(frozen=True, slots=True)
class Shares:
    """How this machine is divided among the jobs."""

    workers: int
    """Jobs that run at a time."""
    slots: Slots | None = None
    """None: jobs use no GPUs, or those that Slurm gives them."""
    threads: int | None = None
    """Of each process, for tensor operations. None: not divided."""


def shares(options: Any, *, ranks: int = 1, device: str = "auto") -> Shares:
    """Divide this machine by the options of a sweep.

    Args:
        options: `sweep.*`.
        ranks: the most processes of a job.
        device: `cpu` if no job uses a GPU.

    Raises:
        UserError: there are not so many GPUs, or Slurm or Ray chooses them.
    """
    if options.executor != "pool":
        if options.gpus is not None or options.gpus_per_job != 1:
            scheduler, other = _OTHERS[options.executor]
            remedy = f"Use {other} instead of sweep.gpus and sweep.gpus_per_job."
            raise UserError(f"{scheduler} chooses the GPUs of a job", key="sweep.gpus", remedy=remedy)
        return Shares(options.max_workers or SUBMITTED)
    slots = _slots(options, ranks, device)
    workers = int(options.max_workers or (1 if slots is None else slots.most))
    workers = workers if slots is None else min(workers, slots.most)
    if workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return Shares(workers, slots)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Shares(workers, slots, max(1, cores // (workers * ranks)))


def visible() -> list[str]:
    """Return the GPUs that a run on this machine can use, for CUDA_VISIBLE_DEVICES; empty without NVIDIA's driver.

    They are the entries of that variable, up to the first one that is not a GPU, as for CUDA. Without it, they are
    UUIDs, because the numbers of nvidia-smi are not those of CUDA.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    uuids = re.findall(r"^GPU .*\(UUID: (\S+)\)$", listed.stdout, re.MULTILINE)
    if _VISIBLE not in os.environ:
        return uuids
    numbers = list(map(str, range(len(uuids))))
    names = map(str.strip, os.environ[_VISIBLE].split(","))
    return list(takewhile(lambda name: name in numbers or name.startswith(("GPU-", "MIG-")), names))


def _slots(options: Any, ranks: int, device: str) -> Slots | None:
    gpus = visible() if options.gpus is not None or device != "cpu" else []
    if options.gpus is not None:
        for number in options.gpus:
            if not 0 <= number < len(gpus):
                problem = f"GPU {number} does not exist: {len(gpus)} found"
                raise UserError(problem, key="sweep.gpus", remedy="Count from 0, as in cuda:0, or leave it out.")
        names = gpus if _VISIBLE in os.environ else list(map(str, range(len(gpus))))
        gpus = [names[number] for number in dict.fromkeys(options.gpus)]
    if not gpus and options.gpus_per_job == 1:
        return None
    slots = Slots(gpus, float(options.gpus_per_job))
    if ranks > max(1, options.gpus_per_job):
        raise UserError(
            f"the {ranks} ranks of a job need {ranks} GPUs, and it has {options.gpus_per_job:g}",
            key="distributed.nproc_per_node",
            remedy=f"Use sweep.gpus_per_job={ranks}, or engine.device=cpu.",
        )
    return slots
