"""Checks of values: missing data, tasks and metrics, numbers out of range, and options that contradict each other."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError, use_one_of
from hydraloop.safety.instantiate import require_target
from hydraloop.schemas.data import SPLITS, loader_options
from hydraloop.schemas.optimizer import check_own_options, nodes
from hydraloop.schemas.option_checks import check_above, check_at_least, seconds_of
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


STRATEGIES = ("auto", "ddp", "fsdp2")
AT_LEAST = {
    "engine.max_epochs": (1, "Use 1 or more."),
    "engine.max_iters": (1, "Use 1 or more, or null for max_epochs."),
    "engine.accumulate": (1, "Use 1 or more."),
    "engine.val_interval": (1, "Use 1 or more, or null for never."),
    "engine.val_begin": (0, "Use 0 for the start."),
    "engine.pause_after": (1, "Use 1 or more, or null for never."),
    "engine.sanity_val_steps": (0, "Use 0 for none."),
    "engine.threads": (1, "Use 1 or more, or null for all cores."),
    "distributed.nproc_per_node": (1, "Use 1 or more."),
    "distributed.nnodes": (1, "Use 1 or more."),
    "distributed.max_restarts": (0, "Use 0 (no restart) or more."),
    "distributed.agree_interval": (1, "Use 1 or more."),
    "sweep.max_workers": (1, "Use 1 or more, or null for one per GPU."),
    "sweep.max_retries": (0, "Use 0 (no retry) or more."),
    "sweep.trials": (1, "Use 1 or more, or null for a grid."),
    "sweep.prune_after": (1, "Use 1 or more validations, or null for a quarter of them."),
    "sweep.rung": (1, "Use 1 or more validations."),
}
"""By key: the lowest value, and the fix. Null is always accepted."""
ABOVE_0 = ("distributed.timeout", "distributed.train_timeout", "distributed.bucket_cap_mb")
"""Null is accepted, except for `distributed.timeout`."""
CHOICES = {
    "distributed.strategy": STRATEGIES,
    "weights": ("averaged", "raw"),
    "init.mismatched": ("error", "skip"),
    "sweep.on_failure": ("continue", "stop"),
    "sweep.executor": ("pool", "submitit", "ray"),
    "sweep.prune": ("median",),
    "sweep.promote": ("asha",),
}


def check_values(cfg: DictConfig) -> None:
    """Refuse numbers out of range, unknown choices, and options that contradict each other."""
    _check_options(cfg)
    for key in ABOVE_0:
        check_above(0, "" if key == "distributed.timeout" else "null", **{key: OmegaConf.select(cfg, key)})
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
        limit = OmegaConf.select(cfg, f"engine.{name}")
        if limit is not None and not (0 < limit <= 1 if isinstance(limit, float) else limit >= 1):
            raise UserError(
                f"{limit} is neither a number of batches nor a share of them",
                key=f"engine.{name}",
                remedy="Use a whole number from 1 (100), a share up to 1.0 (0.1), or null for all batches.",
            )
    seconds_of(cfg.engine.max_time)
    if not (isinstance(cfg.seed, int) and 0 <= cfg.seed < 2**63):  # `~seed ++seed=[]` takes its type away
        raise UserError(f"{cfg.seed} is out of range", key="seed", remedy="Use 0 .. 2^63 - 1.")
    if not str(cfg.experiment_name).strip():
        remedy = "Give it a name: experiment_name=digits"
        raise UserError("an experiment without a name cannot be found again", key="experiment_name", remedy=remedy)
    if cfg.resume is not None and cfg.load_from is not None:
        remedy = "Leave one of the two out."
        raise UserError("resume takes the weights of the run that it continues", key="load_from", remedy=remedy)


def _check_options(cfg: DictConfig, section: str = "") -> None:
    """Refuse numbers that are too low, and unknown choices."""
    for key, (lowest, remedy) in AT_LEAST.items():
        if key.startswith(section):
            check_at_least(lowest, remedy, **{key: OmegaConf.select(cfg, key)})
    for key, choices in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if key.startswith(section) and value is not None and value not in choices:
            raise UserError(f"{value!r} is unknown", key=key, remedy=use_one_of(choices))


def check_sweep_options(master: DictConfig) -> None:
    """Refuse options `sweep.*` that are out of range. The configs of jobs do not have them."""
    _check_options(master, "sweep.")


def check_strategy(strategy: str, *, several: bool) -> None:
    """Refuse a strategy for several processes if there is one."""
    if strategy != "auto" and not several:
        raise UserError(
            f"{strategy} shares the work of several processes, and there is one",
            key="distributed.strategy",
            remedy="Use auto, or start several: distributed.nproc_per_node=2, or torchrun.",
        )
