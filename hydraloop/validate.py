"""Checks of a composed config that need no torch, each in one place.

`validate` is called by the command line before anything is written, and by `build`. Each mistake is a `UserError` with
the key, the problem and the fix.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hydraloop.engine.hook import ON_ERROR, Priority
from hydraloop.engine.hook_order import Slot, check_order, in_order, missing, not_applied
from hydraloop.engine.settings import seconds_of
from hydraloop.errors import Remedy, UserError, close_names, suggestion, use_one_of
from hydraloop.hooks import CLASSES
from hydraloop.hooks.shared.selected_hooks import HOOK_GROUPS as HOOK_GROUPS
from hydraloop.hooks.shared.selected_hooks import has_schedules, is_left_out, targets
from hydraloop.option_checks import check_above, check_at_least
from hydraloop.run_files.config_yaml import plain
from hydraloop.safety.instantiate import require_target
from hydraloop.schemas import stored
from hydraloop.schemas.data import SPLITS, loader_options
from hydraloop.schemas.optimizer import check_own_options, nodes
from hydraloop.schemas.root import Config
from hydraloop.schemas.scheduler import no_such_optimizer
from hydraloop.schemas.task import no_model

STRATEGIES = ("auto", "ddp", "fsdp2")
_AT_LEAST = {
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
    "data.loader.eval_batch_size": (1, "Use 1 or more."),
    "sweep.max_workers": (1, "Use 1 or more, or null for one per GPU."),
    "sweep.max_retries": (0, "Use 0 (no retry) or more."),
    "sweep.trials": (1, "Use 1 or more, or null for a grid."),
    "sweep.rung": (1, "Use 1 or more validations."),
}
"""By key: the lowest value, and the fix. Null is always accepted."""
_ABOVE_0 = ("engine.peak_tflops", "distributed.timeout", "distributed.train_timeout", "distributed.bucket_cap_mb")
"""Null is accepted, except for `distributed.timeout`."""
_DEFAULTS = {"task": "classification", "data": "digits", "optimizer": "adamw", "precision": "fp32"}
"""An option of each group that every run needs."""
_OF_HYDRA = re.compile(r"\$\{hydra[:.]")
_SECRET = re.compile(r"\w*[A-Za-z][\w-]*")
_CHOICES = {
    "distributed.strategy": STRATEGIES,
    "weights": ("averaged", "raw"),
    "init.mismatched": ("error", "skip"),
    "sweep.on_failure": ("continue", "stop"),
    "sweep.executor": ("pool", "submitit"),
    "sweep.prune": ("median", "hyperband"),
    "sweep.promote": ("asha",),
}


def validate(cfg: DictConfig, *, trains: bool = False) -> None:
    """Refuse a config from which no run can be built.

    Args:
        cfg: as composed, with or without the node `hydra`. It is not changed.
        trains: whether the run is to be trained, by the config alone, so that it needs training data.
    """
    _check_keys(cfg)
    with hydra_config(cfg) if "hydra" in cfg else nullcontext():
        check_interpolations(cfg)
        _check_values(cfg)
        _check_data(cfg, trains=trains)
        _check_targets(cfg, trains=trains)
        _check_hooks(cfg)
        if trains and has_schedules(cfg) and is_left_out(cfg, "param_scheduler"):
            raise not_applied()
        if cfg.engine.check_order:
            groups = {str(name): group for group in HOOK_GROUPS for name in cfg[group]}
            check_order(slots_of(cfg), key_of=lambda name: f"{groups.get(name, 'default_hooks')}.{name}")


@contextmanager
def hydra_config(cfg: DictConfig) -> Iterator[None]:
    """In the body, interpolations of `${hydra:…}` resolve. `cfg` has the node `hydra`."""
    before = HydraConfig.instance().cfg  # of a surrounding job
    HydraConfig.instance().cfg = cast(Any, cfg)  # `set_config` would copy the node, which takes 3 ms
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def check_strategy(strategy: str, *, several: bool) -> None:
    """Refuse a strategy for several processes if there is one."""
    if strategy != "auto" and not several:
        raise UserError(
            f"{strategy} shares the work of several processes, and there is one",
            key="distributed.strategy",
            remedy=Remedy("Use auto, or start several: distributed.nproc_per_node=2, or torchrun.", (strategy, "auto")),
        )


def check_typed(cfg: DictConfig, run_dir: Path, typed: Collection[str]) -> None:
    """Refuse what only a command line may set: alerts, and traces that could be outside the run directory.

    Called when the run is built: only then do environment variables and `${hydra:…}` have their values.
    """
    from hydraloop.tracking.run_description import flattened  # 10 ms, which other commands do without

    check_alerts(cfg, typed)
    folder = run_dir.resolve()
    for hook, node in hook_nodes(cfg):
        key, path = f"{hook}.json_trace_path", node.get("json_trace_path")
        inside = path is None or (folder / str(path)).resolve().is_relative_to(folder)
        if key not in typed and not (inside and str(path or ".json").endswith((".json", ".json.gz"))):
            raise UserError(
                f"{path} may be a file outside the run directory, or not a trace",
                key=key,
                remedy="In a config file, name one in the run directory that ends in .json or .json.gz: trace.json. "
                f"Any other path must be typed on the command line: {key}=…",
            )
    written: dict[str, object] = {}
    for key, node in [*hook_nodes(cfg), ("engine.compile", cfg.engine.compile)]:
        with suppress(InterpolationResolutionError):  # an error when it is built
            written |= flattened(plain(node), key)
    for key, value in written.items():
        owner = re.sub(r"(\.\d+)?\._target_$", "", key)
        is_handler = key.endswith("._target_") and str(value).endswith(".tensorboard_trace_handler")
        is_compilers = key.startswith("engine.compile.options.") and "trace" in key.split(".")
        if (is_handler or is_compilers) and not {owner, key} & {*typed}:
            raise UserError(
                "in a config file, this is refused, because it writes files outside the run directory",
                key=owner,
                remedy=f"Use tb_trace, or type it: {owner}=…"
                if is_handler
                else "Leave it out, and begin the command with TORCH_COMPILE_DEBUG=1",
            )


def check_alerts(cfg: DictConfig, typed: Collection[str]) -> None:
    """Refuse a command and an address of the hook `alert` in a config file, which can come from anywhere.

    Raises:
        UserError: names the key.
    """
    for hook, node in hook_nodes(cfg):
        written: Any = OmegaConf.to_container(node, resolve=False)
        is_ours = str(written.get("_target_")).startswith(("hydraloop.", "${"))
        for name in ("notify_command", "webhook") if is_ours else ("notify_command",):
            key = f"{hook}.{name}"
            if written.get(name) is not None and key not in typed:
                raise UserError(
                    "a config file may not set this, because it can come from anywhere",
                    key=key,
                    remedy=f"Type it: {key}=…. Or let the file name an environment variable: {name}_env: MY_ALERT",
                )


def hook_nodes(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield (key, config) of each hook; a hook's name may contain dots."""
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if isinstance(node, DictConfig):
                yield f"{group}.{name}", node


