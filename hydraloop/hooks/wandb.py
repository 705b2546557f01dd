"""WandbLoggerHook: the run's records at Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydraloop.errors import UserError
from hydraloop.tracking.choices import check_checkpoints, check_only_one
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.wandb.names import names_of
from hydraloop.tracking.wandb.setup import is_disabled

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_MODES = ("auto", "online", "offline", "disabled")


class WandbLoggerHook(TrackerHook):
    """Shows the run at Weights & Biases, or leaves files in `<run_dir>/wandb/` that `wandb sync` uploads.

    A process of its own makes one W&B run: each record of `metrics.jsonl` a row of its history (`train/loss`,
    `val/accuracy`, …; the record's line is W&B's step, the iteration is the axis), pictures of `visualization`, the
    config (secrets masked, nested; how it was started is under `hydraloop` in it), W&B's system metrics, and at the end
    status, error, best validation and `result.json`. Whatever happens to W&B's processes or the network, each record is
    there once in the end, with `sync.py` at the latest.

    A resumed run goes on as the same W&B run. Online the rows that were cut are taken back, where the service rewinds;
    else a run with an id of its own, `<name> (part 2)` in the same group, begins there. Offline its file is written
    anew as a whole, and the one before moves to `wandb/replaced/` (with the system metrics it has); where that one was
    uploaded already, a part 2 goes on behind it. What was changed in the config is `resume_1/…`. Each job of a sweep
    is a run, in a group with the sweep's name; `WANDB_RUN_ID` and W&B's other variables of one run are not followed,
    but for the names below, where an option is None.

    Mount points: before_run, before_train, on_log, after_run. Priority VERY_LOW: other hooks' records of an iteration
    stand in front. Rank 0 only. No host sync, and nothing in an iteration: the follower reads what the logger has
    written. No state. Errors warn: no training fails for its charts.

    Args:
        mode: `online`, `offline`, `disabled`, or `auto`: `WANDB_MODE`, else online where an API key is configured,
            else offline; never a question in the terminal.
        project: at most 128 characters, none of `/\\\\#?%:`; None: `WANDB_PROJECT`, else the experiment's name.
        entity: user or team; None: `WANDB_ENTITY`, else W&B's default.
        group: at most 128 characters; None: `WANDB_RUN_GROUP`, else the sweep's name, else the run's.
        job_type: a label; None: `WANDB_JOB_TYPE`, else none.
        tags: labels of 1 to 64 characters; None: `WANDB_TAGS`, else none.
        notes: a description; None: `WANDB_NOTES`, else none.
        name: of the run; None: `WANDB_NAME`, else the job's overrides in a sweep, else date, time and id of its
            directory.
        pictures: whether pictures are sent too.
        log_code: whether `code.patch`, the uncommitted changes of the code, is sent as a file.
        checkpoints: which are sent as artifacts of type model: `best` and `last` at the end, `all` as they are
            written; None: none.
        system_metrics: whether W&B measures the training process and its machine.
        flush_timeout: seconds that sending the rest may take after the run's end, from 0 to 86,400.

    Raises:
        UserError: one of these is not as it should be; a second hook of this class in a run.
    """

    kind = "wandb"

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
            raise UserError(f"{mode!r} is no mode", key="mode", remedy=f"Use one of {', '.join(_MODES)}.")
        check_checkpoints(checkpoints)
        names = names_of(
            {"project": project, "entity": entity, "group": group, "job_type": job_type, "tags": tags, "notes": notes}
            | {"name": name}
        )
        rest = {"pictures": pictures, "log_code": log_code, "checkpoints": checkpoints}
        rest |= {"system_metrics": system_metrics}
        super().__init__(flush_timeout=flush_timeout, options={"mode": mode, **names, **rest})
        self._disabled = False

    def before_run(self, engine: Engine) -> None:
        """Start the follower, unless it is disabled.

        Raises:
            UserError: there is another hook of this class, which would make the same W&B run.
        """
        check_only_one(engine, self, "make the same W&B run")
        self._disabled = is_disabled(self._options["mode"])
        if not self._disabled:
            super().before_run(engine)

    def after_run(self, engine: Engine) -> None:
        """Send the rest, in bounded time; or say that nothing was sent."""
        super().after_run(engine)
        if self._disabled:
            told = {**(engine.messages.read("tracked") or {}), self.name: "disabled, nothing was sent"}
            engine.messages.provide("tracked", lambda: told)
