"""ProgressHook: shows a progress bar in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook, Priority
from hydraloop.errors import UserError
from hydraloop.files.terminal import clock, number
from hydraloop.schemas.option_checks import check_above

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SMOOTHING = 0.3
"""Weight of the newest rate in the displayed one: at ten updates a second, it adapts within a second."""


class ProgressHook(Hook):
    """Shows a progress bar of the training: epoch, iterations, rate, time left, the last loss and metric.

    Loss and metric are those of the last record, so the bar needs no host sync. Text printed through `sys.stdout` (as
    hydraloop's `ConsoleHandler` does) appears above the bar, in whole lines.

    Priority LOWEST: it shows the results of the other hooks. On rank 0 only. An update takes about a millisecond; all
    other calls compare two clock readings. No state. Errors warn, because a bar must not end a run. Options:
    `ProgressHookConf`.

    Raises:
        UserError: another value of `enabled`, or a rate of 0 or less.
    """

    priority = Priority.LOWEST
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, enabled: bool | str = "auto", refresh_per_second: float = 10) -> None:
        if enabled not in (True, False, "auto"):
            raise UserError(f"{enabled!r} is not a valid value", key="enabled", remedy="Use auto, true or false.")
        check_above(0, refresh_per_second=refresh_per_second)
        self._enabled = enabled
        if enabled is False or (enabled == "auto" and not sys.stdout.isatty()):
            self.idle_points = MOUNT_POINTS
        self._period = 1 / refresh_per_second
        self._bar: Bar | None = None
        self._due = float("inf")
        self._last: tuple[float, int] = (0.0, 0)
        self._rate = 0.0
        self._shown: dict[str, str] = {}

    def at_position(self, engine: Engine) -> None:
        """Measure the rate from this iteration on."""
        self._last = (perf_counter(), engine.progress.iteration)

    def before_train(self, engine: Engine) -> None:
        """Start the bar."""
        bar = _new_bar(force=self._enabled is True)
        if self._enabled == "auto" and bar.console.is_dumb_terminal:
            return
        bar.add_task(
            "", total=engine.max_iters, completed=engine.progress.iteration, epoch="", rate="", eta="", info=""
        )
        self._bar = bar
        bar.start()
        self._due = 0.0

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Update the bar if the last update is old enough."""
        now, iteration = perf_counter(), engine.progress.iteration
        if now < self._due:
            return
        then, before = self._last
        rate = (iteration - before) / (now - then)
        self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
        self._last, self._due = (now, iteration), now + self._period
        self._update(engine, "epoch")

    def before_val(self, engine: Engine) -> None:
        """Show that a validation runs."""
        self._update(engine, "val")

    def after_val(self, engine: Engine) -> None:
        """Show the epoch again; the rate does not include the validation."""
        self.at_position(engine)
        self._update(engine, "epoch")

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Keep the loss, or the first metric, for the next update."""
        mode = record.get("mode", "train")  # a record of another hook may have no mode
        name = "loss" if mode == "train" else next(iter(engine.validations.metric_names), "loss")
        if name in record:
            label = name if mode == "train" else f"{mode} {name}"
            self._shown[label] = number(record[name])

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._stop(engine)

    def after_train(self, engine: Engine) -> None:
        """Stop the bar and restore `sys.stdout`; the last state of the bar stays in the terminal."""
        self._stop(engine)

    def _update(self, engine: Engine, doing: str) -> None:
        if self._bar is None:
            return
        progress = engine.progress
        epoch = progress.epoch + (progress.batch_in_epoch > 0)
        eta = engine.messages.read("eta")
        self._bar.update(
            self._bar.task_ids[0],
            total=engine.max_iters,
            completed=progress.iteration,
            epoch=f"{doing} {epoch}/{engine.max_epochs}",
            rate=f"{self._rate:.1f} it/s" if self._rate else "",
            eta="" if eta is None else f"eta {clock(eta)}",
            info="  ".join(f"{label} {value}" for label, value in self._shown.items()),
            refresh=True,
        )

    def _stop(self, engine: Engine) -> None:
        bar, self._due = self._bar, float("inf")
        if bar is not None:
            try:
                self._update(engine, "epoch")
            finally:
                self._bar = None
                bar.stop()


def _new_bar(*, force: bool) -> Bar:
    """Return a bar that is drawn when the hook updates it, without a thread."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # soft_wrap: the terminal wraps long lines above the bar, so that a copied line is whole.
    console = Console(soft_wrap=True, force_terminal=True if force else None)
    return Progress(
        TextColumn("{task.fields[epoch]}"),
        BarColumn(bar_width=20),  # the only column that may shrink: the others do not wrap
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        *(TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("rate", "eta", "info")),
        console=console,
        auto_refresh=False,
        # a standard error that is a file is not redirected
        redirect_stderr=sys.stderr.isatty(),
    )