def slots_of(cfg: DictConfig) -> list[Slot]:
    """Return the hooks' places in the order, from the config and the facts about their classes. No hook is imported."""
    slots = []
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is not None:
                slots.append(_slot(group, str(name), str(node.get("_target_")), node.get("priority")))
    selected = targets(cfg)
    for name in missing({str(name) for group in HOOK_GROUPS for name in cfg[group]}, scheduled=has_schedules(cfg)):
        target = dict(stored("default_hooks"))[name]._target_
        if target not in selected:
            slots.append(_slot("default_hooks", name, target, None))
    return in_order(slots)


def _slot(group: str, name: str, target: str, priority: int | str | None) -> Slot:
    facts = CLASSES.get(target.removeprefix("hydraloop.hooks."), {})
    default = facts.get("priority", Priority.NORMAL)
    return Slot(
        name=name,
        priority=Priority.of(default if priority is None else priority, key=f"{group}.{name}.priority"),
        is_default=group == "default_hooks",
        runs_after=tuple(facts.get("runs_after", ())),
        mount_points=tuple(facts["mount_points"]) if facts else None,
    )


def _check_keys(cfg: DictConfig) -> None:
    """Refuse a config that lacks a key of hydraloop, or has one that no schema knows."""
    for entry in dataclasses.fields(Config):
        if entry.name not in cfg:  # OmegaConf counts a missing value (???) as not there
            text = f"Leave ~{entry.name} out if you typed it, or give the key a value: {entry.name}=…"
            if entry.name in _DEFAULTS:
                text = f"Leave ~{entry.name} out if you typed it. Otherwise, add to the defaults of your config file, "
                text += f"before _self_: - {entry.name}: {_DEFAULTS[entry.name]}"
            remedy = Remedy(text, leave_out=[entry.name])
            raise UserError("the config lacks this key, which every run needs", key=entry.name, remedy=remedy)
    for key, node, known in _sections(cfg):
        for name in node:
            if str(name) not in known:
                raise UserError("there is no such option", key=f"{key}.{name!s}", remedy=suggestion(str(name), known))
            if OmegaConf.is_missing(node, name):
                raise UserError("has no value", key=f"{key}.{name!s}", remedy=f"Give it one: {key}.{name!s}=…")


