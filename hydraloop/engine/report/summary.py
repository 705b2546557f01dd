"""What a person reads before and after training. Plain text; no host sync."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.engine.device.model_preparation import class_name
from hydraloop.engine.report.hook_table import format_order
from hydraloop.run.result import command

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.report.timing import Timing

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_MOST_HOOKS = 6
"""Hooks listed with their time; the rest, the cheapest, are summed up."""


def format_start(engine: Engine) -> str:
    """What is about to run: model, data, device, horizon, run directory, and the hooks in the order they are called."""
    rows = {
        "model": _model(engine),
        "data": _data(engine),
        "device": f"{engine.device}, {engine.precision.name}"
        + (f", {_ranks(engine)}" if engine.distributed.world_size > 1 else ""),
        "horizon": f"{_count(engine.max_iters, 'iteration')} in {_count(engine.max_epochs, 'epoch')}, "
        f"{engine.epoch_length:,} per epoch"
        + (f", {engine.accumulate} per optimizer step" if engine.accumulate > 1 else ""),
        "run": shown(engine.run_dir),
    }
    if engine.loaders.train is None:
        del rows["horizon"]
    if engine.stages.slots:
        rows["hooks"] = "in the order they are called, priority in brackets"
    return "\n".join([*_aligned(rows), *filter(None, [format_order(engine.stages.slots)])])


def format_summary(engine: Engine, seconds: float | None = None) -> str:
    """How the run ended: status, metrics, best checkpoint, time by iteration and hook, and commands to go on with.

    Args:
        seconds: of the whole run, its closing hooks included; None: as `result.json` says, without them.
    """
    result = engine.result
    rows: dict[str, str] = {}
    if result is not None:
        # Of several ranks, the launcher knows which one failed first, and says so after this.
        why = result.reason if engine.distributed.world_size > 1 else result.error or result.reason
        rows["status"] = result.status + (f": {why}" if why else "")
        here = engine.progress.iteration - engine.began_at
        rows["trained"] = f"{here:,} of {_count(engine.max_iters, 'iteration')} in {duration(result.seconds)}" + (
            f" (resumed at {engine.began_at:,})" if engine.began_at else ""
        )
    if engine.best is not None:
        rows["best"] = (
            f"{engine.best.metric} {number(engine.best.value)} at iteration {engine.best.iteration}, "
            f"{shown(Path(engine.best.checkpoint))}"
        )
    else:
        best = engine.messages.read("best")
        if best is not None:
            rows["best"] = f"{best.metric} {number(best.value)} at iteration {best.iteration}" + (
                f" (of the validations since iteration {engine.began_at:,})" if engine.began_at else ""
            )
    if engine.last_checkpoint is not None:
        rows["checkpoint"] = shown(engine.last_checkpoint)
    if engine.metrics:
        rows["validation"] = _metrics(engine.metrics)
    if engine.test_metrics:
        rows["test"] = _metrics(engine.test_metrics)
    timing: Timing | None = engine.messages.read("timing")
    if timing is not None:
        in_hooks = "" if timing.hook_share is None else f", {timing.hook_share:.0%} in hooks"
        rows["iteration"] = (
            f"mean {duration(timing.mean)}, p50 {duration(timing.p50)}, p90 {duration(timing.p90)}, "
            f"max {duration(timing.max)}; {timing.data_share:.0%} of the time waiting for data{in_hooks}"
        )
    rows.update(_hook_times(engine, seconds))
    rows.update(_what_next(engine))
    return "\n".join(_aligned(rows))


def _ranks(engine: Engine) -> str:
    return f"{engine.distributed.world_size} processes, {'fsdp2' if engine.distributed.sharded else 'ddp'}"


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
    loaders = {"train": engine.loaders.train, "val": engine.loaders.val, "test": engine.loaders.test}
    return ", ".join(f"{name} {_size(loader)}" for name, loader in loaders.items() if loader is not None) or "none"


def _size(loader: Sized) -> str:
    dataset = getattr(loader, "dataset", None)  # A list of batches is a loader too, and has none.
    return _count(len(dataset), "sample") if isinstance(dataset, Sized) else _count(len(loader), "batch", "es")


def _hook_times(engine: Engine, run: float | None) -> dict[str, str]:
    """`hooks: 0.12s in all, 3% of the run: checkpoint 0.10s (80%), …`, the most expensive first."""
    seconds = sorted(((cell[0], name) for name, cell in engine.stages.seconds.items()), reverse=True)
    total = sum(taken for taken, _ in seconds)
    if not total:
        return {}
    run = run or (engine.result.seconds if engine.result else None)
    of_run = f", {total / run:.0%} of the run" if run else ""
    listed = [f"{name} {duration(taken)} ({taken / total:.0%})" for taken, name in seconds[:_MOST_HOOKS]]
    if len(seconds) > _MOST_HOOKS:
        rest = sum(taken for taken, _ in seconds[_MOST_HOOKS:])
        listed.append(f"{len(seconds) - _MOST_HOOKS} others {duration(rest)}")
    return {"hooks": f"{duration(total)} in all{of_run}: {', '.join(listed)}"}


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
        and any((engine.run_dir / "checkpoints").glob("*.pth"))
    ):
        rows["to go on"] = f"{command()} resume={shown(engine.run_dir)}"
    return rows


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def _aligned(rows: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _count(n: int, noun: str, ending: str = "s") -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else ending)


def shown(path: Path) -> str:
    """A path for people: relative to the working directory where it is inside, else absolute."""
    path = path.absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def number(value: object) -> str:
    """A number of any size in 6 or so characters: `0.1234`, `1.235e-05`, `nan`; anything else as it is."""
    if not isinstance(value, float) or not isfinite(value):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def duration(seconds: float) -> str:
    """Seconds in a fitting unit: `85µs`, `4.2ms`, `1.23s`, `0:04:10`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f}ms"
    return f"{seconds:.2f}s" if seconds < 100 else clock(seconds)


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: `0:00:04`, `1 day, 2:03:04`."""
    return str(timedelta(seconds=round(seconds)))
