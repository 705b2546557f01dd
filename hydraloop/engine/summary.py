"""The text before and after training. Does not synchronize with the device."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch import nn

from hydraloop.engine.batches import Batches
from hydraloop.engine.evaluator import Evaluator
from hydraloop.engine.hook_order import COLUMNS, format_order
from hydraloop.engine.model_preparation import class_name
from hydraloop.engine.named_optimizers import Group
from hydraloop.engine.run_parts import Run
from hydraloop.engine.save_and_restore import Checkpoints
from hydraloop.files.environment import of_project, shown
from hydraloop.files.result import Result, describe
from hydraloop.files.terminal import duration, in_bytes, number, rate

_MOST_HOOKS = 3
"""Hooks that the summary lists with their time, the most expensive first."""


class Report:
    """The text before and after training.

    Args:
        run: the parts of the run.
        batches: its loaders.
        evaluator: the metrics.
        checkpoints: what was saved.
    """

    def __init__(self, run: Run, batches: Batches, evaluator: Evaluator, checkpoints: Checkpoints) -> None:
        self._run = run
        self._batches = batches
        self._evaluator = evaluator
        self._checkpoints = checkpoints

    # Before training. ------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Return the text before: model, data, device, optimizer, schedules, length, run directory, order of hooks."""
        run, progress, settings = self._run, self._run.progress, self._run.settings
        ranks = run.ranks.world_size
        loaders = self._batches.loaders
        data = ", ".join(f"{name} {_size(loader)}" for name, loader in loaders.by_key().items()) or "none"
        rows = {
            "model": _model(run.model),
            "data": data,
            "device": f"{run.device}, {run.precision.name}"
            + (f", {ranks} processes ({'fsdp2' if run.ranks.sharded else 'ddp'})" if ranks > 1 else ""),
        }
        if loaders.train is not None:
            rows["optimizer"] = "none" if run.optimizer_or_none is None else format_optimizer(run)
            if run.schedules:
                rows["schedule"] = ", ".join(run.schedules)
            # Not the iterations of all epochs: before a resume, it is not known how many the epochs before had.
            if settings.max_iters is None:
                length = f"{_count(progress.max_epochs, 'epoch')} of {_count(progress.epoch_length, 'iteration')}"
            else:
                length = f"{_count(settings.max_iters, 'iteration')}, {progress.epoch_length:,} per epoch"
            rows["training"] = length
            if settings.accumulate > 1:
                rows["training"] += f", {settings.accumulate} per optimizer step"
        rows["run"] = shown(run.run_dir)
        if not self._run.calls.slots:
            return "\n".join(_aligned(rows))
        rows["hooks"] = "in the order they are called at each mount point, with priority"
        return "\n".join([*_aligned(rows), format_order(self._run.calls.slots)])

    # After training. -------------------------------------------------------------------------------------------------

    def end(self, result: Result | None, error: BaseException | None, seconds: float) -> str:
        """Return the text after: status, metrics, checkpoints, speed, use of time, the command to continue.

        Args:
            result: of the run; None: it could not be made.
            error: that ended the run.
            seconds: of the whole run, its closing hooks included.
        """
        validations = self._evaluator.validations
        rows = {} if result is None else self._ended(result, error)
        rows.update(self._best(result))
        if validations.metrics:
            rows["validation"] = _metrics(validations.metrics)
        if self._evaluator.test_metrics:
            note = " (of the best checkpoint)" if validations.best_checkpoint is not None else ""
            rows["test"] = _metrics(self._evaluator.test_metrics, note)
        if (lr := self._run.messages.read("lr_summary")) is not None:
            rows["lr"] = lr
        rows.update(self._time(seconds))
        rows.update(self._what_next(result))
        return "\n".join(_aligned(rows))

    def _ended(self, result: Result, error: BaseException | None) -> dict[str, str]:
        # With several ranks, the launcher reports the error: it knows which rank failed first.
        why = result.reason or (result.error if self._run.ranks.world_size == 1 else None)
        status = f"{result.status}: {why.splitlines()[0]}" if why else result.status
        status = status.removeprefix("interrupted: ") if why and why.startswith("interrupted") else status
        if isinstance(error, KeyboardInterrupt):
            status = describe(error)
        progress = self._run.progress
        here, whole = duration(result.seconds - result.earlier_seconds), duration(result.seconds)
        all_took = f"all {progress.iteration:,} took {whole}"
        resumed = f", resumed at {progress.began_at:,}; {all_took}" if progress.began_at else ""
        done, of_all = progress.iteration - progress.began_at, _count(progress.max_iters, "iteration")
        return {"status": status, "trained": f"{done:,} of {of_all} in {here}{resumed}"}

    def _best(self, result: Result | None) -> dict[str, str]:
        """Return the best validation, the best checkpoint and the last one."""
        rows: dict[str, str] = {}
        if result is not None and result.best is not None and (goal := result.objective) is not None:
            rows["best"] = f"{goal.metric} {number(goal.value)} at iteration {goal.iteration:,}{result.note}"
        kept = self._evaluator.validations.best_checkpoint
        files = {} if kept is None else {kept: "the best"}
        if self._checkpoints.last_checkpoint is not None:
            files.setdefault(self._checkpoints.last_checkpoint, "the last")
        if files:
            rows["checkpoint"] = "\n".join(f"{shown(file)} ({which})" for file, which in files.items())
        return rows

    def _time(self, run: float) -> dict[str, str]:
        """Return the speed, and how the time was used, in shares of `run`, the seconds of the run."""
        rows, parts = {}, []
        timing = self._run.messages.read("timing")  # `hooks.timer.Timing`
        if timing is not None:
            samples = self._run.progress.samples / max(self._run.progress.iteration, 1)
            rows["speed"] = (
                f"{rate(samples / timing.mean)} samples/s, {rate(1 / timing.mean)} iterations/s\n"
                f"mean {duration(timing.mean)}, p50 {duration(timing.p50)}, p90 {duration(timing.p90)}, "
                f"max {duration(timing.max)}"
            )
            parts.append(f"{timing.data_share * timing.total / run:.0%} waiting for data")
        waits: dict[str, float] = self._run.messages.read("tracker_waits") or {}  # a part of the hook's seconds
        seconds = self._run.calls.seconds
        cells = sorted(((cell[0] - waits.get(name, 0.0), name) for name, cell in seconds.items()), reverse=True)
        in_hooks = sum(taken for taken, _ in cells)
        if in_hooks:
            parts.append(f"{in_hooks / run:.0%} in hooks")
        if parts:
            rows["time"] = f"{duration(run)}: {', '.join(parts)}"
        if in_hooks:
            rows["hooks"] = ", ".join(f"{name} {duration(taken)}" for taken, name in cells[:_MOST_HOOKS] if taken)
            rows["hooks"] += ", …" if len(cells) > _MOST_HOOKS else ""
        waited = sum(waits.values())
        if waited > run / 100:  # less is not worth a line
            rows["trackers"] = f"waited {duration(waited)} for {', '.join(waits)} at the end"
        return rows

    def _what_next(self, result: Result | None) -> dict[str, str]:
        rows: dict[str, str] = {}
        run_dir, records = self._run.run_dir, self._run.messages.read("record_log")
        if records is not None and records.is_file():
            rows["records"] = shown(records)
        rows.update(self._run.messages.read("tracked") or {})
        traces = run_dir / "tf_tracing_logs"
        if traces.is_dir():
            rows["profile"] = f"{shown(traces)}; https://ui.perfetto.dev opens a trace"
        is_over = result is None or result.status == "finished"
        # Stopped by a hook: a resumed run stops again, unless an option of that hook changes.
        is_over |= result is not None and result.status == "stopped" and result.reason != self._run.settings.out_of_time
        if (
            not is_over
            and "given" not in self._run.settings.metadata  # objects from Python, which a command does not have
            and any((run_dir / "checkpoints").glob("*.pth"))
        ):
            rows["continue"] = shlex.join(of_project("resume", run_dir))
        return rows


