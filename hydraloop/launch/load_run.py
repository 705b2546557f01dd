"""Loads a finished run: its config, its weights and, if wanted, its data. Nothing is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, open_dict
from torch import nn

from hydraloop import schemas
from hydraloop.config import arguments, saved_config
from hydraloop.config.checks import validate
from hydraloop.config.compose import opened
from hydraloop.data.loaders_from_config import check_splits
from hydraloop.engine.checkpoint.format import EVALUATED
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.seeding import rng_state, set_rng_state
from hydraloop.errors import UserError
from hydraloop.files.checkpoint_files import PUBLISHED, SUFFIX, newest_intact
from hydraloop.files.result import Result
from hydraloop.files.run_directory import check_holds_run, checkpoint_folders
from hydraloop.launch.build import assemble
from hydraloop.launch.given_objects import Parts
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.schemas.data import SPLITS
from hydraloop.schemas.selected_hooks import HOOK_GROUPS

log = logging.getLogger(__name__)


class FinishedRun(NamedTuple):
    """A finished run."""

    run_dir: Path
    file: Path
    """Of the checkpoint."""
    saved: dict[str, Any]
    """The contents of the checkpoint."""
    cfg: DictConfig


def find_run(run_dir: Path, checkpoint: str | Path, overrides: Sequence[str]) -> FinishedRun:
    """Return the config and the checkpoint of a run. Nothing of it is instantiated.

    Raises:
        UserError: there is no run or no checkpoint, or an override does not fit.
    """
    ALLOWLIST.distrust(run_dir)
    check_holds_run(run_dir)
    file = checkpoint_of(run_dir, checkpoint)
    saved = load_file(file, key="checkpoint", mmap=True, only=EVALUATED)
    changes = {"resume": None, "load_from": None, "init.checkpoint": None}
    with opened(Path(schemas.__file__).parent, saved_config.NAME) as composer:
        lines = arguments.typed(overrides).lines
        cfg = saved_config.composed(run_dir, lines, composer, lambda: saved.get("meta") or {}, changes)
    with open_dict(cfg):
        del cfg["hydra"]
    return FinishedRun(run_dir, file, saved, cfg)


def load_run(
    found: FinishedRun,
    splits: Sequence[str],
    task: nn.Module | None = None,
    loaders: Loaders | Mapping[str, Any] | None = None,
    hooks: Mapping[str, Hook] | None = None,
    distributed: Distributed | None = None,
) -> Engine:
    """Return an engine with the weights of a run; see `hydraloop.load`."""
    run_dir, file, saved, cfg = found
    check_splits(splits, "splits")
    cfg.distributed.nproc_per_node = 1  # no processes are started
    distributed = distributed or connect(cfg.distributed, cfg.engine.device)
    if distributed.world_size == 1:
        cfg.distributed.strategy = "auto"
    validate(cfg)
    for group in HOOK_GROUPS:
        cfg[group] = {name: node for name, node in cfg[group].items() if _changes_evaluation(node, f"{group}.{name}")}
    if not isinstance(loaders, Loaders):
        loaders = {**{split: None for split in SPLITS if split not in splits}, **(loaders or {})}
    used = {name: hook for name, hook in (hooks or {}).items() if getattr(hook, "changes_evaluation", True)}
    parts = Parts(task, loaders, hooks=used)
    meta = saved.get("meta") or {}
    needed = [key for key in meta.get("given", ()) if key == "task"]
    if any(key.startswith("data.") for key in meta.get("given", ())):  # the run had no data from its config
        needed += [f"data.{split}" for split in SPLITS]
    parts.check([*needed, *meta.get("changes_evaluation", ())], "hydraloop.load(…")
    generators = rng_state()
    engine = assemble(cfg, distributed, run_dir=run_dir, parts=parts, trains=False)
    set_rng_state(generators)  # the caller's numbers do not begin again
    engine.checkpoints.load_for_evaluation(saved, "checkpoint")
    engine.task.eval()  # also for a caller who uses the model without the engine
    log.info("weights loaded from %s", file)
    return engine


def _changes_evaluation(node: DictConfig | None, key: str) -> bool:
    if node is None:
        return False
    return bool(getattr(ALLOWLIST.locate(node._target_, key), "changes_evaluation", False))


def checkpoint_of(run_dir: Path, wanted: str | Path) -> Path:
    """Return a checkpoint of a run.

    Args:
        wanted: `best`: the best one if the run has one, otherwise the last; `last`; or a file, by its path or its name.

    Raises:
        UserError: the run has no checkpoint.
    """
    folders = checkpoint_folders(run_dir)
    if str(wanted) not in ("best", "last"):
        return next((folder / wanted for folder in folders if (folder / wanted).is_file()), Path(wanted))
    best = _best(run_dir, folders) if str(wanted) == "best" else None
    if best is not None:  # the run may have been moved
        file = next((folder / best.name for folder in folders if (folder / best.name).is_file()), best)
        if not file.is_file():
            raise UserError(f"the best checkpoint, {best}, is gone", key="checkpoint", remedy="Use checkpoint=last.")
        return file
    last = newest_intact(*folders)
    if last is None:
        raise UserError(
            f"{run_dir} has no complete checkpoint",
            key="checkpoint",
            remedy="Train with default_hooks.checkpoint, or name a file: checkpoint=FILE.",
        )
    return last


def _best(run_dir: Path, folders: Sequence[Path]) -> Path | None:
    result = Result.read(run_dir)
    if result is not None:
        return result.best_checkpoint
    # It was killed, or is still training.
    files = [file for folder in folders for file in folder.glob(f"best_*{SUFFIX}") if PUBLISHED not in file.stem]
    if len(files) > 1:
        problem = f"the run has not ended, and has several best checkpoints: {', '.join(file.name for file in files)}"
        raise UserError(problem, key="checkpoint", remedy=f"Name one: checkpoint={files[0].name}.")
    return files[0] if files else None
