"""WandbLoggerHook: the run's records at Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydraloop.errors import UserError
from hydraloop.tracking.hook import TrackerHook

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_MODES = ("auto", "online", "offline", "disabled")
_CHECKPOINTS = ("best", "last", "all")
_LONGEST_NAME, _LONGEST_TAG = 128, 64
_NOT_IN_PROJECTS = "/\\#?%:"


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
    is a run, in a group with the sweep's name; `WANDB_RUN_ID` and W&B's other variables of one run are not followed.

    Mount points: before_run, before_train, on_log, after_run. Priority VERY_LOW: other hooks' records of an iteration
    stand in front. Rank 0 only. No host sync, and nothing in an iteration: the follower reads what the logger has
    written. No state. Errors warn: no training fails for its charts.

    Args:
        mode: `online`, `offline`, `disabled`, or `auto`: `WANDB_MODE`, else online where an API key is configured,
            else offline; never a question in the terminal.
        project: at most 128 characters, none of `/\\\\#?%:`; None: the experiment's name.
        entity: user or team; None: W&B's default.
        group: at most 128 characters; None: the sweep's name, else the run's.
        job_type: a label; None: none.
        tags: labels of 1 to 64 characters; None: none.
        notes: a description; None: none.
        name: of the run; None: the job's overrides in a sweep, else date, time and id of its directory.
        pictures: whether pictures are sent too.
        checkpoints: which are sent as artifacts of type model: `best` and `last` at the end, `all` as they are
            written; None: none.
        system_metrics: whether W&B measures the training process and its machine.
        flush_timeout: seconds that sending the rest may take after the run's end, at least 0.

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
        checkpoints: str | None = None,
        system_metrics: bool = True,
        flush_timeout: float = 10.0,
    ) -> None:
        if mode not in _MODES:
            raise UserError(f"{mode!r} is no mode", key="mode", remedy=f"Use one of {', '.join(_MODES)}.")
        if checkpoints is not None and checkpoints not in _CHECKPOINTS:
            raise UserError(
                f"{checkpoints!r} names no checkpoints",
                key="checkpoints",
                remedy=f"Use one of {', '.join(_CHECKPOINTS)}, or null for none.",
            )
        for key, value in (("project", project), ("group", group), ("name", name)):
            if value is not None and not 1 <= len(value) <= _LONGEST_NAME:
                raise UserError(
                    f"it has {len(value)} characters", key=key, remedy=f"Use 1 to {_LONGEST_NAME}, or null."
                )
        if set(project or "") & set(_NOT_IN_PROJECTS):
            raise UserError(
                f"W&B takes no project called {project!r}",
                key="project",
                remedy=f"Use a name without any of {_NOT_IN_PROJECTS}",
            )
        labels = [str(tag) for tag in tags or ()]
        if isinstance(tags, str) or not all(1 <= len(label) <= _LONGEST_TAG for label in labels):
            raise UserError(
                f"{tags!r} is no list of labels", key="tags", remedy=f"Use a list, 1 to {_LONGEST_TAG} characters each."
            )
        super().__init__(
            flush_timeout=flush_timeout,
            options={
                "mode": mode,
                "project": project,
                "entity": entity,
                "group": group,
                "job_type": job_type,
                "tags": labels,
                "notes": notes,
                "name": name,
                "pictures": pictures,
                "checkpoints": checkpoints,
                "system_metrics": system_metrics,
            },
        )

    def before_run(self, engine: Engine) -> None:
        """Start the follower.

        Raises:
            UserError: there is another hook of this class, which would make the same W&B run.
        """
        others = [name for name, hook in engine.hooks.items() if isinstance(hook, WandbLoggerHook)]
        if len(others) > 1:
            raise UserError(
                f"{' and '.join(others)} would make the same W&B run", key=self.key, remedy="Leave one of them out."
            )
        super().before_run(engine)
