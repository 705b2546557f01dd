"""Sweeps whose files are written by hand: their jobs were never started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydraloop.sweeps import job_states
from hydraloop.sweeps.axes import Axis
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import Description, Jobs, SweepDirectory


def sweep(
    path: Path,
    *axes: str,
    overrides: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    average: str = "seed",
) -> SweepDirectory:
    """Write a sweep; each axis is `key=a,b`."""
    made = []
    for axis in axes:
        key, _, values = axis.partition("=")
        made.append(Axis((key.lstrip("+"),), tuple((f"{key}={value}",) for value in values.split(","))))
    described = Description(
        uid="0",
        created=0.0,
        command=command or ("python", "train.py"),
        overrides=overrides or axes,
        configs={"": {}},
        subdir="${hydra.job.num}",
        jobs=Jobs.of_axes(made),
        average=average,
        git={},
    )
    return SweepDirectory.create(path, described)


def finished(value: float | None, **changed: Any) -> dict[str, Any]:
    """Return what the state of a finished job tells."""
    told = {"state": "finished", "metric": "accuracy", "rule": "greater", "value": value, "step": 40, "seconds": 2.0}
    return told | {"checkpoint": "checkpoints/best.pth"} | changed


def write(directory: SweepDirectory, told: Mapping[int, Mapping[str, Any]]) -> None:
    """Write states of jobs."""
    for number, fields in told.items():
        directory.folder(number).mkdir(exist_ok=True)
        state = JobState(number=number, **{"attempts": 1, "directory": str(number), "began": 0.0, **fields})
        job_states.write(directory.folder(number), state, flush=False)
