"""A check that two ranks compute the gradients that one process computes for the same global batch."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from hydraloop.commands.check.findings import Finding
from hydraloop.commands.check.short_runs import ON_CPU, Project, Watch, digest
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.data.seeded_fetcher import BatchRequest, SeededFetcher
from hydraloop.engine.device.seeding import mix_seed
from hydraloop.engine.device.seeding import seeded as draws_seeded
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.plan import RunPlan
from hydraloop.run_files.config_yaml import remember_config, resolved
from hydraloop.run_files.result import describe
from hydraloop.safety.allowlist import ALLOWLIST

_TOLERANCE = 1e-3
"""Difference of the gradients of all parameters, in parts of their norm. Rounding in fp32 makes up to 1e-4 in networks
without normalization; a loss that is a sum makes 1."""
_SECONDS = 300.0
"""After which the ranks are assumed to wait for each other."""
_RANKS = 2
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Without SyncBatchNorm, which sees the samples of all ranks."""


def ranks(project: Project, base: Engine, folder: Path) -> Finding:
    """Take one step in this process, and one on two ranks, on the CPU in fp32 and without dropout.

    Args:
        base: an engine of the project.
        folder: for the files of these runs.
    """
    loader = base.loaders.train
    if base.task.steps:
        return Finding("not judged", "the task has several steps")
    if not isinstance(loader, GlobalBatchLoader) or loader.batch_size is None or loader.samples_at(0)[1] < _RANKS:
        return Finding("not judged", "ranks do not share the samples of a global batch: a stream or a batch sampler")
    request, seeded = loader.order.request(0, 0), loader.seeded
    fetcher = SeededFetcher(_by_index(seeded.dataset), seeded.collate, seeded.seed)
    other_draws = BatchRequest(request.indices, request.epoch, number=1)
    if digest(fetcher.__getitems__(request)) != digest(fetcher.__getitems__(other_draws)):
        text = "the data set or collate_fn draws for a batch as a whole, so ranks draw differently"
        return Finding("not judged", text)
    batch = {loader.keys["batch_size"]: max(1, loader.batch_size // _RANKS)}
    whole = {key: size * _RANKS for key, size in batch.items()}
    one, again = (_gradients(project, Distributed(), folder / f"one{seed}", whole, seed) for seed in (0, 1))
    if _distance(one, again) > _TOLERANCE:
        return Finding("not judged", "the step draws random numbers apart from nn.Dropout, and ranks draw others")
    failed = _start(project, folder / "ranks", batch)
    if failed:
        return Finding("problem", f"training on {_RANKS} ranks fails: {failed}", "distributed.nproc_per_node")
    several = torch.load(folder / "ranks" / "gradients.pth", weights_only=True)
    distance = _distance(one, several)
    norms = [name for name, module in base.task.named_modules() if isinstance(module, _BATCH_NORMS)]
    text = f"gradients of {_RANKS} ranks and of one process differ by {distance:.0e} with the same global batch"
    if norms:
        text += f"; not compared: batch norm, which sees the samples of its rank only ({', '.join(norms[:3])})"
    if distance <= _TOLERANCE:
        return Finding("ok", text)
    remedy = "Let the loss be the mean over the samples of a batch, or return (sum, count)."
    return Finding("problem", text, "task.loss", remedy)


def _gradients(
    project: Project, ranks: Distributed, folder: Path, batch: Mapping[str, int], seed: int
) -> dict[str, Tensor]:
    """Take one step with this batch size, by its key. Return the gradients of the model."""
    watch = Watch(seed=seed)
    changes = {**ON_CPU, **batch, "engine.max_iters": 1, "engine.val_interval": None, "engine.sanity_val_steps": 0}
    engine = project.engine(folder, watch, changes, ranks=ranks)
    loader = cast(GlobalBatchLoader, engine.loaders.train)
    loader.seeded.dataset = _by_index(loader.seeded.dataset)
    for module in engine.task.modules():
        if isinstance(module, (*_DROPOUTS, *_BATCH_NORMS)):
            module.eval()  # it stays so in training
    engine.train()
    return watch.gradients


class _SeededByIndex:
    """A data set whose draws follow from the index of the sample, so that ranks draw what one process draws."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        with draws_seeded(mix_seed(index)):
            return self.dataset[index]


def _by_index(dataset: Any) -> Any:
    """Return the data set with draws by index, unless it returns whole batches."""
    return dataset if hasattr(dataset, "__getitems__") else _SeededByIndex(dataset)


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference in parts of the norm."""
    names = sorted(one.keys() | other.keys())
    zero = torch.zeros(())
    pairs = [(one.get(name, zero).double(), other.get(name, zero).double()) for name in names]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((difference / max(sum(float(a.square().sum()) for a, _ in pairs), 1e-300)) ** 0.5)


def _start(project: Project, folder: Path, batch: Mapping[str, int]) -> str:
    """Take one step on several ranks. Return the error of one, or an empty text."""
    folder.mkdir()
    plan = RunPlan(cfg=OmegaConf.create(resolved(project.cfg)), run_dir=folder, typed=project.typed)
    trusted = (ALLOWLIST.folders, ALLOWLIST.packages)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # A server forks the ranks, because a process that has used a GPU cannot. It imports everything once.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])
    start: Any = start_processes  # is not typed
    try:
        start(_step, (plan, trusted, batch, port), _RANKS, daemon=True, start_method="forkserver")
    except ProcessException as error:
        told = folder / "error"
        return told.read_text(encoding="utf-8") if told.exists() else describe(error)
    return ""


def _step(
    rank: int, plan: RunPlan, trusted: tuple[Sequence[str], Sequence[str]], batch: Mapping[str, int], port: int
) -> None:
    """Take one step as a rank, and write the gradients or the error into a file."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_WORLD_SIZE": _RANKS, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost", CUDA_VISIBLE_DEVICES=""
    )
    for trusted_folder in trusted[0]:
        ALLOWLIST.trust_folder(Path(trusted_folder))
    ALLOWLIST.trust(trusted[1])
    plan.cfg.distributed.timeout = _SECONDS
    remember_config(plan.cfg)
    with Path(os.devnull).open("wb") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    connected = connect(plan.cfg.distributed, "cpu")
    try:
        gradients = _gradients(Project(plan.cfg, plan.typed), connected, plan.run_dir, batch, 0)
        if connected.is_main:
            torch.save(gradients, plan.run_dir / "gradients.pth")
        connected.close()
    except BaseException as error:
        connected.abandon(error)
        failed = connected.first_failure()
        if failed is None or failed[0] == rank:  # the other rank has failed because of this one
            (plan.run_dir / "error").write_text(describe(error), encoding="utf-8")
        raise
