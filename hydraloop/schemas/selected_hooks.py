"""Facts about hooks that need no torch: their classes, and which of them a config selects or leaves out."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hydraloop.schemas import stored

log = logging.getLogger(__name__)

HOOK_GROUPS = ("default_hooks", "hooks")
HOOK_CLASSES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("hook_classes.json").read_text(encoding="utf-8")
)
"""By class of `hydraloop.hooks`: its module, priority, `runs_after` and mount points.

`scripts/hook_docs.py` reads them from the source of the classes.
"""

HOOKS_BY_USE = {
    "Everyday": (
        "ema",
        "early_stopping",
        "freeze",
        "tensorboard",
        "mlflow",
        "wandb",
        "visualization",
        "tta",
        "profiler",
    ),
    "Guards": ("check_invalid_loss", "anomaly_detection", "num_class_check", "memory_profiler", "empty_cache"),
    "Distributed": ("sync_norm", "sync_buffers"),
    "From MMEngine and MMDetection": ("mode_switch", "sync_random_size", "set_epoch_info", "npu_profiler"),
}
"""The options of `hooks` in the order in which the help lists them: the ones used most come first."""


def notices(cfg: DictConfig) -> list[str]:
    """Return a line for each consequence of missing default hooks that the run itself does not show."""
    lines = []
    if is_left_out(cfg, "sampler_seed"):
        lines.append("default_hooks.sampler_seed=null: all epochs have the same order of samples and augmentation")
    if is_left_out(cfg, "runtime_info"):
        lines.append("default_hooks.runtime_info=null: records have no loss, and a loss of NaN does not end the run")
    if all(node is None for node in cfg.default_hooks.values()):
        files = {"logger": "no records (metrics.jsonl)", "checkpoint": "no checkpoints"}
        selected, defaults = targets(cfg), dict(stored("default_hooks"))
        lacking = [name for name in files if defaults[name]._target_ not in selected]
        if lacking:
            what, which = " and ".join(files[name] for name in lacking), " and ".join(lacking)
            lines.append(
                f"default_hooks is empty: this run writes {what}; to write them, select {which} in default_hooks"
            )
    return lines


def log_notices(cfg: DictConfig, given: Collection[str]) -> None:
    """Log the `notices`, unless finished hooks are `given` from Python, whose work is not known."""
    for line in () if given else notices(cfg):
        log.warning("%s", line)


def targets(cfg: DictConfig) -> set[str]:
    """Return the `_target_` of each selected hook."""
    return {str(node.get("_target_")) for group in HOOK_GROUPS for node in cfg[group].values() if node is not None}


def is_left_out(cfg: DictConfig, name: str) -> bool:
    """Return whether a default hook is null and not only absent."""
    return cfg.default_hooks.get(name, ...) is None and cfg.hooks.get(name) is None


def has_schedules(cfg: DictConfig) -> bool:
    return any(schedule is not None for schedule in cfg.scheduler.values())
