"""Data, tasks, optimizers, schedules and metrics: what is missing, and what has no class."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError
from hydraloop.safety.instantiate import require_target
from hydraloop.schemas.data import SPLITS, loader_options
from hydraloop.schemas.optimizer import check_own_options, nodes
from hydraloop.schemas.scheduler import no_such_optimizer
from hydraloop.schemas.task import no_model


def check_data(cfg: DictConfig, *, trains: bool) -> None:
    if trains and cfg.data.get("train") is None:
        raise UserError(
            "there is no training data",
            key="data.train",
            remedy="Select some: data=digits.",
        )
    if trains and cfg.engine.pause_after is not None and None in (cfg.engine.val_interval, cfg.data.get("val")):
        remedy = "Set data.val and engine.val_interval=1, or set engine.pause_after=null."
        raise UserError("this needs a validation, and the run has none", key="engine.pause_after", remedy=remedy)
    for split in SPLITS:
        loader_options(cfg.data, split)


def check_targets(cfg: DictConfig, *, trains: bool) -> None:
    """Refuse a metric, schedule or optimizer without a class, and a task without a model."""
    optimizers = nodes(cfg.optimizer) if isinstance(cfg.optimizer, DictConfig) else {}
    for name, node in optimizers.items() or [("", cfg.optimizer)]:
        require_target(node, f"optimizer.{name}".rstrip("."))
    check_own_options(optimizers)
    for name, metric in (cfg.task.get("metrics") or {}).items():
        if metric is not None:
            require_target(metric, f"task.metrics.{name}")
    for name, schedule in cfg.scheduler.items():
        if schedule is not None:
            require_target(schedule, f"scheduler.{name}")
            changed = schedule.get("optimizer")
            # From Python, finished optimizers may have other names; `build_schedules` checks those.
            if trains and changed is not None and (not changed or changed not in optimizers):
                raise no_such_optimizer(changed, optimizers, f"scheduler.{name}.optimizer")
    is_missing = trains and OmegaConf.is_missing(cfg.task, "model")  # in Python, it may be given
    if is_missing or ("model" in cfg.task and cfg.task.model is None):
        raise no_model()
