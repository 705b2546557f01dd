"""Runs that are killed at random moments and started again until they end."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from tests.e2e.projects import Project, Run
from tests.e2e.warm import Script
from tests.processes import children, command_line

CONFIG = """# @package _global_
# 20 batches of 8 samples (the last of an epoch has 4), in windows of 3. Checkpoints after each window.
defaults:
  - /optimizer@optimizer.body: adamw
  - /optimizer@optimizer.head: sgd
  - override /data: base
  - override /model: null
  - override /optimizer: null
  - override /scheduler: cosine
  - override /hooks: [ema]
experiment_name: faults
engine: {max_epochs: 2, accumulate: 3, test: true, sanity_val_steps: 0}
data:
  train: {_target_: my_project.faults.Points, samples: 76}
  val: {_target_: my_project.faults.Points, samples: 24}
  test: {_target_: my_project.faults.Points, samples: 24}
  loader: {batch_size: 8}
task: {model: {_target_: my_project.faults.Model}}
optimizer:
  body: {lr: 1e-2}
  head: {match: "head.*", lr: 1e-1, momentum: 0.9}
default_hooks:
  logger: {interval: 4}
  checkpoint: {interval: 1, by_epoch: false, save_best: loss}
hooks:
  ledger: {_target_: my_project.faults.Ledger, path: "${hydra:runtime.output_dir}/ledger"}
  witness: {_target_: my_project.faults.Witness, path: "${hydra:runtime.output_dir}/witness"}
