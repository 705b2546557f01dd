"""From a composed config to an `Engine`: the only place from which anything is instantiated, behind one allowlist.

`build` makes the parts in the order in which they need each other: seeds, data, task, optimizer, schedules, hooks.
Errors name the key in the config.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn, optim

from hydraloop.data.loader import build_loader
from hydraloop.data.sampler import mix_seed
from hydraloop.engine.checkpoint.format import initialise, peek
from hydraloop.engine.checks import check_hook
from hydraloop.engine.device.model_preparation import (
    WRAP,
    checkpoint_activations,
    compile_modules,
    modules_of,
    use_channels_last,
)
from hydraloop.engine.device.precision import make_precision
from hydraloop.engine.device.seeding import seed_everything, use_deterministic_kernels
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import ON_ERROR, Hook, OnError
from hydraloop.engine.hook_order import Slot, check_order, in_order, slot_of
from hydraloop.engine.inputs import Loaders, Settings
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.optim.building import build_schedule
from hydraloop.optim.optimizers import resolve_fused
from hydraloop.optim.overlap import introduce
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.startup import avoid_dynamo_import
from hydraloop.run import directory as run_directory
from hydraloop.run.config_yaml import masked_yaml, remember_config
from hydraloop.run.lock import RunLock
from hydraloop.safety import typed_options as typed
from hydraloop.safety.instantiate import instantiate, require_target
from hydraloop.tasks.task import Task

log = logging.getLogger(__name__)

_ENGINE_ONLY = {"deterministic", "check_order", "compile", "threads", "activation_checkpointing", "channels_last"}
"""Keys of `engine` that are not settings of the Engine object."""


def build(
    cfg: DictConfig,
    *,
    run_dir: Path | None = None,
    resumed: run_directory.Resumed | None = None,
    distributed: Distributed | None = None,
) -> Engine:
    """Everything a run needs, from its config.

    Where a launcher has started several processes (torchrun), each calls it, and they train together.

    Args:
        cfg: as composed; not changed.
        run_dir: where the run's files go; None makes a new directory under `outputs/`, or goes on in the resumed
            run's.
        resumed: what whoever starts the run has settled and recorded: directory and checkpoint; None: it is done here.
        distributed: the ranks; None: as the launcher's environment variables say.

    Raises:
        UserError: an option that cannot be built; names the key and what to do.
        Exception: whatever a constructor of the user's own raises.
    """
    remember_config(cfg)
    _check_options(cfg)
    use_deterministic_kernels(cfg.engine.deterministic)
    if distributed is None:
        distributed = connect(cfg.distributed, cfg.engine.device)
        if cfg.distributed.nproc_per_node > 1 and distributed.world_size == 1:
            raise UserError(
                "from Python no processes are started",
                key="distributed.nproc_per_node",
                remedy=f"Use train.py, or torchrun --nproc-per-node={cfg.distributed.nproc_per_node} script.py.",
            )
    if distributed.world_size == 1 and cfg.distributed.strategy != "auto":
        raise UserError(
            f"{cfg.distributed.strategy} shares the work of several processes, and there is one",
            key="distributed.strategy",
            remedy="Leave it at auto, or start several with torchrun.",
        )
    settled = _settle(cfg, run_dir, distributed) if resumed is None else resumed
    device = distributed.device(cfg.engine.device)
    seed_everything(cfg.seed)
    torch.set_num_threads(cfg.engine.threads or _own_threads())
    avoid_dynamo_import()
    precision = make_precision(cast("Mapping[str, Any]", OmegaConf.to_container(cfg.precision, resolve=True)), device)
    loaders = _build_loaders(cfg, device, distributed)
    task = _build_task(cfg)
    initialise(task.model, cfg.init.checkpoint, cfg.init.prefix)
    channels_last = _prepare_model(cfg, task, device, distributed)
    settings = _settings(cfg, settled.checkpoint, channels_last=channels_last)
    optimizer = _build_optimizer(cfg, task)
    hooks, slots, on_error = _build_hooks(cfg, several=distributed.world_size > 1)
    _check_traces(cfg, settled.run_dir)
    directory = settled.run_dir or run_directory.new()
    engine = Engine(
        task=task,
        optimizer=optimizer,
        loaders=loaders,
        hooks=hooks,
        slots=slots,
        on_error=on_error,
        schedules=_build_schedules(cfg, optimizer, settings, loaders),
        settings=settings,
        run_dir=directory,
        seed=cfg.seed,
        distributed=distributed,
        precision=precision,
        lock=_lock(cfg, directory) if resumed is None and distributed.is_main else None,
    )
    if distributed.is_main:
        checkpointing = [hook for hook in hooks.values() if isinstance(hook, CheckpointHook)]
        out_dirs = [hook.out_dir for hook in checkpointing if hook.out_dir is not None]
        again = settled.checkpoint is not None
        run_directory.record(cfg, engine.run_dir, out_dirs, resumed=again, recorded=resumed is not None)
    else:
        seed_everything(mix_seed(cfg.seed, distributed.rank))  # the same model on all ranks, but not the same dropout
    return engine


def _settle(cfg: DictConfig, run_dir: Path | None, distributed: Distributed) -> run_directory.Resumed:
    """The directory and checkpoint to use, as rank 0 finds them."""
    found: list[str | None] = [None, None]
    if distributed.is_main:
        settled = run_directory.settle(cfg, run_dir)
        if settled.run_dir is not None:
            with _lock(cfg, settled.run_dir):  # refused before anything is written; training takes it again
                settled = run_directory.settle(cfg, settled.run_dir if run_dir is None else run_dir)
        found = [None if path is None else str(path) for path in (settled.run_dir, settled.checkpoint)]
    shared = distributed.from_main(found)
    return run_directory.Resumed(*(None if path is None else Path(path) for path in shared))


def _lock(cfg: DictConfig, run_dir: Path) -> RunLock:
    return RunLock(run_dir, key="run_dir" if cfg.resume is None else "resume", wait=cfg.resume == "auto")


@functools.cache
def _own_threads() -> int:
    """torch's own number of threads: what it was before the first run of this process."""
    return torch.get_num_threads()


