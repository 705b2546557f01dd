"""Tests of Slurm where its commands are: what a sweep would ask for, and whether a node can run it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.commands.check.findings import Finding
from hydraloop.sweeps.executors import gpus

_IMMEDIATE = 10
"""Seconds after which a node that is not free is not waited for."""
_SECONDS = 90
"""How long the job on a node may take."""
_CHOICES = ("partition", "account", "qos", "constraint")
"""Parameters that decide which nodes a job gets."""
_SCRIPT = 'cd "$1" && test "$(ls)" = "$2" || exit 3; "$3" -c "import hydraloop" || exit 4; hostname'
_UNITS = (1440, 60, 1)
"""Minutes of a day, an hour and a minute."""


def tests(cfg: DictConfig | None) -> dict[str, Callable[[], Finding]]:
    """Return the tests by their names; none where Slurm is not."""
    if shutil.which("sinfo") is None or shutil.which("srun") is None:
        return {}
    options: Any = {} if cfg is None else OmegaConf.to_container(cfg.sweep, resolve=True)
    return {"slurm": partial(_partitions, options), "nodes": partial(_nodes, options.get("submitit", {}))}


def _partitions(options: Mapping[str, Any]) -> Finding:
    """Compare what a sweep would ask for with the partitions."""
    wanted = options.get("submitit", {})
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%P %a %l %D"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        return Finding("problem", f"sinfo: {done.stderr.strip()}", None, "Ask the administrator of the cluster.")
    default, limits, shown = None, dict[str, float](), list[str]()
    for line in done.stdout.splitlines():
        marked, up, limit, nodes = line.split()
        name = marked.removesuffix("*")
        default = name if marked.endswith("*") else default
        limits[name] = _minutes(limit)
        shown.append(f"{name}: {up}, {nodes} nodes, at most {limit}")
    partitions = "; ".join(shown)
    chosen = str(wanted.get("slurm_partition", default))
    if not set(chosen.split(",")) <= limits.keys():
        key, remedy = "sweep.submitit.slurm_partition", next(iter(limits))
        return Finding("problem", f"there is no partition {chosen}, only {partitions}", key, f"Use {key}={remedy}.")
    most, minutes = max(limits[name] for name in chosen.split(",")), wanted.get("timeout_min")
    if minutes is not None and minutes > most:
        key = "sweep.submitit.timeout_min"
        return Finding("problem", f"{chosen} permits at most {most:g} minutes", key, f"Use {key}={most:g}.")
    workers = options.get("max_workers") or gpus.SUBMITTED
    asks = ", ".join(f"{key}={value}" for key, value in wanted.items()) or "sweep.submitit.timeout_min must be set"
    return Finding("ok", f"{partitions}. A sweep asks for {workers} jobs at a time ({asks})")


def _minutes(limit: str) -> float:
    """Return a time limit, such as `infinite`, `30:00` or `1-12:00:00`, in minutes."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):\d\d", limit)):
        return float("inf")
    return sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS, strict=True))


def _nodes(wanted: Mapping[str, Any]) -> Finding:
    """Look at the project's folder and import hydraloop on a node, if one is free."""
    flags = [f"--{name}={wanted[f'slurm_{name}']}" for name in _CHOICES if f"slurm_{name}" in wanted]
    listed = subprocess.run(["ls"], capture_output=True, text=True, check=True).stdout.rstrip("\n")
    words = ["srun", f"--immediate={_IMMEDIATE}", "--time=2", "--job-name=hydraloop-doctor", "--chdir=/", *flags]
    script = ["sh", "-c", _SCRIPT, "sh", str(Path.cwd()), listed, sys.executable]
    try:
        done = subprocess.run([*words, *script], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("not judged", f"a node has not answered within {_SECONDS} s")
    if done.returncode == 3:
        remedy = "Put the project into a folder that all nodes share."
        return Finding("problem", f"a node does not see {Path.cwd()}", None, remedy)
    if done.returncode == 4:
        remedy = "Put the environment of Python into a folder that all nodes share."
        return Finding("problem", f"a node cannot import hydraloop with {sys.executable}", None, remedy)
    if done.returncode:
        return Finding("not judged", f"no job has started on a node: {' '.join(done.stderr.split())}")
    return Finding("ok", f"{done.stdout.strip()} sees the project's folder and its Python")
