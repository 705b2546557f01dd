"""Runs that are killed at random moments and started again until they end, and what of them has to be equal."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

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
    "two ranks, workers": (TWO, "data.loader.batch_size=4", "data.loader.num_workers=1"),
    "two ranks, FSDP2": (TWO, "data.loader.batch_size=4", "distributed.strategy=fsdp2"),
    "two ranks, stream": (
        TWO, "data.loader.batch_size=4", "data.train._target_=my_project.faults.Stream",
        "data.loader.steps_per_epoch=10",
    ),
}  # fmt: skip
"""What is killed: the overrides of each kind of run."""
PHASES = ("iteration", "save", "evaluation", "shutdown", "resume", "start")
"""When it is killed: lines of the hook `Witness`. A random delay follows."""
VICTIMS = ("run", "worker", "rank")
"""What is killed: the process that was started, a worker of a loader, or a rank."""
PATIENCE = 120
"""Seconds for a busy machine."""
_TIMES = {"time", "data_time", "memory", "eta", "timestamp", "mfu"}


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
    def draw(cls, draws: random.Random, victims: tuple[str, ...] = ("run",)) -> Kill:
        """Return a random one."""
        phase = draws.choice(PHASES)
        number = draws.randrange({"iteration": 8, "save": 4, "evaluation": 3}.get(phase, 1))
        return cls(phase, number, draws.random() * 0.03, draws.choice(victims))


@dataclass(frozen=True)
class Outcome:
    """What a run has left behind."""

    run: Run
    kills: int
    """Those that hit it; the others came after its end."""
    seconds_of_orphans: float
    """The longest time from a kill until the last process of the attempt had ended."""


def make(path: Path) -> Project:
    """Return the project of the runs."""
    project = Project.make(path)
    project.write("conf/experiment/faults.yaml", CONFIG)
    shutil.copy(Path(__file__).with_name("in_project.py"), project.path / "my_project" / "faults.py")
    return project


def train(project: Project, name: str, kind: str, kills: list[Kill]) -> Outcome:
    """Start a run in the directory `name` again and again, with one kill in each attempt, until it ends by itself.

    Raises:
        AssertionError: an attempt failed without a kill, or left processes.
    """
    line = ["experiment=faults", "resume=auto", f"hydra.run.dir={name}", *KINDS[kind]]
    run, hits, orphans = Run(project.path / name), 0, 0.0
    for kill in kills:
        script = project.begin(*line)
        hit, seconds = _kill(script, run.path / "witness", kill)
        orphans = max(orphans, seconds)
        output = script.communicate(PATIENCE)[0]
        if script.returncode == 0:
            return Outcome(run, hits, orphans)
        assert hit, f"failed before {kill}:\n{output}"
        hits += 1
    done = project.train(*line)
    assert done.code == 0, f"failed after {kills}:\n{done.text}"
    return Outcome(run, hits, orphans)


def _kill(script: Script, witness: Path, kill: Kill) -> tuple[bool, float]:
    """Wait for the moment, kill, and wait until all processes of the attempt have ended.

    Returns:
        Whether the run was alive at that moment, and the seconds until the last process had ended.
    """
    before, until = _size(witness), time.monotonic() + PATIENCE
    while (seen := _seen(witness, before)).count(kill.phase) <= kill.number:
        if script.poll() is not None:
            return False, 0.0
        assert time.monotonic() < until, f"{kill} was not reached"
        time.sleep(0.002)
    time.sleep(kill.delay)
    if script.poll() is not None:
        return False, 0.0
    started = children(psutil.Process(script.pid))
    with contextlib.suppress(ProcessLookupError):  # a worker that has ended in the meantime
        os.kill(_victim(script, int(seen[0]), kill.victim), signal.SIGKILL)
    at = time.monotonic()
    script.wait(PATIENCE)
    while left := [process.pid for process in started if command_line(process)]:
        assert time.monotonic() < at + PATIENCE, f"processes were left: {left}"
        time.sleep(0.01)
    return True, time.monotonic() - at


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _seen(witness: Path, begin: int) -> list[str]:
    """Return what rank 0 has written in this attempt: its process, and the phases."""
    if not witness.exists():
        return []
    lines = [
        line.split() for line in witness.read_bytes()[begin:].decode().splitlines(keepends=True) if line[-1] == "\n"
    ]
    return [lines[0][0], *(phase for _, phase in lines)] if lines else []


def _victim(script: Script, rank: int, kind: str) -> int:
    """Return the process to be killed: the one that was started, if there is none of the kind."""
    if kind == "rank":
        return rank
    workers = [process.pid for process in psutil.Process(rank).children()] if kind == "worker" else []
    return workers[0] if workers else script.pid


def differences(one: Run, other: Run) -> list[str]:
    """Return what differs between two runs, apart from times: names of entries, and both values."""
    return [
        *_compared("checkpoint", _checkpoint(one), _checkpoint(other)),
        *_compared("result", _result(one), _result(other)),
        *_compared("records", _records(one), _records(other)),
        *_compared("ledger", ledger(one), ledger(other)),
    ]


def ledger(run: Run) -> dict[str, Any]:
    """Return what each rank saw in each iteration, in the newest attempt that reached it."""
    lines = [json.loads(line) for line in (run.path / "ledger").read_text(encoding="utf-8").splitlines()]
    found = {f"{line['iteration']}, rank {line['rank']}": line for line in lines}
    return dict(sorted(found.items()))


def _checkpoint(run: Run) -> dict[str, Any]:
    """Return the newest checkpoint, without times and paths."""
    newest = (run.path / "checkpoints" / "last_checkpoint").read_text(encoding="utf-8").strip()
    checkpoint: dict[str, Any] = torch.load(run.path / "checkpoints" / Path(newest).name, weights_only=True)
    checkpoint["meta"] = {name: value for name, value in checkpoint["meta"].items() if name not in ("time", "config")}
    checkpoint["hooks"] = {name: state for name, state in checkpoint["hooks"].items() if name != "checkpoint"}
    return checkpoint


def _result(run: Run) -> dict[str, Any]:
    found = {name: run.result[name] for name in ("status", "progress", "val_metrics", "test_metrics", "best")}
    found["best"] = {name: value for name, value in found["best"].items() if name != "checkpoint"}  # a path
    return found


def _records(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in _TIMES} for record in run.records]


def _compared(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yield the entries that differ."""
    if type(one) is not type(other):
        yield f"{name}: {one!r} and {other!r}"
    elif isinstance(one, dict):
        for key in {**one, **other}:
            yield from _compared(f"{name}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} entries"
        for index, (first, second) in enumerate(zip(one, other, strict=False)):
            yield from _compared(f"{name}.{index}", first, second)
    elif isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.numpy().tobytes() != other.numpy().tobytes():
            yield f"{name}: {one.flatten()[:4].tolist()} and {other.flatten()[:4].tolist()}"
    elif one != other and not (one != one and other != other):
        yield f"{name}: {one!r} and {other!r}"
