"""The text before and after training. Does not synchronize with the device."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.engine.device.model_preparation import class_name
from hydraloop.engine.hook import Priority
from hydraloop.engine.report.formats import duration, number, rate
from hydraloop.engine.report.hook_table import COLUMNS, format_folded, format_order
from hydraloop.engine.report.optimizer_table import format_optimizer
from hydraloop.run.environment import resume_command, shown
from hydraloop.run.result import describe

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.report.timing import Timing

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_MOST_HOOKS = 3
"""Hooks that the summary lists with their time, the most expensive first."""


def format_start(engine: Engine) -> str:
    """Return the text before training: model, data, device, optimizer, length, run directory, order of the hooks."""
    ranks = engine.distributed.world_size
    rows = {
        "model": _model(engine),
        "data": _data(engine),
        "device": f"{engine.device}, {engine.precision.name}"
        + (f", {ranks} processes ({'fsdp2' if engine.distributed.sharded else 'ddp'})" if ranks > 1 else ""),
        "optimizer": format_optimizer(engine, len("optimizer") + 2) if engine.hyperparameters else "none",
        "training": f"{_count(engine.max_iters, 'iteration')} in {_count(engine.max_epochs, 'epoch')}, "
        f"{engine.epoch_length:,} per epoch"
        + (f", {engine.accumulate} per optimizer step" if engine.accumulate > 1 else ""),
        "run": shown(engine.run_dir),
    }
    if engine.loaders.train is None:
        del rows["training"], rows["optimizer"]
    slots, hooks = engine.stages.slots, ""
    if slots and engine.settings.verbose:
        rows["hooks"] = "in the order they are called at each mount point, with priority"
        hooks = format_order(slots)
    elif slots:
        rows["hooks"], hooks = format_folded(
            slots, {slot.name: Priority.of(engine.hooks[slot.name].priority) for slot in slots if slot.is_default}
        )
    return "\n".join([*_aligned(rows), *filter(None, [hooks])])


def format_summary(engine: Engine, seconds: float | None = None) -> str:
    """Return the text after training: status, metrics, checkpoints, speed, use of time, the command to continue.

    Args:
        seconds: of the whole run, its closing hooks included; None: those of `result.json`, without closing hooks.
    """
    run = seconds or (engine.result.seconds if engine.result else 0.0)
    rows = _ended(engine)
    rows.update(_best(engine))
    if engine.metrics:
        rows["validation"] = _metrics(engine.metrics)
    if engine.test_metrics:
        rows["test"] = _metrics(engine.test_metrics, " (of the best checkpoint)" if engine.best is not None else "")
    if (lr := engine.messages.read("lr_summary")) is not None:
        rows["lr"] = lr
    rows.update(_time(engine, run))
    rows.update(_what_next(engine))
    return "\n".join(_aligned(rows))


def _ended(engine: Engine) -> dict[str, str]:
    result = engine.result
    if result is None:
        return {}
    # With several ranks, the launcher reports the error: it knows which rank failed first.
    why = result.reason or (result.error if engine.distributed.world_size == 1 else None)
    status = f"{result.status}: {why.splitlines()[0]}" if why else result.status
    if isinstance(engine.error, KeyboardInterrupt):
        status = describe(engine.error)
    done = engine.progress.iteration - engine.began_at
    resumed = f", resumed at {engine.began_at:,}" if engine.began_at else ""
    return {
        "status": status,
        "trained": f"{done:,} of {_count(engine.max_iters, 'iteration')} in {duration(result.seconds)}{resumed}",
    }


def _best(engine: Engine) -> dict[str, str]:
    """Return the best validation, the best checkpoint and the last one."""
    rows: dict[str, str] = {}
    best = engine.best or engine.messages.read("best")
    if best is not None:
        since = " (since the run was resumed)" if engine.best is None and engine.began_at else ""
        rows["best"] = f"{best.metric} {number(best.value)} at iteration {best.iteration:,}{since}"
    last = engine.last_checkpoint
    if engine.best is not None:
        rows["checkpoint"] = f"{shown(Path(engine.best.checkpoint))} (the best)"
        if last is not None and last != Path(engine.best.checkpoint):
            rows["checkpoint"] += f"\n{shown(last)} (the last)"
    elif last is not None:
        rows["checkpoint"] = f"{shown(last)} (the last)"
    return rows


def _time(engine: Engine, run: float) -> dict[str, str]:
    """Return the speed, and how the time was used, in shares of `run`, the seconds of the run."""
    rows, parts = {}, []
    timing: Timing | None = engine.messages.read("timing")
    if timing is not None:
        samples = engine.progress.samples / engine.progress.iteration
        rows["speed"] = (
            f"{rate(samples / timing.mean)} samples/s, {1 / timing.mean:.3g} iterations/s\n"
            f"mean {duration(timing.mean)}, p50 {duration(timing.p50)}, p90 {duration(timing.p90)}, "
            f"max {duration(timing.max)}"
        )
        parts.append(f"{timing.data_share * timing.total / run:.0%} waiting for data")
    cells = sorted(((cell[0], name) for name, cell in engine.stages.seconds.items()), reverse=True)
    in_hooks = sum(taken for taken, _ in cells)
    if in_hooks:
        parts.append(f"{in_hooks / run:.0%} in hooks")
    if parts:
        rows["time"] = f"{duration(run)}: {', '.join(parts)}"
    if in_hooks:
        rows["hooks"] = ", ".join(f"{name} {duration(taken)}" for taken, name in cells[:_MOST_HOOKS] if taken)
        rows["hooks"] += ", …" if len(cells) > _MOST_HOOKS else ""
    return rows


def _model(engine: Engine) -> str:
    parameters = list(engine.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    frozen = "" if trainable == total else f" ({trainable:,} trainable)"
    return f"{class_name(engine.model)}, {total:,} parameters{frozen}, {_bytes(size)}"


def _bytes(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.1f} {name}"


def _data(engine: Engine) -> str:
    return ", ".join(f"{name} {_size(loader)}" for name, loader in engine.loaders.by_key().items()) or "none"


def _size(loader: Sized) -> str:
    dataset = getattr(loader, "dataset", None)  # a list of batches has none
    return _count(len(dataset), "sample") if isinstance(dataset, Sized) else _count(len(loader), "batch", "es")


def _what_next(engine: Engine) -> dict[str, str]:
    rows: dict[str, str] = {}
    records: Path | None = engine.messages.read("record_log")
    traces = engine.run_dir / "tf_tracing_logs"
    if records is not None and records.is_file():
        rows["records"] = shown(records)
    rows.update(engine.messages.read("tracked") or {})
    if traces.is_dir():
        rows["profile"] = f"tensorboard --logdir {shown(traces)}"
    if (
        engine.result is not None
        and engine.result.status != "finished"
        and "given" not in engine.settings.metadata  # objects from Python, which a command does not have
        and any((engine.run_dir / "checkpoints").glob("*.pth"))
    ):
        rows["continue"] = shlex.join(resume_command(engine.run_dir))
    return rows


def _metrics(metrics: Mapping[str, float], note: str = "") -> str:
    listed = ", ".join(f"{name}\xa0{number(value)}" for name, value in metrics.items())  # not separated by a line break
    return textwrap.fill(listed + note, COLUMNS, break_on_hyphens=False).replace("\xa0", " ")


def _aligned(rows: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0) + 2
    return [f"{name:<{width}}" + value.replace("\n", "\n" + " " * width) for name, value in rows.items()]


def _count(n: int, noun: str, ending: str = "s") -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else ending)