"""
TWO = "distributed.nproc_per_node=2"
KINDS: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "two workers": ("data.loader.num_workers=2",),
    "workers of an epoch": ("data.loader.num_workers=1", "data.loader.persistent_workers=false"),
    "stream": ("data.train._target_=my_project.faults.Stream", "data.loader.steps_per_epoch=10"),
    "two ranks": (TWO, "data.loader.batch_size=4"),
    "two ranks, workers": (TWO, "data.loader.batch_size=4", "data.loader.num_workers=1", "engine.max_epochs=4"),
    "two ranks, FSDP2": (TWO, "data.loader.batch_size=4", "distributed.strategy=fsdp2"),
    "two ranks, stream": (
        TWO, "data.loader.batch_size=4", "data.train._target_=my_project.faults.Stream",
        "data.loader.steps_per_epoch=10",
    ),
    "two ranks, sync_buffers": (TWO, "data.loader.batch_size=4", "hooks=[ema,sync_buffers]"),
    "two ranks, sync_norm": (TWO, "data.loader.batch_size=4", "hooks=[ema,sync_norm]"),
}  # fmt: skip
"""What is killed: the overrides of each kind of run. The model has batch norm."""
ALL_HOOKS = (
    "hooks=[ema,sync_buffers,sync_norm,early_stopping,check_invalid_loss,freeze,set_epoch_info,mode_switch,"
    "num_class_check,sync_random_size,visualization,tta,tensorboard,memory_profiler,empty_cache,profiler,anomaly_detection]",
    "hooks.early_stopping.monitor=loss",
    "hooks.early_stopping.patience=50",
    "hooks.check_invalid_loss.interval=2",
    "hooks.freeze.modules=[layers.0]",
    "hooks.freeze.epochs=1",
    "hooks.mode_switch.num_last_epochs=1",
    "hooks.sync_random_size.interval=2",
)
"""The hooks that can be selected together, without the trackers of `tests/faults/trackers.py`. An unfrozen module, a
switched data set and a rate of an average follow from the position; the others have states, buffers or files."""
PHASES = ("iteration", "save", "evaluation", "shutdown", "resume", "start")
"""When it is killed: lines of the hook `Witness`. A random delay follows."""
VICTIMS = ("run", "worker", "rank 0", "rank 1", "disk")
"""What is killed: the process that was started, a worker of rank 0's loader, or a rank. "disk": the disk is full from
the moment on, and the process that was started is killed when training has continued after a failed save."""
PATIENCE = 120
"""Seconds for a busy machine."""
FREE = 32 * 1024
"""Bytes that a file can have on the full disk: a checkpoint has 40 KB, and all other files of a run have less."""
REFUSED = "could not be written: File too large"
"""The warning of a failed save."""


@dataclass(frozen=True)
class Kill:
    """A signal 9."""

    phase: str
    """An entry of `PHASES`."""
    number: int
    """How often the phase is seen before, in this attempt."""
    delay: float
    """Seconds after its begin."""
    victim: str = "run"
    """An entry of `VICTIMS`."""

    @classmethod
    def draw(cls, draws: random.Random, kind: str) -> Kill:
        """Return a random one for an entry of `KINDS`."""
        line = KINDS[kind]
        victims = ["run", "run", "disk"]
        victims += ["rank 0", "rank 1"] if TWO in line else []
        victims += ["worker"] if any("num_workers" in setting for setting in line) else []
        phase = draws.choice(PHASES)
        number = draws.randrange({"iteration": 8, "save": 4, "evaluation": 3}.get(phase, 1))
        return cls(phase, number, draws.random() * 0.03, draws.choice(victims))


@dataclass(frozen=True)
class Outcome:
    """What a run has left behind."""

    run: Run
    kills: tuple[Kill, ...]
    """Those that hit it; the others came after its end."""
    seconds_of_orphans: float
    """The longest time from a kill until the last process of the attempt had ended."""


class HungError(AssertionError):
    """An attempt has neither ended nor continued within `PATIENCE`."""


class OrphanError(AssertionError):
    """Processes of an attempt have not ended."""


def make(path: Path) -> Project:
    """Return the project of the runs."""
    project = Project.make(path)
    project.write("conf/experiment/faults.yaml", CONFIG)
    shutil.copy(Path(__file__).with_name("in_project.py"), project.path / "my_project" / "faults.py")
    return project


def train(project: Project, name: str, kind: str, kills: list[Kill], options: Sequence[str] = ()) -> Outcome:
    """Start a run in the directory `name` again and again, with one kill in each attempt, until it ends by itself.

    Args:
        options: overrides, such as `ALL_HOOKS`, which replace those of the kind with the same key.

    Raises:
        HungError: an attempt has not ended.
        OrphanError: an attempt has left processes.
        AssertionError: an attempt failed without a kill.
    """
    chosen = {option.partition("=")[0]: option for option in (*KINDS[kind], *options)}  # the later one of a key
    line = ["experiment=faults", "resume=auto", f"hydra.run.dir={name}", *chosen.values()]
    run, hits, orphans = Run(project.path / name), list[Kill](), 0.0
    for kill in kills:
        script = project.begin(*line)
        hit, seconds = _kill(script, run.path / "witness", kill)
        orphans = max(orphans, seconds)
        output = script.communicate(PATIENCE)[0]
        # A run that has ended on a full disk has no last checkpoint. It is started again like one that was killed.
        if script.returncode == 0 and not (hit and kill.victim == "disk"):
            return Outcome(run, tuple(hits), orphans)
        assert hit, f"failed before {kill}:\n{output}"
        hits.append(hit)
    script = project.begin(*line)
    wait(script, lambda: False, f"an attempt after {kills} has not ended")
    output = script.communicate(PATIENCE)[0]
    assert script.returncode == 0, f"failed after {kills}:\n{output}"
    return Outcome(run, tuple(hits), orphans)


def _kill(script: Script, witness: Path, kill: Kill) -> tuple[Kill | None, float]:
    """Wait for the moment, kill, and wait until all processes of the attempt have ended.

    Returns:
        What was killed, None if the run had ended before, and the seconds until the last process had ended.
    """
    phases = partial(seen, witness, _size(witness))
    if not wait(script, lambda: phases().count(kill.phase) > kill.number, f"{kill} was not reached"):
        return None, 0.0
    time.sleep(kill.delay)
    rank = int(phases()[0])
    if kill.victim == "disk" and not _fill_disk(script, rank, phases):
        return kill if REFUSED in script.printed else None, 0.0
    if script.poll() is not None:
        return None, 0.0
    started = children(psutil.Process(script.pid))
    victim = _victim(script, rank, kill.victim)
    if victim is None and kill.victim != "disk":
        kill = replace(kill, victim="run")
    with contextlib.suppress(ProcessLookupError):  # a worker that has ended in the meantime
        os.kill(victim or script.pid, signal.SIGKILL)
    at = time.monotonic()
    wait(script, lambda: False, f"the run has not ended after {kill}", also=started)
    while left := [process for process in started if command_line(process)]:
        if time.monotonic() > at + PATIENCE:
            found = [f"{process.pid}: {' '.join(command_line(process))}" for process in left]
            _abort(left)
            raise OrphanError(f"processes were left after {kill}: {found}")
        time.sleep(0.01)
    return kill, time.monotonic() - at


def wait(script: Script, moment: Callable[[], bool], what: str, also: Iterable[psutil.Process] = ()) -> bool:
    """Wait for a moment. Returns whether it has come; if not, the attempt has ended before.

    Args:
        also: processes of the attempt whose parent may have ended.

    Raises:
        HungError: `what`, with the stacks of the ranks, in the output. All processes of the attempt are killed.
    """
    until = time.monotonic() + PATIENCE
    while not moment():
        if script.poll() is not None:
            return False
        if time.monotonic() > until:
            process = psutil.Process(script.pid)
            _abort({*also, *children(process), process})
            raise HungError(f"{what}:\n{script.communicate(PATIENCE)[0]}")
        time.sleep(0.002)
    return True


def _abort(processes: Iterable[psutil.Process]) -> None:
    """Let processes print their stacks, and kill them."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
    for process in psutil.wait_procs(list(processes), timeout=5)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _fill_disk(script: Script, rank: int, phases: Callable[[], list[str]]) -> bool:
    """Let a save fail, and wait until training continues. Returns False if the attempt has ended before."""
    if script.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (FREE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if not wait(script, lambda: REFUSED in script.printed, "no save has failed on the full disk"):
        return False
    notes = len(phases())
    return wait(script, lambda: len(phases()) > notes, "the run did not continue on the full disk")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def seen(witness: Path, begin: int = 0) -> list[str]:
    """Return what rank 0 has written in an attempt: its process, and the phases.

    Args:
        begin: size of the file before the attempt.
    """
    if not witness.exists():
        return []
    lines = [
        line.split() for line in witness.read_bytes()[begin:].decode().splitlines(keepends=True) if line[-1] == "\n"
    ]
    return [lines[0][0], *(phase for _, phase in lines)] if lines else []


def _victim(script: Script, rank: int, kind: str) -> int | None:
    """Return the process to be killed. None: it is the one that was started, or there is none of the kind."""
    if kind == "rank 0":
        return rank
    with contextlib.suppress(psutil.Error):  # it has ended in the meantime
        for child in psutil.Process(rank if kind == "worker" else script.pid).children():
            if kind == "worker" or (kind == "rank 1" and child.environ().get("RANK") == "1"):
                return child.pid
    return None
