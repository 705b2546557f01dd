"""Short runs of a project, for the checks: they write into a temporary folder only, and send nothing to trackers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict, read_write
from torch import Tensor

from hydraloop.config.checks import Draft
from hydraloop.engine.batch_transfer import leaves_of
from hydraloop.engine.checkpoint.format import peek
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook, Priority
from hydraloop.engine.seeding import seed_everything
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.launch.build import assemble
from hydraloop.launch.given_objects import Parts

ON_CPU = {"engine.device": "cpu", "precision": {"name": "fp32"}}
"""Changes of a run that computes in fp32 on the CPU."""
_ALWAYS = {
    "engine.pause_after": None,
    "engine.test": False,
    "engine.compile": False,
    "engine.accumulate": 1,
    "distributed.strategy": "auto",
}
"""Changes of every short run."""


class NotJudgedError(Exception):
    """Raised by a check that cannot judge this project. The message says why."""


class Watch(Hook):
    """Notes what happens in a short run.

    Args:
        save_at: the iteration after which a checkpoint is written; None: no checkpoint.
        seed: of the generators before each iteration; None: they are those of the run.
    """

    priority = Priority.HIGHEST
    collective = True

    def __init__(self, *, save_at: int | None = None, seed: int | None = None) -> None:
        self._save_at, self._seed = save_at, seed
        self.losses: list[float] = []
        self.batches: list[str] = []
        """A digest of each batch."""
        self.gradients: dict[str, Tensor] = {}
        """The first gradient other than 0 of each parameter of the model."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.batches.append(digest(batch))
        if self._seed is not None:
            seed_everything(self._seed)

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        for name, parameter in engine.task.model.named_parameters():
            if parameter.grad is not None and name not in self.gradients and parameter.grad.any():
                self.gradients[name] = parameter.grad.detach().clone()

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.losses.append(float(outputs["loss"]))
        if engine.progress.iteration == self._save_at:
            engine.request_checkpoint("halfway")


def digest(value: Any) -> str:
    """Return a hash of all tensors, arrays and plain values in a batch or sample."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())
    return found.hexdigest()


def short_run(
    draft: Draft,
    folder: Path,
    watch: Watch | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    ranks: Distributed | None = None,
    batch: Any = None,
    checkpoint: Path | None = None,
) -> Engine:
    """Return an engine that trains as the project does, with these differences.

    Args:
        folder: of its files.
        changes: {key of the config: value}.
        batch: the only batch of every data set; None: the data of the config.
        checkpoint: where it continues.
    """
    cfg = deepcopy(draft.cfg)
    with read_write(cfg), open_dict(cfg):
        cfg.pop("hydra", None)
        for key, value in {**_ALWAYS, **(changes or {})}.items():
            OmegaConf.update(cfg, key, value, merge=False)
    loaders = {} if batch is None else {split: [batch] for split in ("train", "val") if cfg.data.get(split)}
    parts = Parts(loaders=loaders, hooks={} if watch is None else {"check": watch})
    position = None if checkpoint is None else peek(checkpoint, key="resume")
    engine = assemble(
        cfg,
        ranks or Distributed(),
        run_dir=folder,
        parts=parts,
        typed=draft.typed,
        checkpoint=checkpoint,
        position=position,
    )
    for hook in engine.hooks.values():  # those that only observe or save
        if isinstance(hook, CheckpointHook):
            hook.out_dir, hook.idle_points = None, frozenset(MOUNT_POINTS) - {"before_run"}
        elif type(hook).on_error != "raise":
            hook.idle_points = MOUNT_POINTS
    engine.calls.build()
    return engine