def _sections(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, list[str]]]:
    """Yield (key, mapping, names of its options) of what hydraloop itself reads, not of what a `_target_` takes.

    Hydra does not check these: a + on the command line adds a key to any mapping.
    """
    for name, raw in cfg.items_ex(resolve=False):
        if name == "hydra" or not isinstance(raw, DictConfig):
            continue
        if OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, str(name)):
            continue
        node, key = cfg[name], f"{prefix}{name!s}"
        if node is None or "_target_" in node:
            continue
        schema = OmegaConf.get_type(node)
        if schema is not None and dataclasses.is_dataclass(schema):
            yield key, node, [entry.name for entry in dataclasses.fields(schema)]
        yield from _sections(node, f"{key}.")


def check_interpolations(node: DictConfig, prefix: str = "") -> None:
    """Refuse interpolations that do not resolve.

    Args:
        prefix: of the keys of the node: `hydra.`.
    """
    for name, raw in node.items_ex(resolve=False):
        key = f"{prefix}{name!s}"
        # ${hydra:runtime.output_dir} and the like have a value once the job runs.
        if key == "hydra" or OmegaConf.is_missing(node, name) or (isinstance(raw, str) and _OF_HYDRA.search(raw)):
            continue
        try:
            value = node[name]
        except InterpolationResolutionError as error:
            raise UserError(
                f"{raw!s} does not resolve: {str(error).splitlines()[0]}",
                key=key,
                remedy=f"Name a key that exists (or set the variable), or write a value: {key}=…",
            ) from error
        if isinstance(value, DictConfig) and not _resolves(value):
            check_interpolations(value, f"{key}.")


def _resolves(node: DictConfig) -> bool:
    """Return whether every interpolation in a node resolves, faster than `check_interpolations` finds the first one."""
    try:
        OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException:
        return False
    return True


def check_sweep_options(master: DictConfig) -> None:
    """Refuse options `sweep.*` that are out of range. The configs of jobs do not have them."""
    _check_options(master, "sweep.")


def _check_options(cfg: DictConfig, section: str = "") -> None:
    """Refuse numbers that are too low, and unknown choices."""
    for key, (lowest, remedy) in _AT_LEAST.items():
        if key.startswith(section):
            check_at_least(lowest, remedy, **{key: OmegaConf.select(cfg, key)})
    for key, choices in _CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if key.startswith(section) and value is not None and value not in choices:
            raise UserError(f"{value!r} is unknown", key=key, remedy=use_one_of(choices, value))


def _check_values(cfg: DictConfig) -> None:
    """Refuse numbers out of range, unknown choices, and options that contradict each other."""
    _check_options(cfg)
    for key in _ABOVE_0:
        check_above(0, "" if key == "distributed.timeout" else "null", **{key: OmegaConf.select(cfg, key)})
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
        limit = OmegaConf.select(cfg, f"engine.{name}")
        if limit is not None and not (0 < limit <= 1 if isinstance(limit, float) else limit >= 1):
            text = "Use a whole number from 1 (100), a share up to 1.0 (0.1), or null for all batches."
            raise UserError(
                f"{limit} is neither a number of batches nor a share of them",
                key=f"engine.{name}",
                remedy=Remedy(text, (str(limit), "null")),
            )
    for name in ("max_time", "requeue_after"):
        seconds_of(cfg.engine[name], f"engine.{name}")
    if cfg.engine.deterministic and cfg.engine.benchmark:
        raise UserError(
            "it selects algorithms by their time, so runs differ, which engine.deterministic=true shall prevent",
            key="engine.benchmark",
            remedy=Remedy("Leave one of the two out.", leave_out=["engine.benchmark"]),
        )
    for name in cfg.secrets:
        if not _SECRET.fullmatch(str(name)):
            text = "Use letters, and the last part of a key: secrets=[dsn] for hooks.mine.dsn."
            remedy = Remedy(text, (str(name), str(name).rpartition(".")[2]) if "." in str(name) else None)
            raise UserError(f"{name!r} is not the name of a key", key="secrets", remedy=remedy)
    if not 0 <= cfg.seed < 2**63:
        raise UserError(
            f"{cfg.seed} is out of range", key="seed", remedy=Remedy("Use 0 .. 2^63 - 1.", (str(cfg.seed), "0"))
        )
    if cfg.resume is not None and cfg.load_from is not None:
        remedy = Remedy("Leave one of the two out.", leave_out=["load_from"])
        raise UserError("resume takes the weights of the run that it continues", key="load_from", remedy=remedy)