def _check_options(cfg: DictConfig) -> None:
    """Values out of range, and options that contradict each other."""
    if cfg.distributed.strategy not in ("auto", "ddp", "fsdp2"):
        raise UserError(
            f"{cfg.distributed.strategy!r} is unknown", key="distributed.strategy", remedy="Use auto, ddp or fsdp2."
        )
    if cfg.engine.peak_tflops is not None and not cfg.engine.peak_tflops > 0:
        raise UserError(f"{cfg.engine.peak_tflops} is not above 0", key="engine.peak_tflops", remedy="Or use null.")
    if cfg.resume is not None and cfg.load_from is not None:
        raise UserError(
            "resume takes the weights of the run it goes on with", key="load_from", remedy="Leave one of the two out."
        )
    if cfg.weights not in ("averaged", "raw"):
        raise UserError(f"{cfg.weights!r} is unknown", key="weights", remedy="Use averaged or raw.")
    for key, or_null in (
        ("max_epochs", ""),
        ("max_iters", ", or null for max_epochs"),
        ("accumulate", ""),
        ("val_interval", ", or null for never"),
        ("threads", ", or null for all cores"),
    ):
        value = cfg.engine[key]
        if value is not None and value < 1:
            raise UserError(f"{value} is below 1", key=f"engine.{key}", remedy=f"Use 1 or more{or_null}.")
    if cfg.engine.val_begin < 0:
        raise UserError(f"{cfg.engine.val_begin} is negative", key="engine.val_begin", remedy="Use 0 for the start.")
    if not 0 <= cfg.seed < 2**63:
        raise UserError(f"{cfg.seed} is out of range", key="seed", remedy="Use 0 .. 2^63 - 1.")


def _settings(cfg: DictConfig, resume: Path | None, *, channels_last: bool) -> Settings:
    engine = {str(name): value for name, value in cfg.engine.items() if name not in _ENGINE_ONLY}
    return Settings(
        **engine,
        channels_last=channels_last,
        resume=resume,
        resume_strict=cfg.resume_strict,
        optimizer_overrides=_optimizer_overrides(cfg) if resume is not None else frozenset(),
        load_from=None if cfg.load_from is None else Path(cfg.load_from),
        weights=cfg.weights,
        metadata={"experiment_name": cfg.experiment_name, "config": masked_yaml(cfg, resolve=True)},
    )


def _optimizer_overrides(cfg: DictConfig) -> frozenset[str]:
    """The hyperparameters of the optimizer that were typed and can replace those of a resumed run."""
    names = {key.split(".")[1] for key in typed.keys(cfg) if key.startswith("optimizer.")}
    names = {name for name in names if not name.startswith("_")}
    for schedule, node in cfg.scheduler.items():
        if node is None:
            continue
        kind, name = str(node.get("_target_")).rpartition(".")[2], node.get("param", _SCHEDULE_FIELDS["param"])
        if kind in ("OneCycleLR", "CyclicLR") and name in names:
            log.warning(
                "optimizer.%s has no effect on a resumed run: %s in scheduler.%s has numbers of its own",
                name, kind, schedule,
            )  # fmt: skip
            names.discard(name)
    return frozenset(names)


