"""WandbLoggerHook: sends the run's records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydraloop.errors import UserError
from hydraloop.tracking.checkpoints import check_choice
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.kinds import WANDB
from hydraloop.tracking.wandb.names import names_of
from hydraloop.tracking.wandb.setup import is_disabled

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_MODES = ("auto", "online", "offline", "disabled")


class WandbLoggerHook(TrackerHook):
    """Shows the run at Weights & Biases, or writes files to `<run_dir>/wandb/` that `wandb sync` uploads.

    A separate process, the follower, makes one W&B run: each record of `metrics.jsonl` is a row of its history
    (`train/loss`, `val/accuracy`, …; W&B's step is the line of the record, the axis is the iteration). It also sends
    pictures of `visualization`, the nested config (secrets masked; `hydraloop` in it describes how the run was
    started), W&B's system metrics, and at the end status, error, best validation and `result.json`. If W&B's processes
    or the network fail, `sync.py` completes the records later.

    A resumed run continues the same W&B run. Online, repeated rows are rewound if the service can; otherwise a second
    run, `<name> (part 2)` in the same group, begins there. Offline, the file is written again completely, and the
    previous one moves to `wandb/replaced/` (with its system metrics); if that one was already uploaded, a part 2
    follows it. Changes of the config are `resume_1/…`. Each job of a sweep is a run, in a group named after the sweep.
    `WANDB_RUN_ID` and other variables for a single run are ignored, except for those that set options which are None.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only. No host sync, and nothing
    in an iteration: the follower reads what the logger has written. No state. Options: `WandbLoggerHookConf`.

    Raises:
        UserError: an option is out of range, or the run has a second hook of this class.
    """

    kind = WANDB

    def __init__(
        self,
        *,
        mode: str = "auto",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        name: str | None = None,
        pictures: bool = True,
        log_code: bool = False,
        checkpoints: str | None = None,
        system_metrics: bool = True,
        flush_timeout: float = 10.0,
    ) -> None:
        if mode not in _MODES:
            raise UserError(f"there is no mode {mode!r}", key="mode", remedy=f"Use one of {', '.join(_MODES)}.")
        check_choice(checkpoints)
        names = {"project": project, "entity": entity, "group": group, "job_type": job_type, "notes": notes}
        options = {
            "mode": mode,
            **names_of({**names, "tags": tags, "name": name}),
            "pictures": pictures,
            "log_code": log_code,
            "checkpoints": checkpoints,
            "system_metrics": system_metrics,
        }
        super().__init__(flush_timeout=flush_timeout, options=options)
        self._disabled = False

    def before_run(self, engine: Engine) -> None:
        """Start the follower, unless it is disabled."""
        self.check_only_one(engine, "make the same W&B run")
        self._disabled = is_disabled(self._options["mode"])
        if not self._disabled:
            super().before_run(engine)

    def after_run(self, engine: Engine) -> None:
        """Send the rest, in bounded time, or report that nothing was sent."""
        super().after_run(engine)
        if self._disabled:
            told = {**(engine.messages.read("tracked") or {}), self.name: "disabled, nothing was sent"}
            engine.messages.provide("tracked", lambda: told)