def _check_data(cfg: DictConfig, *, trains: bool) -> None:
    if trains and cfg.data.get("train") is None:
        raise UserError(
            "there is no training data",
            key="data.train",
            remedy=Remedy("Select some: data=digits.", add=["data=digits"]),
        )
    if trains and cfg.engine.pause_after is not None and None in (cfg.engine.val_interval, cfg.data.get("val")):
        text = "Set data.val and engine.val_interval=1, or set engine.pause_after=null."
        remedy = Remedy(text, add=["engine.pause_after=null"])
        raise UserError("this needs a validation, and the run has none", key="engine.pause_after", remedy=remedy)
    for split in SPLITS:
        loader_options(cfg.data, split)


def _check_targets(cfg: DictConfig, *, trains: bool) -> None:
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


def _check_hooks(cfg: DictConfig) -> None:
    """Refuse what is not a hook, a name that is used twice, and priorities and `on_error`s that are unknown."""
    for name, node in cfg.hooks.items():
        if node is not None and cfg.default_hooks.get(name) is not None:
            remedy = Remedy("Give it another name.", (f"+hooks.{name}.", f"+hooks.my_{name}."))
            raise UserError(f"there is a default hook {name!r} already", key=f"hooks.{name}", remedy=remedy)
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is None:
                continue
            key = f"{group}.{name}"
            if "/" in str(name) or "\\" in str(name):
                raise UserError("files are named after a hook", key=key, remedy="Use a name without slashes.")
            if not isinstance(node, DictConfig) or "_target_" not in node:
                raise _not_a_hook(str(name), cfg[group], group)
            if node.get("priority") is not None:
                Priority.of(node.priority, key=f"{key}.priority")
            on_error = node.get("on_error")
            if on_error is not None and on_error not in ON_ERROR:
                remedy = use_one_of(ON_ERROR, on_error)
                raise UserError(f"{on_error!r} is unknown", key=f"{key}.on_error", remedy=remedy)


def _not_a_hook(name: str, hooks: DictConfig, group: str) -> UserError:
    """A value under a hook group without a class: added with a +, or selected from a file without a package line."""
    node, header = hooks[name], f"# @package {group}.<name>"
    if name in dict(stored(group)):
        selected = f"[{','.join(map(str, hooks))}]"
        text = f"Select it: {group}={selected}. Its options are then changed without a +.\n"
        text += f"  In a config file, write in its defaults: - override /{group}: {selected}"
        remedy: str = Remedy(text, (f"+{group}.{name}.", f"{group}.{name}."), add=[f"{group}={selected}"])
    elif isinstance(node, DictConfig):
        remedy = f"Add +{group}.{name}._target_=package.Class. A file in conf/{group}/ begins with: {header}"
        if close := close_names(name, dict(stored(group)), most=1, cutoff=0.8):
            remedy = Remedy(f"Did you mean {close[0]}?", (f"+{group}.{name}.", f"+{group}.{close[0]}."))
    else:
        remedy = f"A file in conf/{group}/ begins with the line, before any comment: {header}"
        if name != "_target_":  # typed; not from a file without that line
            text = f"To add a custom hook: +{group}.{name}._target_=package.Class. {remedy}"
            add = [f"+{group}.{name}._target_={node}"] if isinstance(node, str) else []
            remedy = Remedy(text, add=add, leave_out=[f"{group}.{name}"] if add else [])
    shown = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    return UserError(f"{shown!r} is not a hook: it has no _target_", key=f"{group}.{name}", remedy=remedy)