def _prepare_model(cfg: DictConfig, task: Task, device: torch.device, distributed: Distributed) -> bool:
    """Bring the model to the device and into the form that is trained, before an optimizer looks at its parameters.

    Returns:
        Whether images are laid out channels last.
    """
    task.to(device)
    task.device = device
    channels_last = use_channels_last(task.model, cfg.engine.channels_last, weights=not distributed.sharded)
    checkpoint_activations(task.model, cfg.engine.activation_checkpointing)
    blocks = modules_of(task.model, cfg.distributed.fsdp.wrap, key=WRAP) if distributed.sharded else []
    distributed.prepare(task.model)  # gives their classes other names
    options = cfg.engine.compile
    if isinstance(options, DictConfig):
        options = OmegaConf.to_container(options, resolve=True)
    compile_modules(blocks or [task.model], options)
    return channels_last


def _build_loaders(cfg: DictConfig, device: torch.device, distributed: Distributed) -> Loaders:
    if cfg.data.get("loader") is None:
        raise UserError(
            "the data has no options of the loader",
            key="data.loader",
            remedy="Begin the file of your data with `defaults: [base, _self_]`, which brings them.",
        )
    options = cast(dict[str, Any], OmegaConf.to_container(cfg.data.loader, resolve=True))
    eval_batch_size = options.pop("eval_batch_size", None)
    if eval_batch_size is None:
        eval_batch_size = options["batch_size"]
    elif eval_batch_size < 1:
        raise UserError(f"{eval_batch_size} is below 1", key="data.loader.eval_batch_size", remedy="Use 1 or more.")
    loaders: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        if cfg.data.get(split) is None:
            continue
        dataset = instantiate(cfg.data[split], f"data.{split}")
        training = split == "train"
        changed = {} if training else {"batch_size": eval_batch_size, "drop_last": False}
        loaders[split] = build_loader(
            dataset,
            shuffle=training,
            seed=cfg.seed,
            device=device,
            key=f"data.{split}",
            rank=distributed.rank,
            world_size=distributed.world_size,
            **{**options, **changed},
        )
    return Loaders(**loaders)


def _build_task(cfg: DictConfig) -> Task:
    for name, metric in (cfg.task.get("metrics") or {}).items():
        if metric is not None:
            require_target(metric, f"task.metrics.{name}")
    if "model" in cfg.task and cfg.task.model is None:
        raise UserError("there is no model", key="task.model", remedy="Select one: model=small_cnn.")
    task = instantiate(cfg.task, "task")
    if not isinstance(task, nn.Module):
        raise UserError(
            f"{type(task).__name__} is no task", key="task._target_", remedy="Inherit from hydraloop.tasks.Task."
        )
    return cast(Task, task)


def _build_optimizer(cfg: DictConfig, task: Task) -> optim.Optimizer:
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the model has no parameter to train", key="task.model", remedy="Unfreeze some, or check it.")
    saved = {id(parameter) for parameter in task.model.parameters()}
    outside = [
        name for name, parameter in task.named_parameters() if parameter.requires_grad and id(parameter) not in saved
    ]
    if outside:
        raise UserError(
            f"{', '.join(outside)} would be trained and is no part of task.model, which is what checkpoints save",
            key="task",
            remedy="Make it a part of the model (a module around both), or set requires_grad=False.",
        )
    node = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(cfg.optimizer, resolve=True)))
    if "fused" in node:
        node.fused = resolve_fused(node.fused, parameters, optimizer=str(node._target_).rpartition(".")[2])
    factory = instantiate(node, "optimizer")
    if not isinstance(factory, functools.partial):
        raise UserError("must be built with the model's parameters", key="optimizer", remedy="Set _partial_: true.")
    try:
        optimizer = factory(parameters)
    except (ValueError, TypeError, IndexError) as error:
        if not str(node._target_).startswith("torch."):
            raise
        raise UserError(f"{factory.func.__name__} refuses its options: {error}", key="optimizer") from error
    if not isinstance(optimizer, optim.Optimizer):
        raise UserError(f"{type(optimizer).__name__} is no torch optimizer", key="optimizer._target_")
    return optimizer


