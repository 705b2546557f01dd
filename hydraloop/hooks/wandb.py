"""WandbLoggerHook: sends the run's records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.option_checks import CHECKPOINTS, check_choice
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.tracker import WANDB
from hydraloop.tracking.wandb import chosen_mode

_MODES = ("auto", "online", "offline", "disabled")


class WandbLoggerHook(TrackerHook):
    """Shows the run at Weights & Biases, or writes files to `<run_dir>/wandb/` that `wandb sync` uploads.

    A separate process, the sender, makes one W&B run. Each record of `metrics.jsonl` is a row of its history
    (`train/loss`, `val/accuracy`, …): W&B's step is the line of the record, the axis is the iteration, and the times
    are those of the record. Pictures, texts, tables and histograms are in the row of their record. The run also has
    the config (secrets masked; `hydraloop` in it describes how the run was started), W&B's
    system metrics, and at the end status, error and `result.json`; the monitored metric in its summary is the best
    value. If W&B's processes or the network fail, `python -m hydraloop sync` completes the records later.

    A run stays online or offline as it began. A resumed run continues the same W&B run; changes of the config are
    `resume_1/…`. Online, the service must rewind the repeated rows. Offline, the file is written again completely,
    without the earlier system metrics. If the service cannot rewind, or the file was uploaded already, this is
    reported once and nothing more is sent: `python -m hydraloop sync --again` sends the whole run to a new one.

    Each job of a sweep is a run, in a group named after the sweep. `WANDB_RUN_ID` and other variables for a single run
    are ignored.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only. No host sync, and nothing
    in an iteration: the sender reads what the logger has written. No state. Options: `WandbLoggerHookConf`.

    Raises:
        UserError: an option is out of range, or the run has a second hook of this class.
    """

    kind = WANDB
    library = "wandb"

    def __init__(
        self,
        *,
        mode: str = "auto",
        project: str | None = None,
        init: Mapping[str, Any] = MappingProxyType({}),
        pictures: bool = True,
        log_code: bool = False,
        checkpoints: str | None = None,
        system_metrics: bool = True,
        flush_timeout: float = 10.0,
        interval: int = 1,
    ) -> None:
        check_choice(_MODES, mode=mode)
        check_choice(CHECKPOINTS, checkpoints=checkpoints)
        options = {
            "mode": mode,
            "project": project,
            "init": dict(init),
            "pictures": pictures,
            "log_code": log_code,
            "checkpoints": checkpoints,
            "system_metrics": system_metrics,
        }
        super().__init__(flush_timeout=flush_timeout, interval=interval, options=options)

    def before_run(self, engine: Engine) -> None:
        """Start the sender, or report that W&B is disabled."""
        self.check_only_one(engine, "make the same W&B run")
        if chosen_mode(self._options["mode"]) == "disabled":
            told = {**(engine.messages.read("tracked") or {}), self.name: "disabled, nothing was sent"}
            engine.messages.provide("tracked", lambda: told)
            return
        super().before_run(engine)
