"""Tests whether the nodes of a Ray cluster can run the jobs of a sweep, and says what each job would reserve."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from hydraloop.cli.config_file_limits import check_ray
from hydraloop.commands.check.findings import Finding
from hydraloop.run_files import environment
from hydraloop.sweeps.executors import ray_executor


def tests(cfg: DictConfig | None, typed: Collection[str]) -> dict[str, Callable[[], Finding]]:
    """Return the test, if the config chooses Ray.

    Args:
        typed: keys that the command line sets.
    """
    return {} if cfg is None or cfg.sweep.executor != "ray" else {"ray": partial(_nodes, cfg, typed)}


def _nodes(cfg: DictConfig, typed: Collection[str]) -> Finding:
    """Let each node look for the project's folder and its packages."""
    check_ray(cfg, typed)
    ranks, folder, ours = int(cfg.distributed.nproc_per_node), os.getcwd(), environment.versions()
    cluster = ray_executor.connect(cfg.sweep, ranks=ranks, device=cfg.engine.device)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        found = ray_executor.looks(folder, Path(file.name).name)
    for node in found:
        host = node["host"]
        if not node["sees"]:
            text = f"{host} does not see {folder}"
            return Finding("problem", text, "sweep.executor", "Mount the same folder on each node, at the same path.")
        for name, version in ours.items():
            if str(node["versions"].get(name)).partition("+")[0] != version.partition("+")[0]:  # of its build
                text = f"{host} has {name} {node['versions'].get(name)}, and this machine {version}"
                return Finding("problem", text, "sweep.executor", "Install the same packages on each node.")
    each = ", ".join(f"{name}={value:g}" for name, value in cluster.resources.items())
    return Finding("ok", f"{len(found)} nodes see {folder}; {cluster.shares.workers} jobs at a time, each with {each}")