def _build_schedules(
    cfg: DictConfig, optimizer: optim.Optimizer, settings: Settings, loaders: Loaders
) -> dict[str, Schedule]:
    """Each entry of `scheduler`; `_SCHEDULE_FIELDS` are ours, the rest the scheduler's own."""
    epoch_length = 0 if loaders.train is None else len(loaders.train)
    steps_per_epoch = -(-epoch_length // settings.accumulate)
    if settings.max_iters is None:
        epochs, steps = settings.max_epochs, settings.max_epochs * steps_per_epoch
        done = None if settings.resume is None else peek(settings.resume, key="resume")
        if done is not None and done.epoch_length not in (None, epoch_length):  # other ranks, or another batch size
            steps = done.optimizer_step + max(epochs - done.epoch, 0) * steps_per_epoch
    else:
        whole, rest = divmod(settings.max_iters, max(epoch_length, 1))
        epochs, steps = whole + bool(rest), whole * steps_per_epoch + -(-rest // settings.accumulate)
    schedules: dict[str, Schedule] = {}
    for name, node in cfg.scheduler.items():
        if node is None:
            continue
        key = f"scheduler.{name}"
        require_target(node, key)
        plain = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(node, resolve=True)))
        ours = {field: plain.pop(field, default) for field, default in _SCHEDULE_FIELDS.items()}
        schedules[str(name)] = build_schedule(
            str(name),
            instantiate(plain, key),
            optimizer,
            **ours,
            steps_per_epoch=steps_per_epoch,
            total_epochs=epochs,
            total_steps=steps,
        )
    introduce(schedules.values())
    return schedules


_SCHEDULE_FIELDS = {
    "param": "lr",
    "by_epoch": False,
    "convert_to_iter_based": False,
    "begin": 0,
    "end": None,
    "monitor": None,
}


def _check_traces(cfg: DictConfig, run_dir: Path | None) -> None:
    """Refuse a trace of a hook that would overwrite a file outside the run directory, unless its path was typed.

    Raises:
        UserError: the path.
    """
    folder = (run_dir or Path("run")).resolve()
    for key in (f"{group}.{name}.json_trace_path" for group in ("default_hooks", "hooks") for name in cfg[group]):
        path = OmegaConf.select(cfg, key)
        inside = path is None or (folder / str(path)).resolve().is_relative_to(folder)
        if key not in typed.keys(cfg) and not (inside and str(path or ".json").endswith((".json", ".json.gz"))):
            raise UserError(
                f"{path} may be a file outside the run directory, or not a trace",
                key=key,
                remedy="In a config file, name one in the run directory that ends in .json or .json.gz: trace.json. "
                f"Any other has to be typed on the command line: {key}=…",
            )


def _build_hooks(cfg: DictConfig, *, several: bool) -> tuple[dict[str, Hook], list[Slot], dict[str, OnError]]:
    """The hooks by name, default ones first, with their places and what their errors do."""
    hooks: dict[str, Hook] = {}
    slots: list[Slot] = []
    on_errors: dict[str, OnError] = {}
    for group in ("default_hooks", "hooks"):
        for name, node in cfg[group].items():
            if node is None:
                continue
            key = f"{group}.{name}"
            if name in hooks:
                raise UserError(f"there is a default hook {name!r} already", key=key, remedy="Give it another name.")
            hook, priority, on_error = _build_hook(node, key, several=several)
            hooks[str(name)] = hook
            slots.append(slot_of(str(name), hook, priority, is_default=group == "default_hooks"))
            on_errors[str(name)] = on_error
    if cfg.engine.check_order:
        check_order(in_order(slots), key_of=lambda name: hooks[name].key)
    return hooks, slots, on_errors


def _build_hook(node: DictConfig, key: str, *, several: bool) -> tuple[Hook, int | str | None, OnError]:
    plain = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(node, resolve=True)))
    priority, on_error = plain.pop("priority", None), plain.pop("on_error", None)
    hook: Hook = instantiate(plain, key)
    check_hook(hook, f"{key}._target_")
    hook.key = key
    on_error = hook.on_error if on_error is None else on_error
    if on_error not in ON_ERROR:
        raise UserError(f"{on_error!r} is unknown", key=f"{key}.on_error", remedy=f"Use {', '.join(ON_ERROR)}.")
    if several and hook.collective and on_error != "raise":
        raise UserError(
            "this hook calls collectives: if one rank went on without it, the others would wait for ever",
            key=f"{key}.on_error",
            remedy="Use raise.",
        )
    return hook, priority, on_error
