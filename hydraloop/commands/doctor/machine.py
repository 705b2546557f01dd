"""Tests of this machine: versions, device, precision, ranks, write access and disk."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

from hydraloop.commands.check.findings import Finding
from hydraloop.engine.device.precision import make_precision
from hydraloop.engine.distributed.comm import choose_device
from hydraloop.errors import UserError
from hydraloop.processes import checks

_SHOWN = ("hydraloop", "torch", "hydra-core", "omegaconf", "mlflow", "wandb")
_LEAST_FREE = 2**30
"""Bytes of free disk space: some checkpoints of a small model."""


def versions(cfg: DictConfig | None) -> Finding:
    """Compare the versions of packages with those that hydraloop needs."""
    for one in map(Requirement, metadata.requires("hydraloop") or ()):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = _version(one.name)
        if not one.specifier.contains(found or "0", prereleases=True):
            text = f"{one.name} {found or 'is not installed'}; hydraloop needs {one.specifier}"
            return Finding("problem", text, None, f"python -m pip install '{one.name}{one.specifier}'")
    shown = [f"{name} {_version(name)}" for name in _SHOWN]
    return Finding("ok", ", ".join([f"python {platform.python_version()}", *shown]))


def _version(name: str) -> str | None:
    return next((found.version for found in metadata.distributions(name=name)), None)


def device(cfg: DictConfig | None) -> Finding:
    """Compute on the device of the config."""
    wanted = "auto" if cfg is None else str(cfg.engine.device)
    chosen = choose_device(wanted)
    torch.ones(2, device=chosen).sum().item()
    if chosen.type == "cuda":
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(chosen))
        return Finding("ok", f"{torch.cuda.get_device_name(chosen)}, {free:.1f} of {total:.1f} GiB are free")
    if wanted == "auto" and chosen.type == "cpu" and Path("/proc/driver/nvidia/version").exists():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch cannot use its driver"
        remedy = "Install torch for your driver (https://pytorch.org/get-started), or set engine.device=cpu."
        return Finding("problem", f"there is an NVIDIA GPU, and {why}", "engine.device", remedy)
    return Finding("ok", f"{chosen}, {_cores()} cores, {torch.get_num_threads()} threads")


def precision(cfg: DictConfig | None) -> Finding:
    """Make the precision of the config on its device."""
    chosen = choose_device("auto" if cfg is None else str(cfg.engine.device))
    options: Any = {"name": "fp32"} if cfg is None else OmegaConf.to_container(cfg.precision, resolve=True)
    made = make_precision(options, chosen)
    if made.name == "bf16" and chosen.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding("problem", "this GPU computes bfloat16 slowly, in software", "precision", "Use precision=fp16.")
    return Finding("ok", f"{made.name} on {chosen.type}")


def ranks(cfg: DictConfig | None) -> Finding:
    """Compare the number of processes with the devices, and look for the backend."""
    if not torch.distributed.is_available():
        remedy = "Install another build of torch."
        return Finding("problem", "this torch has no torch.distributed", "distributed", remedy)
    if cfg is not None:
        checks.check(cfg)
    wanted = 1 if cfg is None else int(cfg.distributed.nproc_per_node)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    cores = _cores()
    if not count and wanted > cores:
        text = f"{wanted} processes share {cores} cores, and are slower than {cores}"
        return Finding("problem", text, "distributed.nproc_per_node", f"Use distributed.nproc_per_node={cores}.")
    unused = f"; distributed.nproc_per_node={count} uses all GPUs" if count > wanted else ""
    return Finding("ok", f"{wanted} of at most {count or cores}{unused}")


def write(cfg: DictConfig | None) -> Finding:
    """Write a file where runs are written, and into the folder for temporary files."""
    folders = {
        "hydra.run.dir=/path/to/folder/'${now:%Y-%m-%d_%H-%M-%S}'": _runs(cfg),
        "TMPDIR=/path/to/folder": Path(tempfile.gettempdir()),
    }
    for change, folder in folders.items():
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"hydraloop")
        except OSError as error:
            text = f"{folder} cannot be written: {error.strerror}"
            return Finding("problem", text, change.partition("=")[0], f"Use another folder: {change}")
    return Finding("ok", " and ".join(map(str, folders.values())))


def disk(cfg: DictConfig | None) -> Finding:
    """Look for free space where runs are written, and in the folder for temporary files."""
    free = {folder: shutil.disk_usage(folder).free for folder in (_runs(cfg), Path(tempfile.gettempdir()))}
    for folder, size in free.items():
        if size < _LEAST_FREE:
            remedy = "Delete earlier runs, or keep fewer checkpoints: default_hooks.checkpoint.max_keep_ckpts=1."
            return Finding("problem", f"{folder} has only {size / 2**30:.2f} GiB left", None, remedy)
    return Finding("ok", ", ".join(f"{size / 2**30:.0f} GiB are free in {folder}" for folder, size in free.items()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _runs(cfg: DictConfig | None) -> Path:
    """Return the existing folder in which the directory of a run would be created."""
    try:
        directory = Path("outputs" if cfg is None else cfg.hydra.run.dir).absolute()
    except Exception as error:
        raise UserError(str(error).splitlines()[0], key="hydra.run.dir", remedy="Use a path.") from error
    return next(folder for folder in (directory, *directory.parents) if folder.is_dir())


TESTS = (versions, device, precision, ranks, write, disk)
"""The function of each test. Its name is that of the test."""
