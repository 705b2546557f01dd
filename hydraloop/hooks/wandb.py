"""WandbLoggerHook: sends the run's records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.schemas.option_checks import CHECKPOINTS, check_choice
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.tracker import WANDB


class WandbLoggerHook(TrackerHook):
    """Shows the run at Weights & Biases, or writes files to `<run_dir>/wandb/` that `wandb sync` uploads.

    A separate process, the sender, makes one W&B run. Each record of `metrics.jsonl` is a row of its history
    (`train/loss`, `val/accuracy`, …): W&B's step is the line of the record, and the axis is the iteration. Pictures,
    texts, tables and histograms are in the row of their record. The run also has the config (secrets masked;
    `hydraloop` in it describes how the run was started), W&B's system metrics, and at the end status, error and
    `result.json`; a metric of `save_best` has its best value in the summary. If W&B's processes or the network fail,
    `python -m hydraloop sync` completes the records later.

    A run is online if an API key is configured, else offline, unless `WANDB_MODE` or `+hooks.wandb.init.mode=offline`
    says otherwise, and it stays so. It never asks for a key. A resumed run continues the same W&B run; changes of the
    config are `resume_1/…`. Rows that W&B has had are not sent again; if a resume replaces them, a warning names them.
    Offline, all rows are written again until `wandb sync` has uploaded them, then only later rows. A directory that is
    uploaded while its run writes is an error: the records after that are not sent.

    Each job of a sweep is a run, in a group named after the sweep. `WANDB_RUN_ID` is ignored.

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
        init: Mapping[str, Any] = MappingProxyType({}),
        log_code: bool = False,
        checkpoints: str | None = None,
        flush_timeout: float = 10.0,
        interval: int = 1,
    ) -> None:
        check_choice(CHECKPOINTS, checkpoints=checkpoints)
        options = {"init": dict(init), "log_code": log_code, "checkpoints": checkpoints}
        super().__init__(flush_timeout=flush_timeout, interval=interval, options=options)

    def before_run(self, engine: Engine) -> None:
        self.check_only_one(engine, "make the same W&B run")
        super().before_run(engine)