def _model(model: nn.Module) -> str:
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    frozen = "" if trainable == total else f" ({trainable:,} trainable)"
    return f"{class_name(model)}, {total:,} parameters{frozen}, {in_bytes(size)}"


def _size(loader: Sized) -> str:
    dataset = getattr(loader, "dataset", None)  # a list of batches has none
    return _count(len(dataset), "sample") if isinstance(dataset, Sized) else _count(len(loader), "batch", "es")


def _metrics(metrics: Mapping[str, float], note: str = "") -> str:
    listed = ", ".join(f"{name}\xa0{number(value)}" for name, value in metrics.items())  # not separated by a line break
    return textwrap.fill(listed + note, COLUMNS, break_on_hyphens=False).replace("\xa0", " ")


def _aligned(rows: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0) + 2
    return [f"{name:<{width}}" + value.replace("\n", "\n" + " " * width) for name, value in rows.items()]


def _count(n: int, noun: str, ending: str = "s") -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else ending)


_MOST_GROUPS = 12
"""Groups that are printed: more do not fit on one screen."""


def group_names(groups: Sequence[Group]) -> list[str]:
    """Return the name of each group in the table and in the record.

    It is the label: `0`, `1`, `head`. With several optimizers, the first group of each has the name of its optimizer
    (`generator`), and the others have it before their label (`generator.1`).
    """
    names: list[str] = []
    for group in groups:
        name = ".".join(filter(None, (group.optimizer, group.label)))
        if group.optimizer and group.optimizer not in names:
            name = group.optimizer
        names.append(f"{name}.{len(names)}" if name in names else name)  # two groups may have one label
    return names


def format_optimizer(run: Run) -> str:
    """Return the class, lr and weight decay; with several groups, a line for each that is not empty.

    Numbers are those before any schedule.

    Args:
        run: has an optimizer.
    """
    kinds = ", ".join(f"{name} {type(one).__name__}".strip() for name, one in run.optimizers.items())
    lines: list[str] = []
    values = ""
    for name, group, own in zip(group_names(run.groups), run.groups, run.optimizer.param_groups, strict=True):
        if group.names:
            values = "".join(f", {key} {_number(own, key)}" for key in ("lr", "weight_decay") if key in own)
            entries = sum(parameter.numel() for parameter in own["params"])
            of_group = f"{_count(len(group.names), 'tensor')} ({group.names[0]}{', …' * (len(group.names) > 1)})"
            lines.append(f"{name}: {of_group}, {entries:,} parameters{values}")
    if len(lines) < 2:
        return kinds + values
    left = [f"… {len(lines) - _MOST_GROUPS} more"] if len(lines) > _MOST_GROUPS else []
    return "\n".join([f"{kinds}, {len(lines)} groups", *lines[:_MOST_GROUPS], *left])


def _number(group: Mapping[str, Any], name: str) -> str:
    """Return a number of a group before any schedule, as text."""
    value = group.get(f"initial_{name}", group[name])
    return f"{float(value):.4g}"
